/* Few rows times a packed matrix, at the speed at which memory delivers the matrix.

   A packed matrix is cut into blocks of BLOCK outputs; a block holds, word by word along the summed axis, one cell for
   each of its outputs, so that it is read once, in order, for all rows. Outputs past the last are zeros. Every output
   of every row is one chain of sums in a fixed order, whatever the number of rows or threads: what a token becomes does
   not depend, to the last bit, on how many are read with it. */

#ifndef PRODUCT_H
#define PRODUCT_H

#include <math.h>
#include <stdlib.h>

#include "numbers.h"

enum { AHEAD = 2048 }; /* words fetched ahead; a single row runs faster on the processor's own prefetching */
enum { CHUNK = 128 };  /* words of operands widened at a time */
enum { STRIP = 4 * TILE }; /* rows whose sums lie on the stack at a time, however many there are */

#if HALF && AMX && defined(__AMX_BF16__)
#include "tiles.h"
#else
enum { GROUP = TILE };
INLINE int tiled(long words) { return words < 0; }
INLINE void multiply_tiles(long rows, const word *a, long stride, const word *cells, long words, float *y, long pitch) {}
#endif

typedef struct {
    const word *cells;
    long in, out;
} Matrix;

INLINE long blocks_of(long outputs) { return (outputs + BLOCK - 1) / BLOCK; }
INLINE const word *block_at(const Matrix *w, long block) { return w->cells + block * (w->in / PAIR) * BLOCK; }

INLINE void fetch_ahead(const int rows, const word *cells) {
    if (rows > 1)
        for (int line = 0; line < BLOCK; line += 16) __builtin_prefetch(cells + AHEAD + line);
}

#if HALF && DOT && defined(__AVX512BF16__)
/* sum[r] += a[r] . cells, two bfloat16 at a time. */
INLINE void accumulate(const int rows, const word *a, long stride, const word *cells, long words, vec sum[][2]) {
    for (long k = 0; k < words; k++, cells += BLOCK) {
        __m512bh low = *(const __m512bh *)cells, high = *(const __m512bh *)(cells + LANES);
        fetch_ahead(rows, cells);
        for (int r = 0; r < rows; r++) {
            __m512bh operand = (__m512bh)_mm512_set1_epi32((int)a[r * stride + k]);
            sum[r][0] = (vec)_mm512_dpbf16_ps((__m512)sum[r][0], low, operand);
            sum[r][1] = (vec)_mm512_dpbf16_ps((__m512)sum[r][1], high, operand);
        }
    }
}
#elif HALF
/* sum[r] += a[r] . cells, in floats: operands are widened once for all outputs, weights once for all rows. */
INLINE void accumulate(const int rows, const word *a, long stride, const word *cells, long words, vec sum[][2]) {
    float wide[TILE][PAIR * CHUNK];
    for (long from = 0; from < words; from += CHUNK) {
        long some = words - from < CHUNK ? words - from : CHUNK;
        for (int r = 0; r < rows; r++)
            for (long i = 0; i < PAIR * some; i += LANES)
                *(vec *)(wide[r] + i) = fetch((const number *)(a + r * stride + from) + i, PAIR * some - i);
        for (long k = 0; k < some; k++, cells += BLOCK) {
            vec low = *(const vec *)cells, high = *(const vec *)(cells + LANES);
            fetch_ahead(rows, cells);
            for (int r = 0; r < rows; r++) {
                float first = wide[r][2 * k], second = wide[r][2 * k + 1];
                sum[r][0] += even(low) * first;
                sum[r][1] += even(high) * first;
                sum[r][0] += odd(low) * second;
                sum[r][1] += odd(high) * second;
            }
        }
    }
}
#else
/* sum[r] += a[r] . cells */
INLINE void accumulate(const int rows, const word *a, long stride, const word *cells, long words, vec sum[][2]) {
    for (long k = 0; k < words; k++, cells += BLOCK) {
        vec low = *(const vec *)cells, high = *(const vec *)(cells + LANES);
        fetch_ahead(rows, cells);
        for (int r = 0; r < rows; r++) {
            float operand = ((const float *)a)[r * stride + k];
            sum[r][0] += low * operand;
            sum[r][1] += high * operand;
        }
    }
}
#endif

INLINE void tile(const int rows, const word *a, long stride, const word *cells, long words, float *y, long pitch) {
    vec sum[TILE][2] = {0};
    accumulate(rows, a, stride, cells, words, sum);
    for (int r = 0; r < rows; r++) {
        *(vec *)(y + r * pitch) = sum[r][0];
        *(vec *)(y + r * pitch + LANES) = sum[r][1];
    }
}

/* y[r][0..BLOCK) = a[r] . cells. Rows of a are `stride` words apart, rows of y `pitch` floats. */
static void multiply(long rows, const word *a, long stride, const word *cells, long words, float *y, long pitch) {
    if (tiled(words)) {
        multiply_tiles(rows, a, stride, cells, words, y, pitch);
        return;
    }
    for (; rows > 0; rows -= TILE, a += TILE * stride, y += TILE * pitch) {
        switch (rows < TILE ? rows : TILE) {
            case 1: tile(1, a, stride, cells, words, y, pitch); break;
            case 2: tile(2, a, stride, cells, words, y, pitch); break;
            case 3: tile(3, a, stride, cells, words, y, pitch); break;
            case 4: tile(4, a, stride, cells, words, y, pitch); break;
#if defined(__AVX512F__)
            case 5: tile(5, a, stride, cells, words, y, pitch); break;
            case 6: tile(6, a, stride, cells, words, y, pitch); break;
            case 7: tile(7, a, stride, cells, words, y, pitch); break;
            case 8: tile(8, a, stride, cells, words, y, pitch); break;
#endif
        }
    }
}

/* One block of outputs of a matrix for rows of operands that lie end to end. */
INLINE void outputs(const Matrix *w, long block, long rows, const number *a, float *y) {
    multiply(rows, (const word *)a, w->in / PAIR, block_at(w, block), w->in / PAIR, y, BLOCK);
}

/* The same for any rows of y, `pitch` floats apart, that lie block by block. */
INLINE void project(const Matrix *w, long block, long rows, const number *a, float *y, long pitch) {
    multiply(rows, (const word *)a, w->in / PAIR, block_at(w, block), w->in / PAIR, y + block * BLOCK, pitch);
}

/* y[r] = w a[r] for one block of outputs, or with `onto` y[r] += scale[r] * w a[r]. */
INLINE void emit(const Matrix *w, long block, long rows, const number *a, const int onto, const float *scale, float *y) {
    float part[STRIP * BLOCK];
    for (long first = 0; first < rows; first += STRIP) {
        long some = rows - first < STRIP ? rows - first : STRIP;
        outputs(w, block, some, a + first * w->in, part);
        for (long r = 0; r < some; r++)
            for (long i = 0; i < BLOCK; i += LANES) {
                float *to = y + (first + r) * w->out + block * BLOCK + i;
                long left = w->out - block * BLOCK - i;
                vec value = *(vec *)(part + r * BLOCK + i);
                if (left <= 0) break;
                if (onto) value = load(to, left) + value * (scale ? scale[first + r] : 1.0f);
                keep(to, value, left);
            }
    }
}

INLINE float mean_square(const float *x, long width) {
    vec squares = {0};
    for (long i = 0; i < width; i += LANES) {
        vec value = load(x + i, width - i);
        squares += value * value;
    }
    return total(squares) / (float)width;
}

/* A row as operands: its RMS norm with a gain, or the row itself where there is no gain. */
INLINE void operands(const float *x, long width, const float *gain, float eps, number *to) {
    float scale = gain ? 1.0f / sqrtf(mean_square(x, width) + eps) : 1.0f;
    for (long i = 0; i < width; i += LANES) {
        vec value = load(x + i, width - i) * scale;
        if (gain) value *= load(gain + i, width - i);
        put(to + i, value, width - i);
    }
}

/* Floats as operands. */
INLINE void scaled(const float *x, long width, float scale, number *to) {
    for (long i = 0; i < width; i += LANES) put(to + i, load(x + i, width - i) * scale, width - i);
}

/* Memory for one call, handed out in pieces that start on cache lines. */
typedef struct {
    char *base, *next;
} Scratch;

INLINE size_t lines(size_t bytes) { return (bytes + 63) / 64 * 64; }

INLINE int reserve(Scratch *scratch, size_t bytes) {
    scratch->base = malloc(bytes + 64);
    scratch->next = (char *)lines((size_t)(uintptr_t)scratch->base);
    return scratch->base != 0;
}

INLINE void *piece(Scratch *scratch, size_t bytes) {
    void *start = scratch->next;
    scratch->next += lines(bytes);
    return start;
}

#endif
