/* y = x W^T + b for few rows of x. W [N, K] is read once, in memory order.
 *
 * One or two rows of x, or several with AT_ONCE, are multiplied with each word of W when it is loaded. Otherwise, a tile is
 * NR rows of W times up to MR rows of x, over at most `kb` elements of K. Its part of W stays in the first-level cache
 * while rows of x come from the second. Each output is one chain of dots over K, then one fixed tree over the lanes,
 * so its bits depend neither on its tile nor on other rows.
 *
 * If WIDEN is set, a vector of W gives two of float32: its even elements, then its odd ones. Rows of x are brought to
 * this order before, and so is a tile of W that several passes use. */
#include "common.h"

#define ACC 4 /* most rows of W in a tile */
#ifdef __AVX512F__
#define MR 6
#define NR 4
#ifndef WIDEN
#define AT_ONCE                 /* which is faster than tiles for up to ONCE rows of x */
#define ONCE (PAIR > 1 ? 6 : 8) /* most rows of x in one pass */
#define NARROW 3                /* rows of W in a tile of such a pass for more than MR rows of x */
#endif
#else
#if defined(__aarch64__) || defined(WIDEN)
#define MR 3
#define NR 4
#else /* 16 registers: 12 sums, a vector of each row of W, and one of x */
#define MR 4
#define NR 3
#endif
#endif
#define FAR ACC                   /* streams of W for one or two rows of x */
#define L1_BYTES (32 << 10)       /* of the first-level cache of common processors */
#define LONG_ROW (8 << 10)        /* bytes of a widened row of x that leaves little of the first-level cache to W */
#define PAGE 4096                 /* bytes: lines a multiple of it apart replace each other in the first-level cache */
#define LINE 64
#define AHEAD_BYTES (8 << 10)     /* prefetches go two tiles ahead if a tile is shorter */
#define PANEL_BYTES (384 << 10)   /* of x, so that a panel stays in the second-level cache */
#define MAX_PANEL 192             /* rows of x */
#define FLAT_STEP ((long)(sizeof(V) / sizeof(elem)))

#ifdef WIDEN
#define HALVES 2
typedef float flat_x;
#else
#define HALVES 1
typedef elem flat_x;
#endif
#define TILE_ELEMS (4096 / (long)sizeof(flat_x)) /* most of K, so that a tile of W stays in the first-level cache */

/* Returns the even elements of a vector of W, or the odd ones, if they must be widened and are not yet. */
INLINE VI half(VI w, int odd, const int wide) {
#ifdef WIDEN
    if (!wide) return odd ? (VI)(w & vi_set((int)0xffff0000)) : OP(slli_epi32)(w, 16);
#endif
    (void)odd, (void)wide;
    return w;
}

/* Prevents that the compiler loads a vector again for each use, which costs up to a quarter of the speed. */
INLINE VI in_register(VI v) {
#ifdef __aarch64__
    __asm__("" : "+w"(v));
#elif defined(__AVX512F__)
    __asm__("" : "+v"(v));
#else
    __asm__("" : "+x"(v));
#endif
    return v;
}

/* Returns the sums over the lanes of each vector, by one fixed tree. */
INLINE V sums_of(const V v[ACC]) {
#ifdef __aarch64__
    return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3]));
#else
    __m256 a = _mm256_hadd_ps(v_halves(v[0]), v_halves(v[1])), b = _mm256_hadd_ps(v_halves(v[2]), v_halves(v[3]));
    a = _mm256_hadd_ps(a, b);
    return v_widen(_mm256_add_ps(a, _mm256_permute2f128_ps(a, a, 1)));
#endif
}

typedef struct {
    const void *x; /* elements, or what `linear` makes of them */
    const elem *w, *bias;
    void *y; /* elements, or float32 if `wide` */
    long rows, n, k, stride_x, stride_y, wide;
} linear_args;

INLINE void put(const linear_args *a, long m, long n, const int nr, V sums) {
    const long at = m * a->stride_y + n;
    if (a->bias) sums += load(a->bias + n, nr);
    /* `nr` is a constant here, and a copy of a constant size is faster than a store with a mask. */
#ifdef ELEM_BF16
    if (!a->wide) {
        const v_bf16 bits = v_to_bf16(sums);
        memcpy((elem *)a->y + at, &bits, nr * sizeof(elem));
        return;
    }
#endif
    memcpy((float *)a->y + at, &sums, nr * sizeof(float));
}

/* Loads `n` elements of W as they are, less than a vector of them. The rest is zero. */
INLINE VI part(const elem *p, long n) {
#ifdef WIDEN
    elem all[FLAT_STEP];
    memset(all, 0, sizeof all);
    memcpy(all, p, n * sizeof(elem));
    return vi_load(all);
#else
    return load_parts(p, n);
#endif
}

INLINE VI part_of_x(const flat_x *p, long n) {
#ifdef WIDEN
    (void)n;
    return vi_load(p); /* rows are padded */
#else
    return part(p, n);
#endif
}

#ifdef WIDEN
/* Widens `k` elements to `to` in the order of `half`, padded with zeros to a multiple of FLAT_STEP. */
INLINE void widen_row(const elem *from, long k, float *to) {
    for (long at = 0; at < k; at += FLAT_STEP) {
        const VI w = k - at >= FLAT_STEP ? vi_load(from + at) : part(from + at, k - at);
        vi_store(to + at, half(w, 0, 0)), vi_store(to + at + LANES, half(w, 1, 0));
    }
}
#endif

/* Reduces the lanes of `nr` sums and stores them to row m of y. */
INLINE void put_sums(const linear_args *a, long m, long n, const int nr, const V *acc) {
    V sums[ACC] = {0};
#pragma GCC unroll 8
    for (int j = 0; j < nr; j++) sums[j] = acc[j];
    put(a, m, n, nr, sums_of(sums));
}

/* acc[i][j] += x_i . w_j over one vector of each row of W, which are `sw` bytes apart and widened before if `wide`.
 * Registers hold the vectors of W if they are fewer than those of x. */
INLINE void add_step(V (*acc)[ACC], const flat_x *x, long sx, const char *w, long sw, const int mr, const int nr,
                     const int wide) {
    const int halves = wide ? 1 : HALVES;
    if (mr > nr) {
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            VI wv[ACC];
#pragma GCC unroll 8
            for (int j = 0; j < nr; j++) wv[j] = in_register(half(vi_load(w + j * sw), h, wide));
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                const VI xv = in_register(vi_load(x + i * sx + h * LANES));
#pragma GCC unroll 8
                for (int j = 0; j < nr; j++) acc[i][j] = dot(acc[i][j], xv, wv[j]);
            }
        }
        return;
    }
    VI xv[HALVES][MR];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++) {
            xv[h][i] = vi_load(x + i * sx + h * LANES);
            if (halves == 1) xv[h][i] = in_register(xv[h][i]);
        }
#pragma GCC unroll 8
    for (int j = 0; j < nr; j++) {
        const VI wv = in_register(vi_load(w + j * sw));
#pragma GCC unroll 2
        for (int h = 0; h < halves; h++)
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) acc[i][j] = dot(acc[i][j], xv[h][i], half(wv, h, wide));
    }
}

/* Adds the last `n` elements of K, less than a vector of W. */
INLINE void add_rest(V (*acc)[ACC], const flat_x *x, long sx, const char *w, long sw, long n, const int mr, const int nr) {
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nr; j++) {
            const VI wv = part((const elem *)(w + j * sw), n);
            for (int h = 0; h < HALVES; h++)
                acc[i][j] = dot(acc[i][j], part_of_x(x + i * sx + h * LANES, n), half(wv, h, 0));
        }
}

INLINE void fetch_lines(const char *next, const int count, const int near) {
#pragma GCC unroll 8
    for (int j = 0; j < count; j++)
        if (near)
            fetch_near(next + j * LINE);
        else
            fetch_far(next + j * LINE);
}

/* acc[i][j] += x_i . w_j over `k` elements, as `add_step`. Each step prefetches `fetch` cache lines from `next` on, which
 * moves by `stride` bytes. */
INLINE void tile(V (*acc)[ACC], const flat_x *x, long sx, const char *w, long sw, long k, const int mr, const int nr,
                 const char *next, const long stride, const int fetch, const int wide) {
    const long each = wide ? LANES : FLAT_STEP;
    long at = 0;
    for (; at + each <= k; at += each, next += stride, w += sizeof(V)) {
        fetch_lines(next, fetch, 0);
        add_step(acc, x + at, sx, w, sw, mr, nr, wide);
    }
    if (at < k && !wide) add_rest(acc, x + at, sx, w, sw, k - at, mr, nr); /* widened rows are padded */
}

/* Returns how many tiles of `nr` rows of W to prefetch ahead. */
INLINE long tiles_ahead(const linear_args *a, const int nr) {
    return nr * a->k * (long)sizeof(elem) < AHEAD_BYTES ? 2 : 1;
}

/* Returns the words of scratch per row of x: its widened elements, padded. */
long NAME(linear_scratch)(long k) { return HALVES > 1 ? (k + FLAT_STEP - 1) / FLAT_STEP * FLAT_STEP : 0; }

/* Multiplies rows [m, m + mr) of x with W rows [n, n + nr) over K from k0 to k1. `kept` holds unfinished sums. `wide`
 * has this part of W widened, or is NULL. */
INLINE void step(const linear_args *a, long m, long n, long k0, long k1, const int mr, const int nr, V *kept,
                 const char *next, const long stride, const int fetch, const float *wide) {
    V acc[MR][ACC];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) acc[i][j] = k0 ? kept[i * NR + j] : v_set(0);
    const flat_x *x = (const flat_x *)a->x + m * a->stride_x + k0;
    if (HALVES > 1 && wide)
        tile(acc, x, a->stride_x, (const char *)wide, TILE_ELEMS * sizeof(float), NAME(linear_scratch)(k1 - k0), mr, nr,
             next, stride, fetch, 1);
    else
        tile(acc, x, a->stride_x, (const char *)(a->w + n * a->k + k0), a->k * sizeof(elem), k1 - k0, mr, nr, next, stride,
             fetch, 0);
    if (k1 < a->k) {
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
            for (int j = 0; j < nr; j++) kept[i * NR + j] = acc[i][j];
        return;
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) put_sums(a, m + i, n, nr, acc[i]);
}

#define STEP(MR_, NR_, FETCH_) step(a, m, n, k0, k1, MR_, NR_, kept, next, stride, FETCH_, WIDE_TILE)
#define BY_ROWS(NR_, FETCH_)                                                                                           \
    (mr == MR           ? STEP(MR, NR_, FETCH_)                                                                        \
     : mr == MIN(5, MR) ? STEP(MIN(5, MR), NR_, FETCH_)                                                                \
     : mr == MIN(4, MR) ? STEP(MIN(4, MR), NR_, FETCH_)                                                                \
     : mr == 3          ? STEP(3, NR_, FETCH_)                                                                         \
     : mr == 2          ? STEP(2, NR_, FETCH_)                                                                         \
                        : STEP(1, NR_, FETCH_))

#define WIDE_TILE wide
/* `step` with at least as many prefetches as `stride` needs, or with none. */
static void pick(const linear_args *a, long m, int mr, long n, long k0, long k1, V *kept, const char *next, long stride,
                 const float *wide) {
    if (!stride) BY_ROWS(NR, 0);
    else if (stride <= LINE) BY_ROWS(NR, 1);
    else if (stride <= 2 * LINE) BY_ROWS(NR, 2);
    else BY_ROWS(NR, 4);
}
#undef WIDE_TILE

#define WIDE_TILE NULL
/* Multiplies the last rows of W, fewer than a tile, in one pass. */
static void rest(const linear_args *a, long m, int mr, long n, long end) {
    const long k0 = 0, k1 = a->k, stride = 0;
    const char *next = NULL;
    V kept[MR * NR]; /* unused, because K is not divided */
    for (; n + NR <= end; n += NR) BY_ROWS(NR, 0);
    for (; n < end; n++) BY_ROWS(1, 0);
}
#undef WIDE_TILE

/* Multiplies rows [m, m + mr) of x with W rows [n, end), except fewer than 2 * FAR at the end. Returns the first of these.
 * The rows of a tile are a FAR-th of all apart, so W is read as FAR streams in memory order, which a core prefetches best.
 * `far` and `near` are the bytes to prefetch ahead in each stream, into the second-level cache and the first. */
INLINE long streams(const linear_args *a, long m, long n, long end, const int mr, const int far, const int near) {
    const long row = a->k * (long)sizeof(elem), most = (end - n) / FAR;
    const long count = most - (most > 1 && most * row % PAGE == 0), apart = count * row;
    const flat_x *x = (const flat_x *)a->x + m * a->stride_x;
    for (long r = n; r < n + count; r++) {
        const char *w = (const char *)(a->w + r * a->k);
        V acc[2][ACC];
        float each[LANES];
        long at = 0;
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
            for (int j = 0; j < FAR; j++) acc[i][j] = v_set(0);
        for (; at + FLAT_STEP <= a->k; at += FLAT_STEP, w += sizeof(V)) {
#pragma GCC unroll 8
            for (int j = 0; j < FAR; j++) {
                fetch_far(w + j * apart + far);
                if (near) fetch_near(w + j * apart + near);
            }
            add_step(acc, x + at, a->stride_x, w, apart, mr, FAR, 0);
        }
        if (at < a->k) add_rest(acc, x + at, a->stride_x, w, apart, a->k - at, mr, FAR);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            v_store(each, sums_of(acc[i]));
            for (int j = 0; j < FAR; j++) put(a, m + i, r + j * count, 1, v_set(each[j]));
        }
    }
    return n + FAR * count;
}

#define STREAMS(MR_)                                                                                                   \
    (HALVES > 1 && a->k * sizeof(flat_x) > LONG_ROW ? streams(a, m, n, end, MR_, 4096, 512)                            \
     : LANES > 8 && HALVES == 1                     ? streams(a, m, n, end, MR_, 1024, 0)                              \
                                                    : streams(a, m, n, end, MR_, 1024, 256))

/* Multiplies one or two rows of x with W rows [n, end). */
static void one_or_two(const linear_args *a, long m, long rows, long n, long end) {
    n = rows == 1 ? STREAMS(1) : STREAMS(2);
    rest(a, m, (int)rows, n, end);
}

#ifdef AT_ONCE
/* Multiplies `mr` rows of x with W rows [n, n + nr), and prefetches the tile that is `ahead` rows later. */
INLINE void once_tile(const linear_args *a, long m, long n, const int mr, const int nr, const long ahead, const int near) {
    const flat_x *x = (const flat_x *)a->x + m * a->stride_x;
    const elem *w = a->w + n * a->k;
    const char *next = (const char *)(w + ahead * a->k);
    long at = 0;
    V acc[ONCE][ACC];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) acc[i][j] = v_set(0);
    for (; at + FLAT_STEP <= a->k; at += FLAT_STEP, next += nr * sizeof(V)) {
        fetch_lines(next, nr * (int)sizeof(V) / LINE, near);
        VI wv[NR];
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) wv[j] = vi_load(w + j * a->k + at);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const VI xv = vi_load(x + i * a->stride_x + at);
#pragma GCC unroll 8
            for (int j = 0; j < nr; j++) acc[i][j] = dot(acc[i][j], xv, wv[j]);
        }
    }
    if (at < a->k)
        add_rest(acc, x + at, a->stride_x, (const char *)(w + at), a->k * sizeof(elem), a->k - at, mr, nr);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) put_sums(a, m + i, n, nr, acc[i]);
}

#define TILES(MR_, NR_)                                                                                                \
    if (NR_ * row < AHEAD_BYTES)                                                                                       \
        for (; n + NR_ <= end; n += NR_) once_tile(a, m, n, MR_, NR_, NR_, 1);                                         \
    else                                                                                                               \
        for (; n + NR_ <= end; n += NR_) once_tile(a, m, n, MR_, NR_, NR_, 0);                                         \
    break

/* Multiplies rows [m, m + rows) of x in one pass over W rows [n, end). */
static void once(const linear_args *a, long m, long rows, long n, long end) {
    const long row = a->k * sizeof(elem);
    switch (rows) {
    case 2: TILES(2, NR);
    case 3: TILES(3, NR);
    case 4: TILES(4, NR);
    case 5: TILES(5, NR);
    case 6: TILES(6, NR);
#if ONCE > 6
    case 7: TILES(7, NARROW);
    case 8: TILES(8, NARROW);
#endif
    }
    for (long i = 0; i < rows; i += MR) rest(a, m + i, (int)MIN(MR, rows - i), n, end);
}
#endif

/* Multiplies all rows of a panel of x with W rows [begin, end). */
static void panel(const linear_args *a, long first, long rows, long begin, long end) {
    static __thread V kept[(MAX_PANEL + MR) * NR];
    /* At AVX-512, tiles are faster than streams if x does not stay in the first-level cache. */
    if (rows == 1 || (rows == 2 && (LANES <= 8 || 2 * a->k * sizeof(flat_x) <= L1_BYTES))) {
        one_or_two(a, first, rows, begin, end);
        return;
    }
#ifdef AT_ONCE
    if (rows <= ONCE) {
        once(a, first, rows, begin, end);
        return;
    }
#endif
    const long passes = (rows + MR - 1) / MR;
    const long parts = rows > MR ? (a->k + TILE_ELEMS - 1) / TILE_ELEMS : 1;
    const long kb = ((a->k + parts - 1) / parts + 63) / 64 * 64;
    const long step = passes > 1 && HALVES > 1 ? LANES : FLAT_STEP; /* of K */
    const long lines = (NR * step * (long)sizeof(elem) + passes - 1) / passes;
    const long ahead = tiles_ahead(a, NR) * NR;
    long n = begin;
    for (; n + NR <= end; n += NR) {
        /* All steps prefetch equally much of a later tile, in memory order, so that memory never waits. */
        const char *next = (const char *)(a->w + (n + ahead) * a->k);
        const long stride = n + ahead + NR <= end ? lines : 0;
        for (long k0 = 0; k0 < a->k; k0 += kb) {
            const long k1 = MIN(a->k, k0 + kb);
            const float *wide = NULL;
#ifdef WIDEN
            static __thread float tile[NR * TILE_ELEMS];
            for (long j = 0; j < NR && passes > 1; j++) widen_row(a->w + (n + j) * a->k + k0, k1 - k0, tile + j * TILE_ELEMS);
            wide = passes > 1 ? tile : NULL;
#endif
            for (long p = 0; p < passes; p++) {
                const long m = rows * p / passes, count = rows * (p + 1) / passes - m;
                pick(a, first + m, (int)count, n, k0, k1, kept + m * NR, next, stride, wide);
                next += (k1 - k0) / step * stride;
            }
        }
    }
    for (long p = 0; p < passes && n < end; p++) {
        const long m = rows * p / passes, stop = rows * (p + 1) / passes;
        rest(a, first + m, (int)(stop - m), n, end);
    }
}

/* Threads take pieces of W dynamically, so that a delayed thread takes fewer. */
#define PIECE_BYTES (256 << 10)
#define PIECE_ROWS 96 /* a multiple of all tiles */

static void flat(const linear_args *a, int threads) {
    const long most = MAX(MR, MIN(MAX_PANEL, PANEL_BYTES / (long)(a->k * sizeof(flat_x)) / MR * MR));
    const long panels = (a->rows + most - 1) / most;
    const long even = (a->n + threads - 1) / threads, row = a->k * sizeof(elem);
    const long some = MAX(1, MIN(even, MAX(PIECE_BYTES / row, even / 16))); /* a row may exceed PIECE_BYTES */
    const long piece = threads > 1 ? (some + PIECE_ROWS - 1) / PIECE_ROWS * PIECE_ROWS : a->n;
    const long pieces = (a->n + piece - 1) / piece;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (long i = 0; i < pieces; i++) {
        const long begin = i * piece, end = MIN(a->n, begin + piece);
        for (long p = 0; p < panels; p++) {
            const long first = a->rows * p / panels, rows = a->rows * (p + 1) / panels - first;
            panel(a, first, rows, begin, end);
        }
    }
}

void NAME(linear)(const linear_args *a, float *scratch, int threads) {
#ifdef WIDEN
    linear_args widened = *a;
    widened.x = scratch, widened.stride_x = NAME(linear_scratch)(a->k);
    for (long m = 0; m < a->rows; m++)
        widen_row((const elem *)a->x + m * a->stride_x, a->k, scratch + m * widened.stride_x);
    flat(&widened, threads);
#else
    (void)scratch;
    flat(a, threads);
#endif
}
#undef STEP
#undef BY_ROWS
