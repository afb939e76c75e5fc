#pragma once
/* Code shared by all kernels. Each kernel file is compiled for each level of instructions, and twice there: for bfloat16
 * elements (ELEM_BF16) and for float32. A "word" is 32 bits. It has two bfloat16 where the processor multiplies those
 * (PAIR is 2). Elsewhere it has one float32, to which bfloat16 is widened (WIDEN). All matrix products consist of one
 * operation, `dot`: a vector of words times a vector of words, summed into float32 lanes. */
#include <math.h>
#include <omp.h>
#include <stddef.h>

#include "vec.h"

#define JOIN2(a, b) a##_##b
#define JOIN(a, b) JOIN2(a, b)
#define LOG2E 1.4426950408889634f

#ifdef ELEM_BF16
#define NAME(f) JOIN(f, bf16)
typedef uint16_t elem;
#else
#define NAME(f) JOIN(f, f32)
typedef float elem;
#endif

#if defined(ELEM_BF16) && defined(__AVX512BF16__)
#define PAIR 2
typedef uint16_t part_t; /* an element in a word */
#else
#define PAIR 1
typedef float part_t;
#ifdef ELEM_BF16
#define WIDEN
#endif
#endif
#define WORDS(n) (((n) + PAIR - 1) / PAIR)

/* Returns acc + a * b over the parts of each word. */
INLINE V dot(V acc, VI a, VI b) {
#if PAIR == 2
    return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b);
#else
    return OP(fmadd_ps)((V)a, (V)b, acc);
#endif
}

/* Runs the code for each vector of `n` elements. For whole vectors `lanes` is a constant, which is much faster. */
#define EACH_VECTOR(i, lanes, n, ...)                                                                                  \
    do {                                                                                                               \
        long i = 0;                                                                                                    \
        for (; i + LANES <= (n); i += LANES) {                                                                         \
            const long lanes = LANES;                                                                                  \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
        if (i < (n)) {                                                                                                 \
            const long lanes = (n) - i;                                                                                \
            __VA_ARGS__                                                                                                \
        }                                                                                                              \
    } while (0)

/* `load` converts the first `lanes` elements to float32; `store` converts back to the nearest, ties to even. */
INLINE V load(const elem *p, long lanes) {
#ifndef ELEM_BF16
    return v_load_first(p, lanes);
#else
    if (WHOLE(lanes)) return v_from_bf16(p);
#ifdef __AVX512F__
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first_lanes(lanes), p)), 16);
#else
    elem all[LANES] = {0};
    memcpy(all, p, MIN(lanes, LANES) * sizeof(elem));
    return v_from_bf16(all);
#endif
#endif
}

INLINE void store(elem *p, long lanes, V x) {
#ifndef ELEM_BF16
    v_store_first(p, lanes, x);
#else
    const v_bf16 bits = v_to_bf16(x);
    if (WHOLE(lanes))
        memcpy(p, &bits, sizeof bits);
    else
#ifdef __AVX512F__
        _mm256_mask_storeu_epi16(p, first_lanes(lanes), bits);
#else
        memcpy(p, &bits, MIN(lanes, LANES) * sizeof(elem));
#endif
#endif
}

INLINE V rounded(V x) {
#if PAIR == 2
    return (V)_mm512_slli_epi32(_mm512_cvtepu16_epi32(v_to_bf16(x)), 16);
#elif defined(WIDEN)
    return v_narrow(x);
#else
    return x;
#endif
}

/* Loads `n` words, at most LANES, from `p`. The rest is zero. */
INLINE VI load_words(const elem *p, long n) {
#ifdef WIDEN
    return (VI)load(p, n);
#else
    return WHOLE(n) ? vi_load(p) : (VI)v_load_first((const float *)p, n);
#endif
}

/* Loads `n` elements as words, at most a vector of them. The rest is zero. */
INLINE VI load_parts(const elem *p, long n) {
#if PAIR == 2
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
#else
    return (VI)load(p, n);
#endif
}

INLINE void store_parts(part_t *p, V x) {
#if PAIR == 2
    store(p, LANES, x);
#else
    v_store(p, x);
#endif
}

/* Returns 2^x for x up to 127, and 0 below about -150, for softmax and gates. Uses a minimax polynomial on [-1/2, 1/2]
 * with a relative error below 2e-7, or below 5e-6 for bfloat16, which keeps 8 bits. */
INLINE V exp2_v(V x) {
    x = OP(max_ps)(v_set(-200.0f), x); /* this order preserves NaN */
    const V n = v_nearest(x), f = x - n;
#ifdef ELEM_BF16
    V p = v_set(9.582851877e-03f);
    p = OP(fmadd_ps)(p, f, v_set(5.590642708e-02f));
    p = OP(fmadd_ps)(p, f, v_set(2.402409866e-01f));
    p = OP(fmadd_ps)(p, f, v_set(6.931241931e-01f));
#else
    V p = v_set(1.535336094e-04f);
    p = OP(fmadd_ps)(p, f, v_set(1.339887471e-03f));
    p = OP(fmadd_ps)(p, f, v_set(9.618437364e-03f));
    p = OP(fmadd_ps)(p, f, v_set(5.550332470e-02f));
    p = OP(fmadd_ps)(p, f, v_set(2.402264791e-01f));
    p = OP(fmadd_ps)(p, f, v_set(6.931472029e-01f));
#endif
    p = OP(fmadd_ps)(p, f, v_set(1.0f));
    return v_scale(p, n);
}
