/* Norms, rotary positions with the write to the KV cache, and the gate, in one pass over memory each. */
#include "activate.h"
#include "kv_levels.h"

typedef struct {
    elem *x, *out;
    const elem *delta, *weight; /* delta is added to x in place first, unless NULL */
    long rows, width;
    float eps;
} norm_args;

INLINE void norm_row(const elem *x, const elem *weight, elem *out, long width, float eps) {
    V squares = v_set(0);
    EACH_VECTOR(i, lanes, width, {
        const V v = load(x + i, lanes);
        squares = OP(fmadd_ps)(v, v, squares);
    });
    const V scale = v_set(1.0f / sqrtf(v_sum(squares) / width + eps));
    EACH_VECTOR(i, lanes, width, {
        /* Rounded before the multiplication with the weight, as in training. */
        const V normed = rounded(load(x + i, lanes) * scale);
        store(out + i, lanes, normed * load(weight + i, lanes));
    });
}

void NAME(norm)(const norm_args * a, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && a->rows * a->width > 16384)
    for (long r = 0; r < a->rows; r++) {
        elem *x = a->x + r * a->width;
        const elem *delta = a->delta ? a->delta + r * a->width : NULL;
        if (delta)
            EACH_VECTOR(i, lanes, a->width,
                        { store(x + i, lanes, load(x + i, lanes) + load(delta + i, lanes)); });
        norm_row(x, a->weight, a->out + r * a->width, a->width, a->eps);
    }
}

typedef struct {
    elem *qkv;
    char *keys, *values; /* strides are in bytes */
    const elem *cos, *sin, *q_norm, *k_norm; /* norms may be NULL */
    const int64_t *slots;
    long rows, heads, kv_heads, dim, block_size, k_block, k_token, k_head, v_block, v_token, v_head;
    long levels; /* whether the cache is int8 */
    float eps;
} rotate_args;

/* Rotates pairs (i, i + half) of x into `to`. Products and differences are rounded as in the torch kernels. */
INLINE void rotate_head(const elem *x, const elem *cos, const elem *sin, elem *to, long half) {
    EACH_VECTOR(i, lanes, half, {
        const V a = load(x + i, lanes), b = load(x + half + i, lanes);
        const V c = load(cos + i, lanes), s = load(sin + i, lanes);
        const V bs = rounded(b * s), ac = rounded(a * c), as = rounded(a * s), bc = rounded(b * c);
        const V first = ac - bs, second = bc + as;
        store(to + i, lanes, first);
        store(to + half + i, lanes, second);
    });
}

void NAME(rotate_and_store)(const rotate_args * a, int threads) {
    const long half = a->dim / 2, all = a->heads + 2 * a->kv_heads;
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && a->rows * all * a->dim > 16384)
    for (long r = 0; r < a->rows; r++) {
        elem *row = a->qkv + r * all * a->dim;
        const elem *cos = a->cos + r * half, *sin = a->sin + r * half;
        const long block = a->slots[r] / a->block_size, offset = a->slots[r] % a->block_size;
        char *keys = a->keys + block * a->k_block + offset * a->k_token;
        char *values = a->values + block * a->v_block + offset * a->v_token;
        for (long h = 0; h < a->heads + a->kv_heads; h++) {
            elem *x = row + h * a->dim;
            const elem *norm = h < a->heads ? a->q_norm : a->k_norm;
            if (norm) norm_row(x, norm, x, a->dim, a->eps);
            char *key = keys + (h - a->heads) * a->k_head;
            const int cached = h >= a->heads;
            rotate_head(x, cos, sin, cached && !a->levels ? (elem *)key : x, half);
            if (cached && a->levels) store_levels(x, (int8_t *)key, a->dim);
        }
        for (long h = 0; h < a->kv_heads; h++) {
            const elem *x = row + (a->heads + a->kv_heads + h) * a->dim;
            char *value = values + h * a->v_head;
            if (a->levels)
                store_levels(x, (int8_t *)value, a->dim);
            else
                memcpy(value, x, a->dim * sizeof(elem));
        }
    }
}

typedef struct {
    const elem *gate_up;
    elem *out;
    long rows, width; /* of out */
    long activation;  /* as in `activate` */
} gate_args;

INLINE void gate_vector(const elem *gate, const elem *up, elem *out, long lanes, int activation) {
    store(out, lanes, rounded(activate(load(gate, lanes), activation)) * load(up, lanes));
}

void NAME(gate)(const gate_args * a, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && a->rows * a->width > 16384)
    for (long r = 0; r < a->rows; r++) {
        const elem *gate = a->gate_up + r * 2 * a->width, *up = gate + a->width;
        elem *out = a->out + r * a->width;
        switch (a->activation) {
        case 0: EACH_VECTOR(i, lanes, a->width, { gate_vector(gate + i, up + i, out + i, lanes, 0); }); break;
        case 1: EACH_VECTOR(i, lanes, a->width, { gate_vector(gate + i, up + i, out + i, lanes, 1); }); break;
        case 2: EACH_VECTOR(i, lanes, a->width, { gate_vector(gate + i, up + i, out + i, lanes, 2); }); break;
        }
    }
}
