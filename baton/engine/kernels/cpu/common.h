#pragma once
/* Code shared by all kernels. Each kernel file is compiled twice: for bfloat16 elements (ELEM_BF16) and for float32.
 * A "word" is 32 bits: two bfloat16 or one float32. All matrix products consist of one operation, `dot`: a vector of 16
 * words times a vector of 16 words, summed into 16 float32 lanes. */
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

#define LOG2E 1.4426950408889634f

#ifdef ELEM_BF16
#define NAME(f) JOIN(f, bf16)
#define PAIR 2
typedef uint16_t elem;
#else
#define NAME(f) JOIN(f, f32)
#define PAIR 1
typedef float elem;
#endif

/* Returns acc + a * b over the elements of each word. */
INLINE __m512 dot(__m512 acc, __m512i a, __m512i b) {
#ifdef ELEM_BF16
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), acc);
#endif
}

#define ALL ((__mmask16)0xffff)
#define WHOLE(lanes) (__builtin_constant_p(lanes) && (lanes) == ALL)

/* Runs the code for each vector of `n` elements. For whole vectors `lanes` is a constant, which is much faster. */
#define EACH_VECTOR(i, lanes, n, ...)                                                                                  \
    do {                                                                                                               \
        long i = 0;                                                                                                    \
        for (; i + LANES <= (n); i += LANES) {                                                                         \
            const __mmask16 lanes = ALL;                                                                               \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        if (i < (n)) {                                                                                                 \
            const __mmask16 lanes = first_lanes((n) - i);                                                              \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    } while (0)

/* `load` converts up to 16 elements to float32; `store` converts back to the nearest, ties to even. */
INLINE __m512 load(const elem *p, __mmask16 lanes) {
#ifdef ELEM_BF16
    const __m256i bits = WHOLE(lanes) ? _mm256_loadu_si256((const __m256i *)p) : _mm256_maskz_loadu_epi16(lanes, p);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(bits), 16));
#else
    return WHOLE(lanes) ? _mm512_loadu_ps(p) : _mm512_maskz_loadu_ps(lanes, p);
#endif
}

INLINE void store(elem *p, __mmask16 lanes, __m512 x) {
#ifdef ELEM_BF16
    const __m256i bits = (__m256i)_mm512_cvtneps_pbh(x);
    if (WHOLE(lanes))
        _mm256_storeu_si256((__m256i *)p, bits);
    else
        _mm256_mask_storeu_epi16(p, lanes, bits);
#else
    if (WHOLE(lanes))
        _mm512_storeu_ps(p, x);
    else
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

/* Returns 2^x for x up to 127, and 0 below about -150, for softmax and gates. Uses a minimax polynomial on [-1/2, 1/2]
 * with a relative error below 2e-7, or below 5e-6 for bfloat16, which keeps 8 bits. */
INLINE __m512 exp2_16(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-200.0f), x); /* this order preserves NaN */
    const __m512 n = _mm512_roundscale_ps(x, 0), f = _mm512_sub_ps(x, n);
#ifdef ELEM_BF16
    __m512 p = _mm512_set1_ps(9.582851877e-03f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.590642708e-02f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402409866e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931241931e-01f));
#else
    __m512 p = _mm512_set1_ps(1.535336094e-04f);
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.339887471e-03f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(9.618437364e-03f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(5.550332470e-02f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(2.402264791e-01f));
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(6.931472029e-01f));
#endif
    p = _mm512_fmadd_ps(p, f, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, n);
}
