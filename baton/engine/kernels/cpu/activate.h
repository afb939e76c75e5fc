#pragma once
#include "common.h"

/* Applies activation 0, silu, or 1, gelu by tanh. */
INLINE V activate(V x, long activation) {
    V z = x; /* both are x * sigmoid(z) */
    if (activation == 1) {
        const V cubic = (x * x) * (x * v_set(0.044715f));
        z = (x + cubic) * v_set(1.5957691216f);
    }
    /* The limit of 2^120 prevents 0 times infinity in the product below. */
    const V power = OP(min_ps)(z * v_set(-LOG2E), v_set(120.0f));
    return v_over(x, v_set(1.0f) + exp2_v(power));
}
