#pragma once
#include "common.h"

/* Returns x times the normal distribution at x, by formula 7.1.26 of Abramowitz and Stegun. Its error
 * is at most 8e-8 in the distribution. */
INLINE V gelu(V x) {
    const V size = OP(min_ps)(v_set(1e30f), OP(max_ps)(x, -x)); /* this order preserves NaN */
    const V t = v_over(v_set(1.0f), v_set(1.0f) + size * v_set(0.2316418882f));
    V tail = v_set(0.5307027145f);
    tail = OP(fmadd_ps)(tail, t, v_set(-0.7265760135f));
    tail = OP(fmadd_ps)(tail, t, v_set(0.7107068705f));
    tail = OP(fmadd_ps)(tail, t, v_set(-0.142248368f));
    tail = OP(fmadd_ps)(tail, t, v_set(0.127414796f));
    tail = tail * t * exp2_v(size * size * v_set(-0.5f * LOG2E));
    return OP(fnmadd_ps)(size, tail, OP(max_ps)(v_set(0.0f), x));
}

/* Applies activation 0, silu, 1, gelu by tanh, or 2, gelu. */
INLINE V activate(V x, long activation) {
    if (activation == 2) return gelu(x);
    V z = x; /* both are x * sigmoid(z) */
    if (activation == 1) {
        const V cubic = (x * x) * (x * v_set(0.044715f));
        z = (x + cubic) * v_set(1.5957691216f);
    }
    /* The limit of 2^120 prevents 0 times infinity in the product below. */
    const V power = OP(min_ps)(z * v_set(-LOG2E), v_set(120.0f));
    return v_over(x, v_set(1.0f) + exp2_v(power));
}
