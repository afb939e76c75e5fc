#pragma once
/* What the kernels share. Each kernel file is compiled twice: with elements of bfloat16 (ELEM_BF16), and of float32.
 *
 * A "word" is 32 bits: two bfloat16 or one float32. A vector of 16 words times a vector of 16 words, summed into
 * 16 float32 lanes (`dot`), is the one operation that all matrix work here is made of.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
#define LANES 16
#define MIN(a, b) ((a) < (b) ? (a) : (b))
#define MAX(a, b) ((a) > (b) ? (a) : (b))
#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)

INLINE __mmask16 first_lanes(long n) { return n >= LANES ? 0xffff : (__mmask16)((1u << MAX(n, 0)) - 1); }

/* exp in float32: relative error below 2e-7; 0 below -87.3, never inf (the argument is capped at 88). */
INLINE __m512 exp16(__m512 x) {
    const __mmask16 alive = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.3f), _CMP_GE_OQ);
    x = _mm512_min_ps(x, _mm512_set1_ps(88.0f));
    __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)), 0);
    __m512 r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), x);
    r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
    __m512 p = _mm512_set1_ps(1.9875691500e-4f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
    p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1.0f)));
    return _mm512_maskz_scalef_ps(alive, p, n);
}

#ifdef ELEM_BF16
#define NAME(f) JOIN(f, bf16)
#define PAIR 2
typedef uint16_t elem;
#else
#define NAME(f) JOIN(f, f32)
#define PAIR 1
typedef float elem;
#endif

/* acc + a * b over the elements of each word. */
INLINE __m512 dot(__m512 acc, __m512i a, __m512i b) {
#ifdef ELEM_BF16
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
#endif
}

/* Up to 16 elements as float32, and back (to the nearest, ties to even). */
INLINE __m512 load(const elem *p, __mmask16 lanes) {
#ifdef ELEM_BF16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(lanes, p)), 16));
#else
    return _mm512_maskz_loadu_ps(lanes, p);
#endif
}

INLINE void store(elem *p, __mmask16 lanes, __m512 x) {
#ifdef ELEM_BF16
    _mm256_mask_storeu_epi16(p, lanes, (__m256i)_mm512_cvtneps_pbh(x));
#else
    _mm512_mask_storeu_ps(p, lanes, x);
#endif
}

INLINE __m512 rounded(__m512 x) {
#ifdef ELEM_BF16
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(x)), 16));
#else
    return x;
#endif
}
