/* y = x W^T + b for many rows of x. Groups of rows of x are transposed once into the lanes of vectors. Each word of W is
 * multiplied with all rows of a group. Nothing is summed over lanes. W is used as it lies, or its rows of one task are
 * packed (PACK): widened, with the words of a tile next to each other. */
#include "activate.h"
#include "common.h"
#include "transpose.h"

#define TALL 6                       /* rows of W in a tile */
#ifdef __AVX512F__
#define GROUP 64                     /* rows of x */
#define BLOCK_WORDS 1024             /* of K, so that a block of transposed rows stays in the second-level cache */
#else
#define GROUP 16
#define BLOCK_WORDS 256              /* the same for the first-level cache */
#endif
#define VECTORS (GROUP / LANES)
#define BACK LANES /* words of a row that is transposed back */
#define SLAB 192                     /* most rows of W per task of a thread */
#define SLAB_BYTES (400 << 10)       /* and most bytes, which stay in the second-level cache too */
#if defined(WIDEN) || !defined(__AVX512F__)
#define PACK
#endif

/* Transposes rows of x from g * GROUP on to out[word * GROUP + row]. Rows after the last one are zero. */
static void transpose_rows(const linear_args *a, long g, int32_t *out) {
    const long words = WORDS(a->k);
    for (long r = 0; r < GROUP; r += LANES)
        for (long w = 0; w < words; w += LANES) {
            VI rows[LANES];
            for (long i = 0; i < LANES; i++) {
                const long row = g * GROUP + r + i;
                const long left = MIN((long)LANES * PAIR, a->k - w * PAIR);
                const elem *from = (const elem *)a->x + row * a->stride_x + w * PAIR;
                rows[i] = row >= a->rows ? vi_set(0) : left == LANES * PAIR ? load_words(from, LANES) : load_parts(from, left);
            }
            transpose(rows, out + w * GROUP + r, GROUP);
        }
}

#ifdef PACK
/* Packs `count` rows of W to out[(tile * words + word) * TALL + row]. The rows after `count` are zero. */
static void pack_rows(const elem *w, long k, long count, int32_t *out) {
    for (long n = 0; n < count; n += TALL)
        for (long at = 0; at < k; at += LANES)
            for (long r = 0; r < TALL; r += LANES) { /* once, unless vectors are shorter than TALL */
                VI rows[LANES] = {0};
                int32_t turned[LANES * LANES];
                const long some = MIN(MIN(LANES, TALL - r), count - n - r), left = k - at;
                for (long i = 0; i < some; i++) {
                    const elem *from = w + (n + r + i) * k + at;
                    rows[i] = left >= LANES ? load_words(from, LANES) : load_words(from, left);
                }
                transpose(rows, turned, LANES);
                int32_t *to = out + (n / TALL * k + at) * TALL + r;
                for (long i = 0; i < MIN(LANES, left); i++)
                    memcpy(to + i * TALL, turned + i * LANES, MIN(LANES, TALL - r) * sizeof(int32_t));
            }
}
#define NEXT_WORD TALL
typedef int32_t tall_w;
#else
#define NEXT_WORD 1
typedef elem tall_w;
#endif

/* sums[i][0..LANES v) += products of `n` rows of W with the transposed rows, over `words` words. */
INLINE void tall_tile(const tall_w *w, long stride, const int32_t *x, long words, float *sums, const int n,
                      const int v) {
    V acc[TALL][VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) acc[i][j] = v_load(sums + i * GROUP + j * LANES);
    for (long k = 0; k < words; k++) {
        VI xv[VECTORS];
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) xv[j] = vi_load(x + k * GROUP + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            const VI wv = vi_set(((const int32_t *)(w + i * stride))[k * NEXT_WORD]);
#pragma GCC unroll 4
            for (int j = 0; j < v; j++) acc[i][j] = dot(acc[i][j], wv, xv[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) v_store(sums + i * GROUP + j * LANES, acc[i][j]);
}

/* Adds the odd element at the end of each row of W. The last word of rows of x is padded with zero. */
static void last_element(const linear_args *a, long n, long count, const int32_t *x, float *sums) {
    for (long i = 0; i < count; i++) {
        const VI w = vi_set((int)a->w[(n + i) * a->k + a->k - 1]);
        for (int j = 0; j < VECTORS; j++) {
            float *at = sums + i * GROUP + j * LANES;
            v_store(at, dot(v_load(at), w, vi_load(x + j * LANES)));
        }
    }
}

/* Multiplies `count` rows of W from word `k` on. `packed` has all of these rows, if they are packed. */
INLINE void tall(const linear_args *a, long n, const int32_t *packed, long count, long k, long words, const int32_t *x,
                 float *sums, const int v) {
    long i = 0;
#ifdef PACK
    for (; i < count; i += TALL)
        tall_tile(packed + (i * a->k + k * TALL), 1, x, words, sums + i * GROUP, TALL, v);
    (void)n;
#else
    const elem *w = a->w + n * a->k + k * PAIR;
    for (; i + TALL <= count; i += TALL) tall_tile(w + i * a->k, a->k, x, words, sums + i * GROUP, TALL, v);
    for (; i < count; i++) tall_tile(w + i * a->k, a->k, x, words, sums + i * GROUP, 1, v);
    (void)packed;
#endif
}

/* Multiplies one transposed group of rows of x with rows [n, n + count) of W. */
static void group_sums(const linear_args *a, long g, long n, const int32_t *packed, long count, const int32_t *x,
                       float *sums) {
    const long whole = a->k / PAIR, vectors = (MIN(GROUP, a->rows - g * GROUP) + LANES - 1) / LANES;
    memset(sums, 0, (count + TALL - 1) / TALL * TALL * GROUP * sizeof(float));
    for (long k = 0; k < whole; k += BLOCK_WORDS) {
        const long words = MIN(BLOCK_WORDS, whole - k);
        switch (vectors) {
        case 1: tall(a, n, packed, count, k, words, x + k * GROUP, sums, 1); break;
#if VECTORS > 2
        case 2: tall(a, n, packed, count, k, words, x + k * GROUP, sums, 2); break;
        case 3: tall(a, n, packed, count, k, words, x + k * GROUP, sums, 3); break;
#endif
        default: tall(a, n, packed, count, k, words, x + k * GROUP, sums, VECTORS);
        }
    }
    if (whole * PAIR < a->k) last_element(a, n, count, x + whole * GROUP, sums);
}

/* Transposes sums of W rows [n, n + count) back to y, in whole cache lines, because rows of y may share a cache set. */
static void put_back(const linear_args *a, long g, long n, long count, const float *sums) {
    const long rows = MIN(GROUP, a->rows - g * GROUP);
    int32_t back[2][LANES * BACK];
    for (long r = 0; r < rows; r += LANES)
        for (long i = 0; i < count; i += 2 * LANES) {
            for (long half = 0; half < 2; half++) {
                const float *from = sums + (i + half * LANES) * GROUP + r;
                VI v[LANES];
                for (long j = 0; j < LANES; j++) v[j] = vi_load(from + j * GROUP);
                transpose(v, back[half], BACK);
            }
            for (long j = 0; j < MIN(LANES, rows - r); j++)
                for (long half = 0, at = i; half < 2 && at < count; half++, at += LANES) {
                    const V sum = v_load((float *)back[half] + j * BACK);
                    if (count - at >= LANES)
                        put(a, g * GROUP + r + j, n + at, LANES, sum);
                    else
                        put(a, g * GROUP + r + j, n + at, (int)(count - at), sum);
                }
        }
}

/* The same for a gated pair: sums of the gate, and `apart` rows after them those of the other half of W. */
static void put_gated(const linear_args *a, long g, long n, long count, const float *sums, long apart, int activation) {
    const long rows = MIN(GROUP, a->rows - g * GROUP), width = a->n / 2;
    int32_t back[4][LANES * BACK];
    for (long r = 0; r < rows; r += LANES)
        for (long i = 0; i < count; i += 2 * LANES) {
            for (long part = 0; part < 4; part++) {
                const float *from = sums + (i + part / 2 * LANES + part % 2 * apart) * GROUP + r;
                VI v[LANES];
                for (long j = 0; j < LANES; j++) v[j] = vi_load(from + j * GROUP);
                transpose(v, back[part], BACK);
            }
            for (long j = 0; j < MIN(LANES, rows - r); j++)
                for (long half = 0, at = i; half < 2 && at < count; half++, at += LANES) {
                    const long lanes = MIN(LANES, count - at);
                    V gate = v_load((float *)back[2 * half] + j * BACK);
                    V up = v_load((float *)back[2 * half + 1] + j * BACK);
                    if (a->bias) {
                        gate += load(a->bias + n + at, lanes);
                        up += load(a->bias + width + n + at, lanes);
                    }
                    const V y = rounded(activate(rounded(gate), activation)) * rounded(up);
                    elem *to = (elem *)a->y + (g * GROUP + r + j) * a->stride_y + n + at;
                    if (lanes == LANES)
                        store(to, LANES, y);
                    else
                        store(to, lanes, y);
                }
        }
}

/* How a product is divided. Sizes are in words. */
typedef struct {
    long slab, slabs, groups, group_words, packed_words; /* rows of W per task, a multiple of TALL; per thread */
} tall_plan;

static tall_plan plan_of(const linear_args *a, int gated) {
    const long most = MAX(4, SLAB_BYTES / (WORDS(a->k) * 4) / TALL) * TALL, width = gated ? a->n / 2 : a->n;
    const long rows = MIN(SLAB, most), slab = gated ? rows / (2 * TALL) * TALL : rows;
    const long group_words = (a->k + LANES * PAIR - 1) / (LANES * PAIR) * LANES * GROUP;
    long packed_words = 0;
#ifdef PACK
    packed_words = slab * (1 + gated) * a->k;
#endif
    return (tall_plan){slab, (width + slab - 1) / slab, (a->rows + GROUP - 1) / GROUP, group_words, packed_words};
}

/* Returns the words of scratch that `gemm` needs. `gated` is 1 for a gated pair. */
long NAME(gemm_scratch)(const linear_args *a, int threads, int gated) {
    const tall_plan plan = plan_of(a, gated);
    return plan.groups * plan.group_words + threads * plan.packed_words;
}

/* Multiplies all groups with the rows of W of task `s`. */
static void slab_products(const linear_args *a, const tall_plan *plan, long s, const int32_t *x, int32_t *packed,
                          int activation) {
    static __thread float sums[(SLAB + 4 * LANES) * GROUP]; /* put_back may read beyond SLAB */
    const int gated = activation >= 0;
    const long width = gated ? a->n / 2 : a->n, n = s * plan->slab, count = MIN(plan->slab, width - n);
    const long apart = plan->slab + 2 * LANES;
    int32_t *other = packed + plan->slab * a->k;
#ifdef PACK
    pack_rows(a->w + n * a->k, a->k, count, packed);
    if (gated) pack_rows(a->w + (width + n) * a->k, a->k, count, other);
#endif
    for (long g = 0; g < plan->groups; g++) {
        group_sums(a, g, n, packed, count, x + g * plan->group_words, sums);
        if (!gated) {
            put_back(a, g, n, count, sums);
            continue;
        }
        group_sums(a, g, width + n, other, count, x + g * plan->group_words, sums + apart * GROUP);
        put_gated(a, g, n, count, sums, apart, activation);
    }
}

/* `scratch` has the words that `gemm_scratch` returns. `activation` is -1, or that of a gated pair: the first half of W
 * is the gate, the second its factor, and y has half the width. */
void NAME(gemm)(const linear_args *a, int32_t *scratch, int threads, int activation) {
    const tall_plan plan = plan_of(a, activation >= 0);
    int32_t *packed = scratch + plan.groups * plan.group_words;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (long g = 0; g < plan.groups; g++) transpose_rows(a, g, scratch + g * plan.group_words);
#pragma omp for schedule(dynamic, 1)
        for (long s = 0; s < plan.slabs; s++)
            slab_products(a, &plan, s, scratch, packed + omp_get_thread_num() * plan.packed_words, activation);
    }
}
