#pragma once
#include "common.h"

/* Transposes LANES vectors of LANES words in place: r[w][i] was r[i][w]. */
#ifdef __aarch64__
INLINE void turn(VI r[LANES]) {
    const int32x4x2_t a = vtrnq_s32(r[0], r[1]), b = vtrnq_s32(r[2], r[3]);
    for (int i = 0; i < 2; i++) {
        r[i] = vcombine_s32(vget_low_s32(a.val[i]), vget_low_s32(b.val[i]));
        r[i + 2] = vcombine_s32(vget_high_s32(a.val[i]), vget_high_s32(b.val[i]));
    }
}
#elif defined(__AVX512F__)
INLINE void turn(VI r[LANES]) {
    VI t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const VI a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        const VI c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        r[i] = _mm512_shuffle_i32x4(a, c, 0x88), r[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
        r[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), r[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
    }
}
#else
INLINE void turn(VI r[LANES]) {
    VI t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        const VI low = r[i], high = r[i + 4];
        r[i] = _mm256_permute2x128_si256(low, high, 0x20), r[i + 4] = _mm256_permute2x128_si256(low, high, 0x31);
    }
}
#endif

/* Stores the transposed vectors: out[w * stride + i] = r[i][w]. */
INLINE void transpose(VI r[LANES], int32_t *out, const long stride) {
    turn(r);
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) vi_store(out + i * stride, r[i]);
}

#if defined(WIDEN) && !defined(__aarch64__)
#define TURN_BF16 8 /* columns of `turn_bf16` */
/* Widens and transposes bfloat16 from LANES rows: c[w][i] = row i [w]. Rows that are four apart share a vector, so that
 * nothing crosses its quarters. */
INLINE void turn_bf16(const char *base, const long *rows, VI c[TURN_BF16]) {
    const VI zero = vi_set(0);
    VI r[4];
#define QUARTER(k) _mm_loadu_si128((const __m128i *)(base + rows[i + 4 * (k)]))
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
#ifdef __AVX512F__
        r[i] = _mm512_inserti32x4(_mm512_castsi128_si512(QUARTER(0)), QUARTER(1), 1);
        r[i] = _mm512_inserti32x4(_mm512_inserti32x4(r[i], QUARTER(2), 2), QUARTER(3), 3);
#else
        r[i] = _mm256_inserti128_si256(_mm256_castsi128_si256(QUARTER(0)), QUARTER(1), 1);
#endif
    }
#undef QUARTER
    const VI a = OP(unpacklo_epi16)(r[0], r[1]), b = OP(unpackhi_epi16)(r[0], r[1]);
    const VI d = OP(unpacklo_epi16)(r[2], r[3]), e = OP(unpackhi_epi16)(r[2], r[3]);
    const VI two[4] = {OP(unpacklo_epi32)(a, d), OP(unpackhi_epi32)(a, d), OP(unpacklo_epi32)(b, e), OP(unpackhi_epi32)(b, e)};
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        c[2 * i] = OP(unpacklo_epi16)(zero, two[i]);
        c[2 * i + 1] = OP(unpackhi_epi16)(zero, two[i]);
    }
}
#endif

/* Two vectors of bfloat16 elements in words are made of one load by a single instruction each, if the first has the lower
 * half of each quarter of the load and the second the upper one. */
#if defined(ELEM_BF16) && !defined(__aarch64__)
#define TWO 2 /* vectors */
INLINE void pair_quarters(const char *row, const char *other, const int both, long d, VI c[2]) {
    const VI x = vi_load((const elem *)row + d);
#if PAIR == 2
    const VI low = x, high = both ? vi_load((const elem *)other + d) : vi_set(0);
#else
    const VI low = vi_set(0), high = x; /* widened */
#endif
    c[0] = OP(unpacklo_epi16)(low, high), c[1] = OP(unpackhi_epi16)(low, high);
}
#ifdef __AVX512F__
INLINE void by_quarters(V s[2]) {
    const V low = s[0], high = s[1];
    s[0] = _mm512_shuffle_f32x4(low, high, 0x88), s[1] = _mm512_shuffle_f32x4(low, high, 0xdd);
}
INLINE void in_order(V s[2]) {
    const __m512i first = _mm512_setr_epi64(0, 1, 8, 9, 2, 3, 10, 11), last = _mm512_setr_epi64(4, 5, 12, 13, 6, 7, 14, 15);
    const __m512d low = (__m512d)s[0], high = (__m512d)s[1];
    s[0] = (V)_mm512_permutex2var_pd(low, first, high), s[1] = (V)_mm512_permutex2var_pd(low, last, high);
}
#else
INLINE void by_quarters(V s[2]) {
    const V low = s[0], high = s[1];
    s[0] = _mm256_permute2f128_ps(low, high, 0x20), s[1] = _mm256_permute2f128_ps(low, high, 0x31);
}
INLINE void in_order(V s[2]) { by_quarters(s); } /* with two halves, it is its own inverse */
#endif
#else
#define TWO 1000 /* never */
INLINE void pair_quarters(const char *row, const char *other, const int both, long d, VI c[2]) {}
INLINE void by_quarters(V s[2]) {}
INLINE void in_order(V s[2]) {}
#endif
