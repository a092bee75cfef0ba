/* Products on the matrix unit of Intel processors (AMX): up to 32 rows times 32 outputs at once.

   A packed matrix lies in memory as the unit wants it: 16 words of 16 outputs are one of its tiles. A matrix whose
   summed axis is no whole number of tiles is left to the vector code, whatever the number of rows, so that the order
   in which an output is summed depends on the matrix alone. */

#ifndef TILES_H
#define TILES_H

#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { SIDE = 16, GROUP = 2 * SIDE }; /* rows, and words, of a tile; most rows at once */

typedef struct {
    uint8_t palette, start, unused[14];
    uint16_t bytes[16]; /* of a row of each tile */
    uint8_t rows[16];
} Shape;

INLINE int tiled(long words) { return words % SIDE == 0; }

/* Tiles 0-3 hold sums, 4 and 5 operands of the first and the other rows, 6 and 7 weights. */
INLINE void shape(long first, long other) {
    Shape s = {.palette = 1, .bytes = {64, 64, 64, 64, 64, 64, 64, 64}};
    const long rows[8] = {first, first, other, other, first, other, SIDE, SIDE};
    for (int i = 0; i < 8; i++) s.rows[i] = (uint8_t)(rows[i] > 0 ? rows[i] : 1);
    _tile_loadconfig(&s);
}

INLINE void fetch_tiles(const word *cells, long lines) {
    for (long line = 0; line < lines; line++) __builtin_prefetch(cells + AHEAD + line * 16);
}

/* Sums of one or two tiles of rows. */
INLINE void sum_tiles(const int two, const word *a, long stride, const word *cells, long words, float *y, long pitch) {
    const word *b = a + SIDE * stride;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (long k = 0; k < words; k += SIDE, cells += SIDE * BLOCK) {
        fetch_tiles(cells, 2 * SIDE);
        _tile_loadd(4, a + k, 4 * stride);
        _tile_loadd(6, cells, 4 * BLOCK);
        _tile_loadd(7, cells + SIDE, 4 * BLOCK);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        if (two) {
            _tile_loadd(5, b + k, 4 * stride);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
        }
    }
    _tile_stored(0, y, 4 * pitch);
    _tile_stored(1, y + SIDE, 4 * pitch);
    if (two) {
        _tile_stored(2, y + SIDE * pitch, 4 * pitch);
        _tile_stored(3, y + SIDE * pitch + SIDE, 4 * pitch);
    }
}

/* As `multiply`. Others use the unit too, so its shape is set anew at every call. */
INLINE void multiply_tiles(long rows, const word *a, long stride, const word *cells, long words, float *y, long pitch) {
    long shaped = 0;
    for (; rows > 0; rows -= GROUP, a += GROUP * stride, y += GROUP * pitch) {
        long now = rows < GROUP ? rows : GROUP;
        if (now != shaped) shape(now < SIDE ? now : SIDE, now - SIDE);
        shaped = now;
        if (now > SIDE)
            sum_tiles(1, a, stride, cells, words, y, pitch);
        else
            sum_tiles(0, a, stride, cells, words, y, pitch);
    }
}

#endif
