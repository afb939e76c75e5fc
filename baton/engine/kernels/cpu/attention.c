/* Causal attention over paged keys and values, for any mix of prompt chunks and decode sequences.
 *
 * A task is some query tokens and heads of one sequence against a range of its positions, in chunks of CHUNK. Keys of a
 * chunk are transposed so that some of them fill the lanes of a vector. Values are paired so that the parts of a word
 * belong to neighbouring positions. Both products are then dots. For many rows this goes through a copy of the chunk, and
 * for few through registers, with the same bits. Each split of a decode sequence writes (maximum, sum, weighted values),
 * and `join` combines them at the end.
 *
 * Softmax uses base 2 (scores are multiplied by log2 e) and a running maximum. If `unified`, it subtracts a preset
 * constant instead, so that no maximum is found and nothing is rescaled; rows with totals outside the safe range are then
 * computed again, and counted.
 *
 * In fixed batches, the bits of a row do not depend on its place, on other rows, or on the number of new tokens of its
 * sequence: chunks begin at multiples of CHUNK, there is one split, and invisible positions have weight 0. */
#include "attention_chunk.h"

#define MAX_SPLITS 256

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
                const long begin = low / CHUNK * CHUNK, length = end - begin;
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

/* Computes `rows` of one task. Row r is token r % tokens of head r / tokens, so heads of one KV head are adjacent. */
static void run(const attention_args * a, const task_t *t, workspace_t *work, const int *rows, long n,
                      int unified) {
    const int32_t *left[MAX_ROWS];
    const long group = a->heads / a->kv_heads, start = a->batch->starts[t->sequence];
    const long context = a->batch->lens[t->sequence] - (a->batch->starts[t->sequence + 1] - start);
    const int32_t *table = a->batch->tables + t->sequence * a->batch->table_stride;
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
            const char *keys = a->keys + kv_head * a->k_head, *values = a->values + kv_head * a->v_head;
            const long first = bound[h], rows_here = bound[h + 1] - first;
            if (ARE_FEW(rows_here) && !a->levels) {
                direct_chunk(a, work, keys, values, here, next, left, first, rows_here, at, unified);
                continue;
            }
            read_chunk(a, keys, values, here, next, work);
            chunk(a, work, left, first, rows_here, at, at + here->count, unified);
        }
    }
    for (long i = 0; i < n; i++) work->total[i] = v_sum(v_load(work->totals + i * LANES));
}

/* Writes the results of `n` rows: divided by their totals, or undivided with maximum and total for `join`. */
static void write_results(const attention_args * a, const task_t *t, const workspace_t *work, const int *rows, long n,
                        int unified) {
    const attention_batch *batch = a->batch;
    for (long i = 0; i < n; i++) {
        const float *sums = work->sums + i * a->value_dim;
        if (t->partial >= 0) {
            float *to = batch->partials + (t->partial + rows[i]) * (a->value_dim + 2);
            to[0] = unified ? a->phi * LOG2E : work->most[i], to[1] = work->total[i];
            for (long d = 0; d < a->value_dim; d += LANES) {
                const V sum = v_load(sums + d);
                v_store(to + 2 + d, a->narrow ? v_narrow(sum) : sum);
            }
            continue;
        }
        const long head = t->head + rows[i] / t->tokens, token = batch->starts[t->sequence] + t->token + rows[i] % t->tokens;
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
    const attention_batch *batch = a->batch;
    const long width = a->value_dim + 2;
    for (long r = 0; r < t->heads; r++) {
        const float *parts = batch->partials + (t->partial + r) * width;
        const long step = t->heads * width;
        float most = -INFINITY, total = 0, weight[MAX_SPLITS];
        for (long i = 0; i < t->splits; i++) /* an empty split has the unified maximum, which may be far above the others */
            if (parts[i * step + 1] > 0) most = fmaxf(most, parts[i * step]);
        for (long i = 0; i < t->splits; i++) {
            weight[i] = parts[i * step + 1] > 0 ? power(parts[i * step] - most) : 0;
            total += weight[i] * parts[i * step + 1];
        }
        elem *out = a->out + (batch->starts[t->sequence] + t->token) * a->out_stride + (t->head + r) * a->value_dim;
        for (long d = 0; d < a->value_dim; d += LANES) {
            V sum = v_set(0);
            for (long i = 0; i < t->splits; i++)
                sum = OP(fmadd_ps)(v_load(parts + i * step + 2 + d), v_set(weight[i]), sum);
            store(out + d, LANES, sum * v_set(1.0f / total));
        }
    }
}

/* Returns the sum of `task`. */
long NAME(attention)(const attention_args * a, int threads) {
    const attention_batch *batch = a->batch;
    long recomputed = 0;
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(dynamic, 1) reduction(+ : recomputed)
        for (long i = 0; i < batch->count; i++)
            recomputed += task(a, batch->tasks + i, batch->workspaces + omp_get_thread_num());
        if (batch->joins) {
#pragma omp for schedule(static)
            for (long i = 0; i < batch->count; i++)
                if (batch->tasks[i].splits > 1) join(a, batch->tasks + i);
        }
    }
    return recomputed;
}

long NAME(attention_workspace)(void) { return sizeof(workspace_t); }
