#pragma once
#include "common.h"

/* Applies activation 0, silu, or 1, gelu by tanh. */
INLINE __m512 activate(__m512 x, long activation) {
    __m512 z = x; /* both are x * sigmoid(z) */
    if (activation == 1) {
        const __m512 cubic = _mm512_mul_ps(_mm512_mul_ps(x, x), _mm512_mul_ps(x, _mm512_set1_ps(0.044715f)));
        z = _mm512_mul_ps(_mm512_add_ps(x, cubic), _mm512_set1_ps(1.5957691216f));
    }
    /* The limit of 2^120 prevents 0 times infinity in the product below. */
    const __m512 power = _mm512_min_ps(_mm512_mul_ps(z, _mm512_set1_ps(-LOG2E)), _mm512_set1_ps(120.0f));
    const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), exp2_16(power));
    const __m512 guess = _mm512_rcp14_ps(below); /* 14 bits; the Newton step below makes 28 */
    return _mm512_mul_ps(x, _mm512_mul_ps(guess, _mm512_fnmadd_ps(below, guess, _mm512_set1_ps(2.0f))));
}
