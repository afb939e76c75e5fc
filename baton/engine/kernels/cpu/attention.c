/* Causal attention over paged keys and values, for any mix of prompt chunks and decode sequences.
 *
 * A task is some query tokens and heads of one sequence against a range of its positions, in chunks of CHUNK. Keys of a
 * chunk are transposed so that some of them fill the lanes of a vector. Values are paired so that the parts of a word
 * belong to neighbouring positions. Both products are then dots. Each split of a decode sequence writes (maximum, sum,
 * weighted values), and `join` combines them at the end.
 *
 * Softmax uses base 2 (scores are multiplied by log2 e) and a running maximum. If `unified`, it subtracts a preset
 * constant instead, so that no maximum is found and nothing is rescaled; rows with totals outside the safe range are then
 * computed again, and counted.
 *
 * In fixed batches, the bits of a row do not depend on its place, on other rows, or on the number of new tokens of its
 * sequence: chunks begin at multiples of CHUNK, there is one split, and invisible positions have weight 0. */
#include "kv_levels.h"
#include "transpose.h"

#define CHUNK 64
#define GROUPS (CHUNK / LANES)
#define MAX_ROWS 128
#define MAX_SPLITS 256
#define MAX_DIM 576
#define ROWS_AT_ONCE 6
#if defined(__AVX512F__) || defined(__aarch64__)
#define MOST_VECTORS 4 /* of sums per row in registers */
#define VECTORS_OF(rows) 4
#else
#define MOST_VECTORS 8
#define VECTORS_OF(rows) ((rows) == 1 ? 8 : (rows) <= 3 ? 4 : 2)
#endif
#define SAFE 0x1p80f /* a total; it and its inverse are far from the limits of float32 */

typedef struct {
    int32_t sequence, token, tokens, head, heads, begin, end, partial, splits;
} task_t;

/* Offsets of a chunk's positions in the cache, in bytes. */
typedef struct {
    long count, keys[CHUNK], values[CHUNK];
} place_t;

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

/* Cuts the batch into tasks, and returns their number, or -1 above `capacity`. Splits get places in `partials`. A
 * decode sequence gets `forced` splits. Without that, `load` means about `load` splits for all decode sequences
 * together, each of at least one chunk. A fixed batch has no splits. */
long NAME(attention_plan)(task_t *tasks, long capacity, const int32_t *starts, const int32_t *lens, long sequences,
                    long heads, long kv_heads, long window, long threads, long forced, long load,
                    long fixed, int32_t *partials) {
    const long group = heads / kv_heads, whole = MAX(1, MIN(kv_heads, MAX_ROWS / group));
    long n = 0, used = 0, singles = 0;
    for (long s = 0; s < sequences; s++) singles += starts[s + 1] - starts[s] == 1;
    for (long s = 0; s < sequences; s++) {
        const long count = starts[s + 1] - starts[s], len = lens[s], first = len - count;
        /* A decode task takes all heads, so that KV is read in memory order, unless that leaves a thread idle. */
        const long kv_step = count > 1 ? 1 : singles >= threads ? whole : MIN(whole, MAX(1, kv_heads * singles / threads));
        const long heads_step = MIN(kv_step * group, MAX_ROWS), step = count > 1 ? MAX(1, 64 / group) : 1;
        for (long head = 0; head < heads;) {
            /* A task's heads are whole groups, or part of one group. */
            const long here = MIN(heads_step, group <= MAX_ROWS ? heads - head : group - head % group);
            for (long t = 0; t < count; t += step) {
                const long tokens = MIN(step, count - t), end = first + t + tokens;
                const long low = window ? MAX(0, first + t + 1 - window) : 0;
                const long begin = fixed ? low / CHUNK * CHUNK : low, length = end - begin;
                const long units = singles * ((heads + heads_step - 1) / heads_step);
                long splits = count > 1 ? 1 : MIN((2 * threads + units - 1) / units, (length + 255) / 256);
                if (units >= threads) splits = 1;
                if (load && count == 1) splits = MIN((load + singles - 1) / singles, (length + CHUNK - 1) / CHUNK);
                if (forced && count == 1) splits = forced;
                splits = fixed ? 1 : MIN(splits, MAX_SPLITS);
                const long per = ((length + splits - 1) / splits + CHUNK - 1) / CHUNK * CHUNK;
                for (long i = 0; i < splits; i++) {
                    if (n == capacity) return -1;
                    const long a = MIN(end, begin + i * per), b = MIN(end, a + per);
                    tasks[n++] = (task_t){s, t, tokens, head, here, a, b, splits > 1 ? used : -1, i ? 0 : splits};
                    used += splits > 1 ? here : 0;
                }
            }
            head += here;
        }
    }
    *partials = used;
    return n;
}

typedef struct {
    const elem *query;
    const char *keys, *values; /* strides are in bytes */
    elem *out;
    const int32_t *tables, *starts, *lens;
    const task_t *tasks;
    float *partials;
    long count, heads, kv_heads, dim, value_dim, block_size, table_stride, query_stride, out_stride;
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

/* Transposes the keys of a chunk. Rows after its end are zero. Levels are not scaled, but their scores are. */
INLINE void transpose_keys(const attention_args *a, long kv_head, const place_t *here, const place_t *next,
                           workspace_t *work, const int levels) {
    const long words = WORDS(a->dim), parts = (words + LANES - 1) / LANES; /* each prefetches as many rows */
    const char *keys = a->keys + kv_head * a->k_head;
    if (levels) load_scales(keys, here->keys, here->count, a->dim, work->key_scales);
    for (long g = 0; g < GROUPS; g++) {
        const long count = MAX(0, MIN(LANES, here->count - g * LANES));
        for (long w = 0; w < words; w += LANES) {
            VI r[LANES];
            const long first = g * LANES, part = w / LANES, last = first + LANES * (part + 1) / parts;
            for (long i = first + LANES * part / parts; i < MIN(next->count, last); i++)
                fetch(keys + next->keys[i], a->dim, levels);
            const long *rows = here->keys + g * LANES;
            if (count == LANES && words - w >= LANES)
                for (long i = 0; i < LANES; i++) r[i] = load_cached(keys + rows[i], w, LANES, levels);
            else
                for (long i = 0; i < LANES; i++)
                    r[i] = i < count ? load_cached(keys + rows[i], w, words - w, levels) : vi_set(0);
            transpose(r, work->keys + w * CHUNK + g * LANES, CHUNK);
        }
    }
}

/* Pairs the values of a chunk: word j of row c holds element j of position at + c * PAIR, and of its neighbour.
 * Levels are not scaled, but their weights are. */
INLINE void pair_values(const attention_args *a, long kv_head, const place_t *here, const place_t *next,
                        workspace_t *work, const int levels) {
    const char *values = a->values + kv_head * a->v_head;
    if (levels) load_scales(values, here->values, here->count, a->value_dim, work->value_scales);
    for (long c = 0; c * PAIR < here->count; c++) {
        for (long i = c * PAIR; i < MIN(next->count, (c + 1) * PAIR); i++) fetch(values + next->values[i], a->value_dim, levels);
        const char *row = values + here->values[c * PAIR];
        int32_t *out = work->values + c * a->value_dim;
#if PAIR == 2
        const int both = c * PAIR + 1 < here->count;
        const char *other = both ? values + here->values[c * PAIR + 1] : row;
        const __mmask16 there = both ? 0xffff : 0;
        for (long d = 0; d < a->value_dim; d += LANES) {
            const VI low = levels ? _mm512_srli_epi32((VI)cached_values(row, d, 1), 16)
                                  : _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)row + d / LANES));
            vi_store(out + d, _mm512_mask_or_epi32(low, there, low, (VI)cached_values(other, d, levels)));
        }
#else
        for (long d = 0; d < a->value_dim; d += LANES) v_store(out + d, cached_values(row, d, levels));
#endif
    }
}

static void read_chunk(const attention_args *a, long kv_head, const place_t *here, const place_t *next,
                       workspace_t *work) {
    if (a->levels) {
        transpose_keys(a, kv_head, here, next, work, 1);
        pair_values(a, kv_head, here, next, work, 1);
    } else {
        transpose_keys(a, kv_head, here, next, work, 0);
        pair_values(a, kv_head, here, next, work, 0);
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

/* Computes `rows` of one task. Row r is token r % tokens of head r / tokens, so heads of one KV head are adjacent. */
static void run(const attention_args * a, const task_t *t, workspace_t *work, const int *rows, long n,
                      int unified) {
    const int32_t *left[MAX_ROWS];
    const long group = a->heads / a->kv_heads, start = a->starts[t->sequence];
    const long context = a->lens[t->sequence] - (a->starts[t->sequence + 1] - start);
    const int32_t *table = a->tables + t->sequence * a->table_stride;
    long bound[MAX_ROWS + 1], kv_heads = 0, last = -1;
    for (long i = 0; i < n; i++) {
        const long head = t->head + rows[i] / t->tokens, token = t->token + rows[i] % t->tokens;
        const elem *query = a->query + (start + token) * a->query_stride + head * a->dim;
#ifdef WIDEN
        float *wide = work->queries + i * a->dim;
        EACH_VECTOR(d, lanes, a->dim, { v_store_first(wide + d, lanes, load(query + d, lanes)); });
        left[i] = (const int32_t *)wide;
#else
        left[i] = (const int32_t *)query;
#endif
        work->limit[i] = context + token + 1;
        work->lower[i] = a->window ? work->limit[i] - a->window : 0;
        work->most[i] = -INFINITY;
        if (head / group != last) bound[kv_heads++] = i, last = head / group;
    }
    bound[kv_heads] = n;
    memset(work->sums, 0, n * a->value_dim * sizeof(float));
    memset(work->totals, 0, n * LANES * sizeof(float));
    find(a, table, t->begin, t->end, work->places);
    for (long at = t->begin, side = 0; at < t->end; at += CHUNK, side ^= 1) {
        const place_t *here = work->places + side;
        place_t *next = work->places + (side ^ 1);
        find(a, table, at + CHUNK, t->end, next);
        for (long h = 0; h < kv_heads; h++) {
            const long kv_head = (t->head + rows[bound[h]] / t->tokens) / group;
            read_chunk(a, kv_head, here, next, work);
            chunk(a, work, left, bound[h], bound[h + 1] - bound[h], at, at + here->count, unified);
        }
    }
    for (long i = 0; i < n; i++) work->total[i] = v_sum(v_load(work->totals + i * LANES));
}

/* Writes the results of `n` rows: divided by their totals, or undivided with maximum and total for `join`. */
static void write_results(const attention_args * a, const task_t *t, const workspace_t *work, const int *rows, long n,
                        int unified) {
    for (long i = 0; i < n; i++) {
        const float *sums = work->sums + i * a->value_dim;
        if (t->partial >= 0) {
            float *to = a->partials + (t->partial + rows[i]) * (a->value_dim + 2);
            to[0] = unified ? a->phi * LOG2E : work->most[i], to[1] = work->total[i];
            for (long d = 0; d < a->value_dim; d += LANES) {
                const V sum = v_load(sums + d);
                v_store(to + 2 + d, a->narrow ? v_narrow(sum) : sum);
            }
            continue;
        }
        const long head = t->head + rows[i] / t->tokens, token = a->starts[t->sequence] + t->token + rows[i] % t->tokens;
        elem *out = a->out + token * a->out_stride + head * a->value_dim;
        const V share = v_set(1.0f / work->total[i]);
        for (long d = 0; d < a->value_dim; d += LANES)
            store(out + d, LANES, v_load(sums + d) * share);
    }
}

/* Returns how many rows of the task left the unified maximum. */
static long task(const attention_args * a, const task_t *t, workspace_t *work) {
    const int n = t->tokens * t->heads;
    int rows[MAX_ROWS];
    for (int i = 0; i < n; i++) rows[i] = i;
    run(a, t, work, rows, n, (int)a->unified);
    write_results(a, t, work, rows, n, (int)a->unified);
    if (!a->unified || t->begin >= t->end) return 0;
    long recomputed = 0;
    /* A row's total shows where its best score is: at least its weight, at most that times the positions. */
    for (int i = 0; i < n; i++)
        if (!(work->total[i] >= 1 / SAFE && work->total[i] <= SAFE)) rows[recomputed++] = i;
    if (!recomputed) return 0;
    run(a, t, work, rows, recomputed, 0);
    write_results(a, t, work, rows, recomputed, 0);
    return recomputed;
}

/* Combines the splits of one task's rows. Each has weight 2^(its maximum - the greatest) times its total. */
static void join(const attention_args * a, const task_t *t) {
    const long width = a->value_dim + 2;
    for (long r = 0; r < t->heads; r++) {
        const float *parts = a->partials + (t->partial + r) * width;
        const long step = t->heads * width;
        float most = -INFINITY, total = 0, weight[MAX_SPLITS];
        for (long i = 0; i < t->splits; i++) /* an empty split has the unified maximum, which may be far above the others */
            if (parts[i * step + 1] > 0) most = fmaxf(most, parts[i * step]);
        for (long i = 0; i < t->splits; i++) {
            weight[i] = parts[i * step + 1] > 0 ? power(parts[i * step] - most) : 0;
            total += weight[i] * parts[i * step + 1];
        }
        elem *out = a->out + (a->starts[t->sequence] + t->token) * a->out_stride + (t->head + r) * a->value_dim;
        for (long d = 0; d < a->value_dim; d += LANES) {
            V sum = v_set(0);
            for (long i = 0; i < t->splits; i++)
                sum = OP(fmadd_ps)(v_load(parts + i * step + 2 + d), v_set(weight[i]), sum);
            store(out + d, LANES, sum * v_set(1.0f / total));
        }
    }
}

/* Returns the sum of `task`. */
long NAME(attention)(const attention_args * a, workspace_t *workspaces, long joins, int threads) {
    long recomputed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1) reduction(+ : recomputed)
        for (long i = 0; i < a->count; i++) recomputed += task(a, a->tasks + i, workspaces + omp_get_thread_num());
        if (joins) {
#pragma omp for schedule(static)
            for (long i = 0; i < a->count; i++)
                if (a->tasks[i].splits > 1) join(a, a->tasks + i);
        }
    }
    return recomputed;
}
#undef BY_COUNT

long NAME(attention_workspace)(void) { return sizeof(workspace_t); }
