/* y = x W^T + b for many rows of x. Groups of rows of x are transposed once into the lanes of vectors. W is not copied;
 * each of its words is multiplied with all rows of a group. Nothing is summed over lanes. */
#include "activate.h"
#include "common.h"
#include "transpose.h"

#define GROUP 64                     /* rows of x */
#define TALL 6                       /* rows of W in a tile */
#define BLOCK_WORDS 1024             /* of K, so that a block of transposed rows stays in the second-level cache */
#define SLAB 192                     /* most rows of W per task of a thread */
#define SLAB_BYTES (400 << 10)       /* and most bytes, which stay in the second-level cache too */

/* Transposes rows of x from g * GROUP on to out[word * GROUP + row]. Rows after the last one are zero. */
static void transpose_rows(const linear_args *a, long g, int32_t *out) {
    const long words = (a->k + PAIR - 1) / PAIR;
    for (long r = 0; r < GROUP; r += LANES)
        for (long w = 0; w < words; w += LANES) {
            __m512i rows[LANES];
            for (long i = 0; i < LANES; i++) {
                const long row = g * GROUP + r + i;
                const long left = MIN((long)LANES * PAIR, a->k - w * PAIR);
                rows[i] = row >= a->rows ? _mm512_setzero_si512()
                        : left == LANES * PAIR ? _mm512_loadu_si512(a->x + row * a->stride_x + w * PAIR)
                                               : part(a->x + row * a->stride_x + w * PAIR, left);
            }
            transpose(rows, out + w * GROUP + r);
        }
}

/* sums[i][0..16 v) += products of `n` rows of W with the transposed rows, over `words` words. */
INLINE void tall_tile(const elem *w, long stride, const int32_t *x, long words, float *sums, const int n,
                      const int v) {
    __m512 acc[TALL][GROUP / LANES];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) acc[i][j] = _mm512_loadu_ps(sums + i * GROUP + j * LANES);
    for (long k = 0; k < words; k++) {
        __m512i xv[GROUP / LANES];
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) xv[j] = _mm512_loadu_si512(x + k * GROUP + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            const __m512i wv = _mm512_set1_epi32(((const int32_t *)(w + i * stride))[k]);
#pragma GCC unroll 4
            for (int j = 0; j < v; j++) acc[i][j] = dot(acc[i][j], wv, xv[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 4
        for (int j = 0; j < v; j++) _mm512_storeu_ps(sums + i * GROUP + j * LANES, acc[i][j]);
}

/* Adds the odd element at the end of each row of W. The last word of rows of x is padded with zero. */
static void last_element(const linear_args *a, long n, long count, const int32_t *x, float *sums) {
#ifdef ELEM_BF16
    for (long i = 0; i < count; i++) {
        const __m512i w = _mm512_set1_epi32(a->w[(n + i) * a->k + a->k - 1]);
        for (int j = 0; j < GROUP / LANES; j++) {
            float *at = sums + i * GROUP + j * LANES;
            _mm512_storeu_ps(at, dot(_mm512_loadu_ps(at), w, _mm512_loadu_si512(x + j * LANES)));
        }
    }
#else
    (void)a, (void)n, (void)count, (void)x, (void)sums;
#endif
}

INLINE void tall(const linear_args *a, long n, long count, long k0, long words, const int32_t *x, float *sums,
                 const int v) {
    const elem *w = a->w + n * a->k + k0;
    long i = 0;
    for (; i + TALL <= count; i += TALL) tall_tile(w + i * a->k, a->k, x, words, sums + i * GROUP, TALL, v);
    for (; i < count; i++) tall_tile(w + i * a->k, a->k, x, words, sums + i * GROUP, 1, v);
}

/* Multiplies one transposed group of rows of x with rows [n, n + count) of W. */
static void group_sums(const linear_args *a, long g, long n, long count, const int32_t *x, float *sums) {
    const long whole = a->k / PAIR, vectors = (MIN(GROUP, a->rows - g * GROUP) + LANES - 1) / LANES;
    memset(sums, 0, count * GROUP * sizeof(float));
    for (long k = 0; k < whole; k += BLOCK_WORDS) {
        const long words = MIN(BLOCK_WORDS, whole - k);
        switch (vectors) {
        case 1: tall(a, n, count, k * PAIR, words, x + k * GROUP, sums, 1); break;
        case 2: tall(a, n, count, k * PAIR, words, x + k * GROUP, sums, 2); break;
        case 3: tall(a, n, count, k * PAIR, words, x + k * GROUP, sums, 3); break;
        default: tall(a, n, count, k * PAIR, words, x + k * GROUP, sums, 4);
        }
    }
    if (whole * PAIR < a->k) last_element(a, n, count, x + whole * GROUP, sums);
}

/* Transposes sums of W rows [n, n + count) back to y, in whole cache lines, because rows of y may share a cache set. */
static void put_back(const linear_args *a, long g, long n, long count, const float *sums) {
    const long rows = MIN(GROUP, a->rows - g * GROUP);
    int32_t back[2][LANES * GROUP];
    for (long r = 0; r < rows; r += LANES)
        for (long i = 0; i < count; i += 2 * LANES) {
            for (long half = 0; half < 2; half++) {
                const float *from = sums + (i + half * LANES) * GROUP + r;
                __m512i v[LANES];
                for (long j = 0; j < LANES; j++) v[j] = _mm512_loadu_si512(from + j * GROUP);
                transpose(v, back[half]);
            }
            for (long j = 0; j < MIN(LANES, rows - r); j++)
                for (long half = 0, at = i; half < 2 && at < count; half++, at += LANES) {
                    const __m512 sum = _mm512_loadu_ps((float *)back[half] + j * GROUP);
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
    int32_t back[4][LANES * GROUP];
    for (long r = 0; r < rows; r += LANES)
        for (long i = 0; i < count; i += 2 * LANES) {
            for (long part = 0; part < 4; part++) {
                const float *from = sums + (i + part / 2 * LANES + part % 2 * apart) * GROUP + r;
                __m512i v[LANES];
                for (long j = 0; j < LANES; j++) v[j] = _mm512_loadu_si512(from + j * GROUP);
                transpose(v, back[part]);
            }
            for (long j = 0; j < MIN(LANES, rows - r); j++)
                for (long half = 0, at = i; half < 2 && at < count; half++, at += LANES) {
                    const __mmask16 lanes = first_lanes(count - at);
                    __m512 gate = _mm512_loadu_ps((float *)back[2 * half] + j * GROUP);
                    __m512 up = _mm512_loadu_ps((float *)back[2 * half + 1] + j * GROUP);
                    if (a->bias) {
                        gate = _mm512_add_ps(gate, load(a->bias + n + at, lanes));
                        up = _mm512_add_ps(up, load(a->bias + width + n + at, lanes));
                    }
                    const __m512 y = _mm512_mul_ps(rounded(activate(rounded(gate), activation)), rounded(up));
                    elem *to = (elem *)a->y + (g * GROUP + r + j) * a->stride_y + n + at;
                    if (lanes == ALL)
                        store(to, ALL, y);
                    else
                        store(to, lanes, y);
                }
        }
}

/* Returns the rows of W per task of a thread, a multiple of TALL. */
static long slab_of(const linear_args *a, long most) {
    return MIN(most, MAX(4, SLAB_BYTES / (a->k * (long)sizeof(elem)) / TALL) * TALL);
}

/* `transposed` holds ceil(rows / GROUP) * GROUP * K elements, with K rounded up to whole vectors. `activation` is -1, or
 * that of a gated pair: the first half of W is the gate, the second its factor, and y has half the width. */
void NAME(gemm)(const linear_args *a, int32_t *transposed, int threads, int activation) {
    const long groups = (a->rows + GROUP - 1) / GROUP, gated = activation >= 0, width = gated ? a->n / 2 : a->n;
    const long slab = gated ? slab_of(a, SLAB) / (2 * TALL) * TALL : slab_of(a, SLAB), slabs = (width + slab - 1) / slab;
    const long group_words = (a->k + LANES * PAIR - 1) / (LANES * PAIR) * LANES * GROUP, apart = slab + 2 * LANES;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (long g = 0; g < groups; g++) transpose_rows(a, g, transposed + g * group_words);
#pragma omp for schedule(dynamic, 1)
        for (long s = 0; s < slabs; s++) {
            static __thread float sums[(SLAB + 4 * LANES) * GROUP]; /* put_back may read beyond SLAB */
            const long n = s * slab, count = MIN(slab, width - n);
            for (long g = 0; g < groups; g++) {
                group_sums(a, g, n, count, transposed + g * group_words, sums);
                if (!gated) {
                    put_back(a, g, n, count, sums);
                    continue;
                }
                group_sums(a, g, width + n, count, transposed + g * group_words, sums + apart * GROUP);
                put_gated(a, g, n, count, sums, apart, activation);
            }
        }
    }
}
