/* The draw of each row: greedy, or temperature, min-p, top-k and top-p, and Gumbel noise. It has no vectors of its own and no
 * sums whose order depends on the vectors of a level, so a token is the same at all levels.
 *
 * A logit counts by its distance (best - x) / temperature. Floats that are not negative have the order of their bits, so
 * a limit on distances is an integer, and a radix selection over the bits finds it without a sort. */
#include "common.h"

#ifndef SAMPLING_C
#define SAMPLING_C
#define BLOCK 64
#define INFINITE 0x7F800000
#define MOST 22.2f /* above any noise */

typedef struct {
    const float *scores;
    const int32_t *parameters; /* rows of `Parameters` in fused.py */
    int64_t *tokens;
    char *scratch; /* `draw_scratch` bytes for each thread */
    long rows, vocab, stride;
} draw_args;

/* Distances and weights exp(-distance) by column, the least distance of each block of columns, and a list of columns. */
typedef struct {
    float *distances, *weights, *nearest;
    int32_t *columns;
} room;

INLINE float float_of(int32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Returns e^-x for x from 0 on, with a relative error below 3e-7, by the polynomial of `exp2_v`. */
INLINE float weight_of(float x) {
    const float y = (x < 86.0f ? x : 86.0f) * -LOG2E;
    const float n = (float)(int)(y - 0.5f), f = y - n;
    float p = 1.535336094e-04f;
    p = __builtin_fmaf(p, f, 1.339887471e-03f);
    p = __builtin_fmaf(p, f, 9.618437364e-03f);
    p = __builtin_fmaf(p, f, 5.550332470e-02f);
    p = __builtin_fmaf(p, f, 2.402264791e-01f);
    p = __builtin_fmaf(p, f, 6.931472029e-01f);
    p = __builtin_fmaf(p, f, 1.0f);
    return p * float_of(((int)n + 127) << 23) * (float)(x < 86.0f);
}

/* Returns the logarithm of a normal x above 0, by the polynomial of Cephes' logf. */
INLINE float log_of(float x) {
    const int32_t bits = bits_of(x), up = (bits & 0x007fffff) > 0x003504f3; /* mantissas above sqrt(2) */
    const float n = (float)(((bits >> 23) & 255) - 127 + up);
    const float f = float_of((bits & 0x007fffff) | (up ? 0x3f000000 : 0x3f800000)) - 1.0f, square = f * f;
    float p = 7.0376836292e-2f;
    p = __builtin_fmaf(p, f, -1.1514610310e-1f);
    p = __builtin_fmaf(p, f, 1.1676998740e-1f);
    p = __builtin_fmaf(p, f, -1.2420140846e-1f);
    p = __builtin_fmaf(p, f, 1.4249322787e-1f);
    p = __builtin_fmaf(p, f, -1.6668057665e-1f);
    p = __builtin_fmaf(p, f, 2.0000714765e-1f);
    p = __builtin_fmaf(p, f, -2.4999993993e-1f);
    p = __builtin_fmaf(p, f, 3.3333331174e-1f);
    p = p * f * square;
    p = __builtin_fmaf(n, -2.12194440e-4f, p);
    p = __builtin_fmaf(square, -0.5f, p);
    return __builtin_fmaf(n, 0.693359375f, f + p);
}

INLINE uint32_t mixed(uint32_t x) {
    x = (x ^ (x >> 16)) * 0x85EBCA6Bu;
    x = (x ^ (x >> 13)) * 0xC2B2AE35u;
    return x ^ (x >> 16);
}

/* Returns the 31 bits of `columns_hash` in noise.py. */
INLINE int32_t hashed(int32_t column, const int32_t *key) {
    const uint32_t x = (uint32_t)column * 0x9E3779B1u ^ (uint32_t)key[0];
    return mixed(mixed(x) ^ (uint32_t)key[1]) & 0x7FFFFFFF;
}

/* Returns the noise that `gumbel` in sampler.py makes of the same bits: -log(-log(1 - u)). */
INLINE float gumbel(int32_t hash) {
    const float wide = ((float)hash + 0.5f) * 0x1p-31f, u = wide < 1 - 0x1p-24f ? wide : 1 - 0x1p-24f;
    const float y = 1.0f - u, lost = (y - 1.0f) + u; /* the logarithm of a rounded y, and what rounding took */
    return -log_of(lost / y - log_of(y));
}

/* Stores the lowest column of the best score, or -1 if that is not a finite number, and returns the score. */
static float best_of(const float *x, long n, int64_t *token) {
    V broken = v_set(0);
    float best = -INFINITY;
    long at = 0;
    for (long start = 0; start < n; start += 1024) {
        V top = v_set(-INFINITY);
        const long count = MIN(1024, n - start);
        EACH_VECTOR(i, lanes, count, {
            const V each = v_within(v_load_first(x + start + i, lanes), 0, lanes, v_set(-INFINITY));
            broken = v_or_nan(broken, each);
            top = OP(max_ps)(top, each);
        });
        const float most = v_top(top);
        if (most > best) best = most, at = start;
    }
    *token = -1;
    if (v_sum(broken) != 0 || !(fabsf(best) < INFINITY)) return best;
    while (x[at] != best) at++;
    *token = at;
    return best;
}

INLINE float least(const float *values) {
    float lanes[16];
    for (int l = 0; l < 16; l++) lanes[l] = values[l];
    for (int i = 16; i < BLOCK; i += 16)
        for (int l = 0; l < 16; l++) lanes[l] = values[i + l] < lanes[l] ? values[i + l] : lanes[l];
    for (int half = 8; half; half /= 2)
        for (int l = 0; l < half; l++) lanes[l] = lanes[l + half] < lanes[l] ? lanes[l + half] : lanes[l];
    return lanes[0];
}

/* The result of a selection: the bits of the largest distance that passes, how many columns are at it, listed first in
 * `columns`, and how many columns, and which mass, are before it. */
typedef struct {
    int32_t edge;
    long at, before;
    double light;
} selected;

/* Selects the smallest of n listed distances: `wanted` of them or, if that is 0, those whose weights reach `goal`.
 * Overwrites the list. */
static selected select_nearest(
    const int32_t *bits, const float *weights, int32_t *columns, long n, long wanted, double goal) {
    selected found = {0, n, 0, 0.0};
    for (int shift = 20; shift >= 0; shift -= 10) {
        const int32_t mask = shift == 20 ? 2047 : 1023;
        int32_t counts[2048] = {0}, bin = -1;
        double masses[2048] = {0};
        for (long i = 0; i < n; i++) {
            const int32_t each = (bits[columns[i]] >> shift) & mask;
            counts[each]++;
            masses[each] += weights[columns[i]];
        }
        int32_t last = mask;
        while (!counts[last]) last--;
        for (bin = 0; bin < last; bin++) {
            if (wanted ? found.before + counts[bin] >= wanted : found.light + masses[bin] >= goal && counts[bin]) break;
            found.before += counts[bin];
            found.light += masses[bin];
        }
        long kept = 0;
        for (long i = 0; i < n; i++) {
            const int32_t column = columns[i];
            columns[kept] = column;
            kept += ((bits[column] >> shift) & mask) == bin;
        }
        n = found.at = kept;
        found.edge |= bin << shift;
    }
    return found;
}

/* Lists the columns whose distance has bits below `edge`, or equal to it up to the column `last`. */
static long list(const room *r, long vocab, int32_t edge, long last) {
    const int32_t *bits = (const int32_t *)r->distances;
    long n = 0;
    for (long start = 0; start < vocab; start += BLOCK) {
        const long end = MIN(start + BLOCK, vocab);
        if (bits_of(r->nearest[start / BLOCK]) > edge) continue;
        for (long i = start; i < end; i++) {
            r->columns[n] = (int32_t)i;
            n += (bits[i] < edge) | ((bits[i] == edge) & (i <= last));
        }
    }
    return n;
}

/* Returns the sum of the weights of n listed columns, or of the first n if there is no list. */
static double mass_of(const room *r, const int32_t *columns, long n) {
    double lanes[8] = {0}, total = 0;
    long i = 0;
    for (; i + 8 <= n; i += 8)
        for (int l = 0; l < 8; l++) lanes[l] += r->weights[columns ? columns[i + l] : i + l];
    for (; i < n; i++) total += r->weights[columns ? columns[i] : i];
    for (int l = 0; l < 8; l++) total += lanes[l];
    return total;
}

/* Returns bits that `wanted` distances do not exceed: those of the `wanted` nearest columns of blocks. */
static int32_t bound_of(const room *r, long vocab, long wanted) {
    const long blocks = (vocab + BLOCK - 1) / BLOCK;
    if (wanted > blocks) return INFINITE;
    for (long i = 0; i < blocks; i++) r->columns[i] = (int32_t)i;
    return select_nearest((const int32_t *)r->nearest, r->nearest, r->columns, blocks, wanted, 0.0).edge;
}

/* Lists the columns that pass the filters of a row, ascending, and returns their number. */
static long filtered(const room *r, long vocab, const int32_t *own) {
    const int32_t *bits = (const int32_t *)r->distances, floor = own[5];
    const long top_k = own[3];
    const double top_p = float_of(own[4]);
    long n = vocab;
    if (top_k < vocab) {
        n = list(r, vocab, MIN(floor, bound_of(r, vocab, top_k)), vocab);
        if (top_k < n) {
            const selected found = select_nearest(bits, r->distances, r->columns, n, top_k, 0.0);
            n = list(r, vocab, found.edge, r->columns[top_k - found.before - 1]);
        }
    } else if (floor < INFINITE) {
        n = list(r, vocab, floor, vocab);
    }
    if (top_p >= 1.0) return n;
    if (n == vocab)
        for (long i = 0; i < vocab; i++) r->weights[i] = weight_of(r->distances[i]);
    else
        for (long i = 0; i < n; i++) r->weights[r->columns[i]] = weight_of(r->distances[r->columns[i]]);
    const double goal = top_p * mass_of(r, n < vocab ? r->columns : NULL, n);
    if (n == vocab) {
        n = list(r, vocab, bits_of(8.0f), vocab); /* mostly enough */
        if (mass_of(r, r->columns, n) < goal) n = list(r, vocab, INFINITE, vocab);
    }
    const selected found = select_nearest(bits, r->weights, r->columns, n, 0, goal);
    const double weight = r->weights[r->columns[0]];
    const double needed = weight > 0 ? ceil((goal - found.light) / weight) : (double)found.at;
    const long places = needed < 1 ? 1 : needed < (double)found.at ? (long)needed : found.at;
    return list(r, vocab, found.edge, r->columns[places - 1]);
}

/* Returns the column with the most noise less distance, of n listed columns, or of the first n if there is no list. */
static int64_t noisiest(const room *r, const int32_t *columns, long n, const int32_t *key) {
    float best = -INFINITY;
    int32_t token = columns ? columns[0] : 0;
    for (long start = 0; start < n; start += BLOCK) {
        const long count = MIN(BLOCK, n - start);
        int32_t at[BLOCK], hashes[BLOCK], lowest = 0x7FFFFFFF;
        float distances[BLOCK], values[BLOCK];
        for (int i = 0; i < BLOCK; i++) { /* the rest repeats the last column, which changes nothing */
            const long place = start + (i < count ? i : count - 1);
            at[i] = columns ? columns[place] : (int32_t)place;
            distances[i] = r->distances[at[i]];
        }
        /* Noise is below -log(u), so only hashes up to a limit can win. The slack is for rounding. */
        const float needed = best + least(distances);
        if (needed > MOST) continue;
        for (int i = 0; i < BLOCK; i++) hashes[i] = hashed(at[i], key);
        for (int i = 0; i < BLOCK; i++) lowest = MIN(lowest, hashes[i]);
        if (needed > 0 && (float)lowest > weight_of(needed) * 0x1.001p31f + 1.0f) continue;
        for (int i = 0; i < BLOCK; i++) values[i] = distances[i] - gumbel(hashes[i]);
        const float top = -least(values);
        if (top <= best) continue;
        int first = 0;
        while (values[first] != -top) first++;
        best = top, token = at[first];
    }
    return token;
}

static room room_of(char *scratch, long vocab, int thread) {
    const long whole = (vocab + BLOCK - 1) / BLOCK * BLOCK;
    float *own = (float *)scratch + 4 * whole * thread;
    return (room){own, own + whole, own + 2 * whole, (int32_t *)(own + 3 * whole)};
}

static void draw_row(const draw_args *a, long row, const room *r) {
    const float *x = a->scores + row * a->stride;
    const int32_t *own = a->parameters + 6 * row;
    int64_t *token = a->tokens + row;
    const float best = best_of(x, a->vocab, token), temperature = float_of(own[2]);
    if (*token < 0 || !(temperature > 0)) return;
    for (long i = 0; i < a->vocab; i++) r->distances[i] = (best - x[i]) / temperature;
    for (long i = a->vocab; i % BLOCK; i++) r->distances[i] = INFINITY;
    for (long i = 0; i < a->vocab; i += BLOCK) r->nearest[i / BLOCK] = least(r->distances + i);
    const int every = own[3] >= a->vocab && float_of(own[4]) >= 1.0f && own[5] >= INFINITE;
    const long n = every ? a->vocab : filtered(r, a->vocab, own);
    *token = noisiest(r, every ? NULL : r->columns, n, own);
}
#endif

/* Returns the bytes of scratch for each thread. */
long NAME(draw_scratch)(long vocab) { return 4 * (vocab + BLOCK) * (long)sizeof(float); }

void NAME(draw)(const draw_args * a, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && a->rows > 1)
    for (long row = 0; row < a->rows; row++) {
        const room r = room_of(a->scratch, a->vocab, omp_get_thread_num());
        draw_row(a, row, &r);
    }
}
