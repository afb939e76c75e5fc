#pragma once
/* Vectors of LANES float32 (`V`) or 32-bit integers (`VI`), for AVX2 or AVX-512; neon.h has those of NEON.
 * Operators and `OP` serve all; the functions here have a body for each. Each function that takes a count `n` uses the first n lanes. */
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define WHOLE(n) (__builtin_constant_p(n) && (n) == LANES)
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))

#ifdef __aarch64__
#include "neon.h"
#define fetch_near(p) __builtin_prefetch(p, 0, 3)
#define fetch_far(p) __builtin_prefetch(p, 0, 2)
#define streams_done() ((void)0) /* streams are plain stores */
#else
#include <immintrin.h>
#define fetch_near(p) _mm_prefetch(p, _MM_HINT_T0)
#define fetch_far(p) _mm_prefetch(p, _MM_HINT_T1)
#define streams_done() _mm_sfence()

#ifdef __AVX512F__
#define LANES 16
#define OP(name) _mm512_##name
typedef __m512 V;
typedef __m512i VI;
#else
#define LANES 8
#define OP(name) _mm256_##name
typedef __m256 V;
typedef __m256i VI;
#endif


INLINE V v_set(float x) { return OP(set1_ps)(x); }
INLINE V v_load(const void *p) { return OP(loadu_ps)(p); }
INLINE void v_store(void *p, V x) { OP(storeu_ps)(p, x); }
INLINE VI vi_set(int32_t x) { return OP(set1_epi32)(x); }

#ifdef __AVX512F__
INLINE __mmask16 first_lanes(long n) { return n >= LANES ? 0xffff : (__mmask16)((1u << MAX(n, 0)) - 1); }
INLINE VI vi_load(const void *p) { return _mm512_loadu_si512(p); }
INLINE void vi_store(void *p, VI x) { _mm512_storeu_si512(p, x); }
INLINE void vi_stream(void *p, VI x) { _mm512_stream_si512(p, x); }
INLINE V v_load_first(const float *p, long n) {
    return WHOLE(n) ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(first_lanes(n), p);
}
INLINE void v_store_first(float *p, long n, V x) {
    if (WHOLE(n))
        _mm512_storeu_ps(p, x);
    else
        _mm512_mask_storeu_ps(p, first_lanes(n), x);
}
/* Returns x in lanes [low, end) and `other` elsewhere. */
INLINE V v_within(V x, long low, long end, V other) {
    return _mm512_mask_mov_ps(other, first_lanes(end) & (__mmask16)~first_lanes(low), x);
}
INLINE int v_any_above(V x, V y) { return _mm512_cmp_ps_mask(x, y, _CMP_GT_OQ) != 0; }
INLINE V v_or_nan(V x, V y) { return _mm512_mask_mov_ps(x, _mm512_cmp_ps_mask(y, y, _CMP_UNORD_Q), y); }
INLINE float v_sum(V x) { return _mm512_reduce_add_ps(x); }
INLINE float v_top(V x) { return _mm512_reduce_max_ps(x); }
INLINE V v_nearest(V x) { return _mm512_roundscale_ps(x, 0); }
INLINE V v_scale(V x, V n) { return _mm512_scalef_ps(x, n); }
INLINE __m256 v_halves(V v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }
INLINE V v_widen(__m256 x) { return _mm512_castps256_ps512(x); }
/* Returns x / y, where y is at least 1: 14 bits, and a Newton step makes 28. */
INLINE V v_over(V x, V y) {
    const V guess = _mm512_rcp14_ps(y);
    return x * (guess * _mm512_fnmadd_ps(y, guess, v_set(2.0f)));
}
#else
INLINE VI vi_load(const void *p) { return _mm256_loadu_si256(p); }
INLINE void vi_store(void *p, VI x) { _mm256_storeu_si256(p, x); }
INLINE void vi_stream(void *p, VI x) { _mm256_stream_si256(p, x); }
INLINE VI first_lanes(long n) {
    const VI at = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
    return _mm256_cmpgt_epi32(vi_set((int)MAX(-1, MIN(n, LANES))), at);
}
INLINE V v_load_first(const float *p, long n) { return WHOLE(n) ? v_load(p) : _mm256_maskload_ps(p, first_lanes(n)); }
INLINE void v_store_first(float *p, long n, V x) {
    if (WHOLE(n))
        v_store(p, x);
    else
        _mm256_maskstore_ps(p, first_lanes(n), x);
}
INLINE V v_within(V x, long low, long end, V other) {
    return _mm256_blendv_ps(other, x, (V)_mm256_andnot_si256(first_lanes(low), first_lanes(end)));
}
INLINE int v_any_above(V x, V y) { return _mm256_movemask_ps(_mm256_cmp_ps(x, y, _CMP_GT_OQ)) != 0; }
INLINE V v_or_nan(V x, V y) { return _mm256_blendv_ps(x, y, _mm256_cmp_ps(y, y, _CMP_UNORD_Q)); }
#define REDUCED(x, f)                                                                                                  \
    __m128 v = f##_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));                                         \
    v = f##_ps(v, _mm_movehl_ps(v, v));                                                                                \
    return _mm_cvtss_f32(f##_ss(v, _mm_movehdup_ps(v)))
INLINE float v_sum(V x) { REDUCED(x, _mm_add); }
INLINE float v_top(V x) { REDUCED(x, _mm_max); }
INLINE V v_nearest(V x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
/* Returns x times 2^n for n from -200 on, by two steps because 2^n itself may be out of range. */
INLINE V v_scale(V x, V n) {
    const VI all = _mm256_cvtps_epi32(_mm256_min_ps(v_set(254.0f), n)), half = _mm256_srai_epi32(all, 1);
    const VI bias = vi_set(127);
    const V first = (V)_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23);
    return x * first * (V)_mm256_slli_epi32(_mm256_add_epi32(_mm256_sub_epi32(all, half), bias), 23);
}
INLINE __m256 v_halves(V v) { return v; }
INLINE V v_widen(__m256 x) { return x; }
INLINE V v_over(V x, V y) { return x / y; }
#endif

INLINE V v_from_bf16(const uint16_t *p) {
#ifdef __AVX512F__
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
#else
    return (V)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
#endif
}
#endif

/* Rounds to bfloat16, to the nearest, ties to even, and keeps NaN. */
INLINE V v_narrow(V x) {
    const VI odd = OP(srli_epi32)((VI)x, 16) & vi_set(1);
    const VI near = OP(add_epi32)((VI)x, OP(add_epi32)(odd, vi_set(0x7fff)));
    return v_or_nan((V)(near & vi_set((int)0xffff0000)), x);
}

#ifdef __aarch64__
typedef uint16x4_t v_bf16;
INLINE v_bf16 v_to_bf16(V x) { return vshrn_n_u32(vreinterpretq_u32_f32(v_narrow(x)), 16); }
#elif defined(__AVX512F__)
typedef __m256i v_bf16;
#ifdef __AVX512BF16__
INLINE v_bf16 v_to_bf16(V x) { return (__m256i)_mm512_cvtneps_pbh(x); }
#else
INLINE v_bf16 v_to_bf16(V x) { return _mm512_cvtepi32_epi16(_mm512_srli_epi32((VI)v_narrow(x), 16)); }
#endif
#else
typedef __m128i v_bf16;
INLINE v_bf16 v_to_bf16(V x) {
    const VI bits = _mm256_srli_epi32((VI)v_narrow(x), 16);
    return _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
}
#endif
