/* Numbers, vectors, and the arithmetic that everything else is made of.

   HALF = 1 stores weights, caches and operands as bfloat16, HALF = 0 as float; sums are always float. Numbers are
   multiplied in words of 32 bits: two bfloat16 that follow each other along the summed axis, or one float. A vector
   holds LANES sums; BLOCK outputs are computed side by side for up to TILE rows, which fills the registers. */

#ifndef NUMBERS_H
#define NUMBERS_H

#include <stdint.h>
#include <string.h>

#if defined(__AVX512F__)
#include <immintrin.h>
enum { LANES = 16, TILE = 8 };
#else
enum { LANES = 8, TILE = 4 };
#endif
enum { BLOCK = 2 * LANES };

typedef uint32_t word;
#if HALF
typedef uint16_t number;
enum { PAIR = 2 };
#else
typedef float number;
enum { PAIR = 1 };
#endif

#define VECTOR __attribute__((vector_size(4 * LANES), aligned(4), may_alias))
typedef float vec VECTOR;
typedef int32_t ints VECTOR;
typedef uint32_t uints VECTOR;
typedef uint16_t halves __attribute__((vector_size(2 * LANES), aligned(2), may_alias));

#define INLINE static inline __attribute__((always_inline))

/* The bfloat16 at an even and at an odd place of each word, as floats. */
INLINE vec even(vec words) { return (vec)((uints)words << 16); }
INLINE vec odd(vec words) { return (vec)((uints)words & 0xffff0000u); }

/* Up to LANES floats; lanes past `left` are 0. */
INLINE vec load(const float *from, long left) {
    if (left >= LANES) return *(const vec *)from;
    vec value = {0};
    memcpy(&value, from, (size_t)left * sizeof(float));
    return value;
}

/* The first min(left, LANES) lanes as floats. */
INLINE void keep(float *to, vec value, long left) {
    if (left >= LANES)
        *(vec *)to = value;
    else
        memcpy(to, &value, (size_t)left * sizeof(float));
}

/* The first min(left, LANES) lanes as numbers, rounded to nearest, ties to even. */
INLINE void put(number *to, vec value, long left) {
#if HALF
    uints bits = (uints)value;
    bits = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    halves rounded = __builtin_convertvector(bits, halves);
    if (left >= LANES)
        *(halves *)to = rounded;
    else
        memcpy(to, &rounded, (size_t)left * sizeof(number));
#else
    keep(to, value, left);
#endif
}

/* Up to LANES numbers as floats; lanes past `left` are 0. */
INLINE vec fetch(const number *from, long left) {
#if HALF
    halves value = {0};
    if (left >= LANES)
        value = *(const halves *)from;
    else
        memcpy(&value, from, (size_t)left * sizeof(number));
    return (vec)(__builtin_convertvector(value, uints) << 16);
#else
    return load(from, left);
#endif
}

INLINE vec choose(ints where, vec yes, vec no) { return (vec)(((ints)yes & where) | ((ints)no & ~where)); }

#if defined(__AVX512F__)
INLINE int any(ints where) { return _mm512_test_epi32_mask((__m512i)where, (__m512i)where) != 0; }
INLINE float total(vec value) { return _mm512_reduce_add_ps((__m512)value); }
INLINE float largest(vec value) { return _mm512_reduce_max_ps((__m512)value); }
#else
INLINE int any(ints where) {
    int32_t bits = 0;
    for (int lane = 0; lane < LANES; lane++) bits |= where[lane];
    return bits != 0;
}

INLINE float total(vec value) {
    float sums[LANES];
    memcpy(sums, &value, sizeof sums);
    for (int n = LANES / 2; n > 0; n /= 2)
        for (int lane = 0; lane < n; lane++) sums[lane] += sums[lane + n];
    return sums[0];
}

INLINE float largest(vec value) {
    float most = value[0];
    for (int lane = 1; lane < LANES; lane++) most = value[lane] > most ? value[lane] : most;
    return most;
}
#endif

/* e^x to about two units in the last place, exactly 0 below -87: 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2]. */
INLINE vec exponential(vec x) {
    const float shift = 12582912.0f; /* 1.5 * 2^23: adding it rounds to a whole number, held in the low bits */
    const vec zero = {0};
    ints inside = x > -87.0f;
    x = choose(inside, x, zero);
    x = choose(x < 88.0f, x, zero + 88.0f);
    vec shifted = x * 1.44269504f + shift;
    vec n = shifted - shift;
    vec r = x - n * 0.693359375f + n * 2.12194440e-4f;
    vec p = r * 1.9875691e-4f + 1.3981999e-3f;
    p = p * r + 8.3334519e-3f;
    p = p * r + 4.1665796e-2f;
    p = p * r + 1.6666665e-1f;
    p = p * r + 5.0000001e-1f;
    p = p * r * r + r + 1.0f;
    ints power = ((ints)shifted - 0x4b400000 + 127) << 23;
    return choose(inside, p * (vec)power, zero);
}

INLINE vec sigmoid(vec x) { return 1.0f / (1.0f + exponential(-x)); }

#endif
