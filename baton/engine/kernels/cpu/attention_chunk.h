#pragma once
/* Attention of some rows to one chunk of positions of a KV head: reads keys and values, scores, softmax, and the sums of
 * weighted values. attention.c has the loop over chunks. */
#include "kv_levels.h"
#include "transpose.h"

#define CHUNK 64
#define GROUPS (CHUNK / LANES)
#define MAX_ROWS 128
#define MAX_DIM 576
#define ROWS_AT_ONCE 6
#if defined(__AVX512F__) || defined(__aarch64__)
#define MOST_VECTORS 4 /* of sums per row in registers */
#define VECTORS_OF(rows) 4
#else
#define MOST_VECTORS 8
#define VECTORS_OF(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#endif
/* Whether the rows of a KV head are so few that a copy of the chunk does not pay. It pays for 5 and 6 if there are 16 registers. */
#define ARE_FEW(rows) ((rows) <= 2 * DIRECT && (MOST_VECTORS == 4 || (rows) <= DIRECT || (rows) > ROWS_AT_ONCE))
#define DIRECT 4 /* rows of a tile without a copy */
#define GROUPS_OF(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1)
#define SAFE 0x1p80f /* a total; it and its inverse are far from the limits of float32 */

typedef struct {
    int32_t sequence, token, tokens, head, heads, begin, end, partial, splits;
} task_t;

/* Offsets of a chunk's positions in the cache, in bytes. */
typedef struct {
    long count, keys[CHUNK], values[CHUNK];
} place_t;

/* Progress of prefetches: the next row, and how many vectors of it are due. */
typedef struct {
    long row, due;
} pace_t;

/* Scratch of one thread. */
typedef struct {
    place_t places[2];
    int32_t keys[MAX_DIM * CHUNK];
    int32_t values[MAX_DIM * CHUNK];
    float scores[MAX_ROWS * CHUNK];
    int32_t weights[MAX_ROWS * CHUNK]; /* CHUNK parts per row */
#ifdef WIDEN
    float queries[MAX_ROWS * MAX_DIM];
#endif
    float sums[MAX_ROWS * MAX_DIM];
    float totals[MAX_ROWS * LANES]; /* by lane, reduced at the end */
    float key_scales[CHUNK], value_scales[CHUNK]; /* of an int8 cache */
    float most[MAX_ROWS], total[MAX_ROWS], shrink[MAX_ROWS];
    long limit[MAX_ROWS], lower[MAX_ROWS];
} __attribute__((aligned(64))) workspace_t;

/* The part of the arguments that all layers of a forward share. */
typedef struct {
    const int32_t *tables, *starts, *lens;
    const task_t *tasks;
    float *partials;
    workspace_t *workspaces; /* one for each thread */
    long count, joins, table_stride; /* tasks, and rows of `partials` */
} attention_batch;

typedef struct {
    const elem *query;
    const char *keys, *values; /* strides are in bytes */
    elem *out;
    const attention_batch *batch;
    long heads, kv_heads, dim, value_dim, block_size, query_stride, out_stride;
    long k_block, k_token, k_head, v_block, v_token, v_head, window, unified, narrow; /* partials as bfloat16 */
    long levels; /* whether the cache is int8 */
    float scale, phi;
} attention_args;

/* Finds the offsets from `keys` and `values` of positions from `at` to `end`, at most a chunk. */
static void find(const attention_args *a, const int32_t *table, long at, long end, place_t *place) {
    long block = at / a->block_size, slot = at % a->block_size;
    place->count = MAX(0, MIN(CHUNK, end - at));
    for (long i = 0; i < place->count; i++) {
        place->keys[i] = table[block] * a->k_block + slot * a->k_token;
        place->values[i] = table[block] * a->v_block + slot * a->v_token;
        if (++slot == a->block_size) slot = 0, block++;
    }
}

/* Prefetches KV of the next chunk during this one, because hardware cannot predict its place. It goes into the
 * second-level cache: a chunk of all heads, or two of one head and the scratch, are larger than the first one. */
INLINE void fetch(const char *row, long n, const int levels) {
    const long bytes = levels ? n + 2 : n * (long)sizeof(elem);
    for (long i = 0; i < bytes; i += 64) fetch_far(row + i);
}

INLINE VI load_cached(const char *row, long word, long n, const int levels) {
    const long at = word * PAIR;
    return levels ? load_levels((const int8_t *)row + at, n) : load_words((const elem *)row + at, n);
}

INLINE V cached_values(const char *row, long d, const int levels) {
    return levels ? v_from_levels((const int8_t *)row + d) : load((const elem *)row + d, LANES);
}

/* Loads the scales of a chunk's heads. Those after its end are zero. */
INLINE void load_scales(const char *heads, const long *rows, long count, long dim, float *scales) {
    for (long i = 0; i < CHUNK; i++) scales[i] = i < count ? scale_of((const int8_t *)heads + rows[i], dim) : 0;
}

/* Loads LANES words of LANES keys, transposed: c[i] has word w + i of each. Rows from `count` and words from `words` on are
 * zero. Levels are not scaled, but their scores are. */
INLINE void turn_keys(const char *keys, const long *rows, long count, long w, long words, VI c[LANES], const int levels) {
#ifdef TURN_BF16
    if (!levels && count >= LANES && words - w >= LANES) {
        for (long p = 0; p < LANES; p += TURN_BF16) turn_bf16(keys + (w + p) * (long)sizeof(elem), rows, c + p);
        return;
    }
#endif
    if (count >= LANES && words - w >= LANES)
        for (long i = 0; i < LANES; i++) c[i] = load_cached(keys + rows[i], w, LANES, levels);
    else
        for (long i = 0; i < LANES; i++)
            c[i] = i < count ? load_cached(keys + rows[i], w, words - w, levels) : vi_set(0);
    turn(c);
}

/* Prefetches the next keys, LANES of them in as many calls as a key has vectors. */
INLINE void fetch_keys(const char *keys, const place_t *next, long dim, pace_t *pace, const int levels) {
    const long calls = (WORDS(dim) + LANES - 1) / LANES;
    for (pace->due += LANES; pace->due >= calls; pace->due -= calls, pace->row++)
        if (pace->row < next->count) fetch(keys + next->keys[pace->row], dim, levels);
}

/* Transposes the keys of a chunk. Rows after its end are zero. */
INLINE void transpose_keys(const attention_args *a, const char *keys, const place_t *here, const place_t *next,
                           workspace_t *work, const int levels) {
    const long words = WORDS(a->dim);
    pace_t pace = {0, 0};
    for (long g = 0; g < GROUPS; g++)
        for (long w = 0; w < words; w += LANES) {
            VI c[LANES];
            fetch_keys(keys, next, a->dim, &pace, levels);
            turn_keys(keys, here->keys + g * LANES, here->count - g * LANES, w, words, c, levels);
#pragma GCC unroll 16
            for (int i = 0; i < LANES; i++) vi_store(work->keys + (w + i) * CHUNK + g * LANES, c[i]);
        }
}

/* Returns a vector of values from element `d` on, each paired with that of the neighbour if there is one (`both`). */
INLINE VI pair(const char *row, const char *other, const int both, long d, const int levels) {
#if PAIR == 2
    const VI low = levels ? _mm512_srli_epi32((VI)cached_values(row, d, 1), 16)
                          : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)row + d / LANES));
    return _mm512_mask_or_epi32(low, both ? 0xffff : 0, low, (VI)cached_values(other, d, levels));
#else
    return (VI)cached_values(row, d, levels);
#endif
}

/* Prefetches the next values in the places of word `c`. */
INLINE void fetch_values(const char *values, const place_t *next, long c, long dim, const int levels) {
    for (long i = c * PAIR; i < MIN(next->count, (c + 1) * PAIR); i++) fetch(values + next->values[i], dim, levels);
}

/* Pairs the values of a chunk: word j of row c holds element j of position at + c * PAIR, and of its neighbour.
 * Levels are not scaled, but their weights are. */
INLINE void pair_values(const attention_args *a, const char *values, const place_t *here, const place_t *next,
                        workspace_t *work, const int levels) {
    for (long c = 0; c * PAIR < here->count; c++) {
        const int both = (c + 1) * PAIR <= here->count;
        const char *row = values + here->values[c * PAIR], *other = both ? values + here->values[c * PAIR + PAIR - 1] : row;
        int32_t *out = work->values + c * a->value_dim;
        fetch_values(values, next, c, a->value_dim, levels);
        for (long d = 0; d < a->value_dim; d += LANES) vi_store(out + d, pair(row, other, both, d, levels));
    }
}

static void read_chunk(const attention_args *a, const char *keys, const char *values, const place_t *here,
                       const place_t *next, workspace_t *work) {
    if (a->levels) {
        load_scales(keys, here->keys, here->count, a->dim, work->key_scales);
        load_scales(values, here->values, here->count, a->value_dim, work->value_scales);
        transpose_keys(a, keys, here, next, work, 1);
        pair_values(a, values, here, next, work, 1);
    } else {
        transpose_keys(a, keys, here, next, work, 0);
        pair_values(a, values, here, next, work, 0);
    }
}

/* out[i][0..LANES v) = sum over words of left[i][w] . right[w][0..LANES v), for `n` rows. */
INLINE void score_tile(const int32_t *const *left, long words, const int32_t *right, float *out, const int n,
                       const int v) {
    V acc[ROWS_AT_ONCE][MOST_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) acc[i][j] = v_set(0);
    for (long w = 0; w < words; w++) {
        VI k[MOST_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) k[j] = vi_load(right + w * CHUNK + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            const VI q = vi_set(left[i][w]);
#pragma GCC unroll 8
            for (int j = 0; j < v; j++) acc[i][j] = dot(acc[i][j], q, k[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) v_store(out + i * CHUNK + j * LANES, acc[i][j]);
}

/* sums[i][0..LANES v) = sums[i] * shrink[i] + sum over words of weights[i][w] . values[w][0..LANES v). */
INLINE void value_tile(const int32_t *weights, long words, const int32_t *values, long stride, float *sums,
                       const float *shrink, const int n, const int v) {
    V acc[ROWS_AT_ONCE][MOST_VECTORS];
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) acc[i][j] = v_load(sums + i * stride + j * LANES) * v_set(shrink[i]);
    for (long w = 0; w < words; w++) {
        VI r[MOST_VECTORS];
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) r[j] = vi_load(values + w * stride + j * LANES);
#pragma GCC unroll 6
        for (int i = 0; i < n; i++) {
            const VI p = vi_set(weights[i * CHUNK + w]);
#pragma GCC unroll 8
            for (int j = 0; j < v; j++) acc[i][j] = dot(acc[i][j], p, r[j]);
        }
    }
#pragma GCC unroll 6
    for (int i = 0; i < n; i++)
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) v_store(sums + i * stride + j * LANES, acc[i][j]);
}

#define BY_COUNT(call, n)                                                                                              \
    switch (n) {                                                                                                       \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    case 5: call(5); break;                                                                                            \
    case 6: call(6); break;                                                                                            \
    }

#define BY_FEW(call, n)                                                                                                \
    switch (n) {                                                                                                       \
    case 1: call(1); break;                                                                                            \
    case 2: call(2); break;                                                                                            \
    case 3: call(3); break;                                                                                            \
    case 4: call(4); break;                                                                                            \
    }

static void scores(const int32_t *const *left, long words, const int32_t *right, float *out, long n) {
#define CALL(N)                                                                                                        \
    for (long j = 0; j < CHUNK; j += VECTORS_OF(N) * LANES) score_tile(left, words, right + j, out + j, N, VECTORS_OF(N))
    BY_COUNT(CALL, n)
#undef CALL
}

static void add_values(const int32_t *weights, long words, const int32_t *values, long stride, float *sums,
                       const float *shrink, long n) {
    for (long d = 0; d < stride;) {
        const long v = (stride - d) / LANES;
#define TILE(N, V_) (value_tile(weights, words, values + d, stride, sums + d, shrink, N, V_), d += V_ * LANES)
#define CALL(N)                                                                                                        \
    (v >= VECTORS_OF(N) ? TILE(N, VECTORS_OF(N)) : v >= 4 ? TILE(N, 4) : v == 3 ? TILE(N, 3) : v == 2 ? TILE(N, 2) : TILE(N, 1))
        BY_COUNT(CALL, n)
#undef CALL
#undef TILE
    }
}

/* As `scores` for `n` rows without a copy of the keys: `t` groups of LANES positions from g on. */
INLINE void score_direct(const attention_args *a, const char *keys, const place_t *here, const place_t *next,
                         pace_t *pace, const int32_t *const *left, float *out, long g, const int n, const int t) {
    const long words = WORDS(a->dim);
    V acc[DIRECT][MOST_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
#pragma GCC unroll 4
        for (int j = 0; j < t; j++) acc[r][j] = v_set(0);
    for (long w = 0; w < words; w += LANES)
#pragma GCC unroll 4
        for (int j = 0; j < t; j++) {
            VI c[LANES];
            fetch_keys(keys, next, a->dim, pace, 0);
            turn_keys(keys, here->keys + (g + j) * LANES, here->count - (g + j) * LANES, w, words, c, 0);
#define ADD(I)                                                                                                         \
    for (int r = 0; r < n; r++) acc[r][j] = dot(acc[r][j], vi_set(left[r][w + (I)]), c[I])
            if (words - w >= LANES)
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) ADD(i);
            else
                for (int i = 0; i < words - w; i++) ADD(i);
#undef ADD
        }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++)
#pragma GCC unroll 4
        for (int j = 0; j < t; j++) v_store(out + r * CHUNK + (g + j) * LANES, acc[r][j]);
}

/* As `value_tile` for elements d on without a copy of the values. */
INLINE void value_direct(const attention_args *a, const char *values, const place_t *here, const place_t *next,
                         const int32_t *weights, long d, float *sums, const float *shrink, const int n, const int v) {
    V acc[DIRECT][MOST_VECTORS];
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) acc[r][j] = v_load(sums + r * a->value_dim + d + j * LANES) * v_set(shrink[r]);
        for (int j = 0; j + TWO <= v; j += 2) by_quarters(acc[r] + j);
    }
    for (long w = 0; w * PAIR < here->count; w++) {
        const int both = (w + 1) * PAIR <= here->count;
        const char *row = values + here->values[w * PAIR], *other = both ? values + here->values[w * PAIR + PAIR - 1] : row;
        VI c[MOST_VECTORS];
        if (!d) fetch_values(values, next, w, a->value_dim, 0);
#pragma GCC unroll 8
        for (int j = 0; j < v; j++)
            if (j / 2 * 2 + TWO > v)
                c[j] = pair(row, other, both, d + j * LANES, 0);
            else if (j % 2 == 0)
                pair_quarters(row, other, both, d + j * LANES, c + j);
#pragma GCC unroll 4
        for (int r = 0; r < n; r++) {
            const VI p = vi_set(weights[r * CHUNK + w]);
#pragma GCC unroll 8
            for (int j = 0; j < v; j++) acc[r][j] = dot(acc[r][j], p, c[j]);
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < n; r++) {
        for (int j = 0; j + TWO <= v; j += 2) in_order(acc[r] + j);
#pragma GCC unroll 8
        for (int j = 0; j < v; j++) v_store(sums + r * a->value_dim + d + j * LANES, acc[r][j]);
    }
}

INLINE float power(float x) { return OP(cvtss_f32)(exp2_v(v_set(x))); }

/* Converts scores of row `r` of the chunk at `at` to weights, and updates the row's maximum and total. */
static void softmax_row(const attention_args *a, workspace_t *work, long r, long at, int unified) {
    const V scale = v_set(a->scale * LOG2E), none = v_set(-INFINITY);
    float *scores = work->scores + r * CHUNK;
    const long limit = work->limit[r] - at, lower = work->lower[r] - at;
    V s[GROUPS];
    for (int j = 0; j < GROUPS; j++) s[j] = v_load(scores + j * LANES) * scale;
    if (a->levels)
        for (int j = 0; j < GROUPS; j++) s[j] *= v_load(work->key_scales + j * LANES);
    if (limit < CHUNK || lower > 0)
        for (int j = 0; j < GROUPS; j++) s[j] = v_within(s[j], lower - j * LANES, limit - j * LANES, none);
    float base = a->phi * LOG2E;
    work->shrink[r] = 1.0f;
    if (!unified) {
        V best = none;
        for (int j = 0; j < GROUPS; j++) best = OP(max_ps)(best, s[j]);
        const float before = work->most[r];
        /* Most chunks have no new maximum, and then nothing is reduced or rescaled. */
        const int higher = v_any_above(best, v_set(before));
        const float top = higher ? v_top(best) : before;
        /* Before the first visible position any base works, because all weights are 0. */
        base = top > -INFINITY ? top : 0;
        if (higher) work->shrink[r] = power(before - top);
        work->most[r] = top;
    }
    part_t *weights = (part_t *)(work->weights + r * CHUNK);
    V sum = v_set(0);
    for (int j = 0; j < GROUPS; j++) {
        const V p = exp2_v(s[j] - v_set(base));
        sum += p;
        store_parts(weights + j * LANES, a->levels ? (V)(p * v_load(work->value_scales + j * LANES)) : p);
    }
    float *totals = work->totals + r * LANES;
    v_store(totals, OP(fmadd_ps)(v_load(totals), v_set(work->shrink[r]), sum));
}

/* Processes rows [first, first + n) of one KV head, with queries `left`, for the chunk at `at`. */
static void chunk(const attention_args *a, workspace_t *work, const int32_t *const *left, long first, long n,
                        long at, long end, int unified) {
    const long words = WORDS(MIN(CHUNK, end - at));
    const long parts = (n + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
    for (long p = 0; p < parts; p++) {
        const long r = first + n * p / parts, stop = first + n * (p + 1) / parts;
        scores(left + r, WORDS(a->dim), work->keys, work->scores + r * CHUNK, stop - r);
        for (long i = r; i < stop; i++) softmax_row(a, work, i, at, unified);
        add_values(work->weights + r * CHUNK, words, work->values, a->value_dim, work->sums + r * a->value_dim,
                   work->shrink + r, stop - r);
    }
}

/* Processes 1 to DIRECT rows, from `first` on, for the chunk at `at`, without a copy of it. */
static void direct_rows(const attention_args *a, workspace_t *work, const char *keys, const char *values,
                        const place_t *here, const place_t *next, const int32_t *const *left, long first, long n,
                        long at, int unified) {
    float *sums = work->sums + first * a->value_dim, *out = work->scores + first * CHUNK;
    const int32_t *weights = work->weights + first * CHUNK;
    pace_t pace = {0, 0};
#define SCORES(N)                                                                                                      \
    for (long g = 0; g * LANES < here->count; g += GROUPS_OF(N))                                                       \
    score_direct(a, keys, here, next, &pace, left + first, out, g, N, GROUPS_OF(N))
    BY_FEW(SCORES, n)
#undef SCORES
    for (long i = first; i < first + n; i++) softmax_row(a, work, i, at, unified);
    for (long d = 0; d < a->value_dim;) {
        const long v = (a->value_dim - d) / LANES;
#define TILE(N, V_)                                                                                                    \
    (value_direct(a, values, here, next, weights, d, sums, work->shrink + first, N, V_), d += V_ * LANES)
#define VALUES(N) (v >= VECTORS_OF(N) ? TILE(N, VECTORS_OF(N)) : v >= 2 ? TILE(N, 2) : TILE(N, 1))
        BY_FEW(VALUES, n)
#undef VALUES
#undef TILE
    }
}

static void direct_chunk(const attention_args *a, workspace_t *work, const char *keys, const char *values,
                         const place_t *here, const place_t *next, const int32_t *const *left, long first, long n,
                         long at, int unified) {
    static const place_t none = {0};
    const long parts = (n + DIRECT - 1) / DIRECT;
    for (long p = 0; p < parts; p++) {
        const long r = first + n * p / parts, stop = first + n * (p + 1) / parts;
        direct_rows(a, work, keys, values, here, p ? &none : next, left, r, stop - r, at, unified);
    }
}

#undef BY_COUNT
#undef BY_FEW
