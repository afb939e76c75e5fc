/* y = x W^T + b for few rows of x. W [N, K] is read once, in memory order.
 *
 * One row of x, or several with AT_ONCE, are multiplied with each word of W when it is loaded. Otherwise, a tile is NR
 * rows of W times up to MR rows of x, over at most `kb` elements of K. Its part of W stays in the first-level cache
 * while rows of x come from the second. Each output is one chain of dots over K, then one fixed tree over the lanes,
 * so its bits depend neither on its tile nor on other rows.
 *
 * If WIDEN is set, a vector of W gives two of float32: its even elements, then its odd ones. Rows of x are brought to
 * this order before, and so is a tile of W that several passes use. */
#include "common.h"

#define ACC 8 /* most rows of W in a tile */
#define MR 3
#define ONCE 8 /* most rows of x in one pass */
#ifdef __AVX512F__
#define NR 8
#define BROAD 4 /* rows of W in a tile of such a pass, for up to WIDE rows of x */
#define WIDE 6
#define NARROW 3 /* the same for more rows of x */
#define SINGLE 8 /* rows of W in a tile for one row of x */
#ifndef WIDEN
#define AT_ONCE /* is faster than tiles for up to ONCE rows of x */
#endif
#else
#define NR 4
#define SINGLE MIN(HALVES * 4, LANES)
#endif
#define SINGLE_LINES ((int)(SINGLE * sizeof(V) / LINE)) /* of W per vector of its rows in such a tile */
#define NEAR_BYTES (24 << 10) /* of tiles to prefetch into the first-level cache, in addition to the one in use */
#define LINE 64
#define LINES ((int)(NR * sizeof(V) / LINE)) /* of W per vector of its rows in a tile */
#define PANEL_BYTES (384 << 10)   /* of x, so that a panel stays in the second-level cache */
#define MAX_PANEL 192             /* rows of x */
#define FLAT_STEP ((long)(sizeof(V) / sizeof(elem)))

#ifdef WIDEN
#define HALVES 2
#define TILE_BYTES (16384 / NR) /* of one row of W */
typedef float flat_x;
#else
#define HALVES 1
#define TILE_BYTES 4096
typedef elem flat_x;
#endif
#define TILE_ELEMS (TILE_BYTES / (long)sizeof(flat_x))

/* Returns the even elements of a vector of W, or the odd ones, if they must be widened. */
INLINE VI half(VI w, int odd) {
#ifdef WIDEN
    return odd ? (VI)(w & vi_set((int)0xffff0000)) : OP(slli_epi32)(w, 16);
#else
    (void)odd;
    return w;
#endif
}

/* Prevents that the compiler loads a vector again for each use, which it does where registers are few. */
INLINE VI in_register(VI v) {
#ifdef __aarch64__
    __asm__("" : "+w"(v));
#elif !defined(__AVX512F__)
    __asm__("" : "+x"(v));
#endif
    return v;
}

#ifdef __aarch64__
INLINE V sums_of(const V v[ACC]) { return vpaddq_f32(vpaddq_f32(v[0], v[1]), vpaddq_f32(v[2], v[3])); }
#else
INLINE __m256 sum8(const V v[8]) {
    __m256 a = _mm256_hadd_ps(v_halves(v[0]), v_halves(v[1])), b = _mm256_hadd_ps(v_halves(v[2]), v_halves(v[3]));
    __m256 c = _mm256_hadd_ps(v_halves(v[4]), v_halves(v[5])), d = _mm256_hadd_ps(v_halves(v[6]), v_halves(v[7]));
    a = _mm256_hadd_ps(a, b), c = _mm256_hadd_ps(c, d);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
}
INLINE V sums_of(const V v[ACC]) { return v_widen(sum8(v)); }
#endif

typedef struct {
    const void *x; /* elements, or what `linear` makes of them */
    const elem *w, *bias;
    void *y; /* elements, or float32 if `wide` */
    long rows, n, k, stride_x, stride_y, wide;
} linear_args;

INLINE void put(const linear_args *a, long m, long n, int nr, V sums) {
    const long at = m * a->stride_y + n;
    if (a->bias) sums += load(a->bias + n, nr);
    if (a->wide)
        v_store_first((float *)a->y + at, nr, sums);
#ifdef ELEM_BF16
    else if (LANES > 4 && (nr == 8 || nr == 4)) { /* stores with a mask are slow */
        const v_bf16 bits = v_to_bf16(sums);
        memcpy((elem *)a->y + at, &bits, nr == 8 ? 16 : 8);
    }
#endif
    else if (nr == LANES)
        store((elem *)a->y + at, LANES, sums);
    else
        store((elem *)a->y + at, nr, sums);
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
        vi_store(to + at, half(w, 0)), vi_store(to + at + LANES, half(w, 1));
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

/* acc[i][j] += x_i . w_j over one vector of each row of W. One of them is held at a time. */
INLINE void add_step(V (*acc)[ACC], const flat_x *x, long sx, const elem *w, long sw, const int mr, const int nr) {
    VI xv[HALVES][MR];
#pragma GCC unroll 3
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++) {
            xv[h][i] = vi_load(x + i * sx + h * LANES);
            if (HALVES == 1) xv[h][i] = in_register(xv[h][i]);
        }
#pragma GCC unroll 8
    for (int j = 0; j < nr; j++) {
        const VI wv = in_register(vi_load(w + j * sw));
#pragma GCC unroll 2
        for (int h = 0; h < HALVES; h++)
#pragma GCC unroll 3
            for (int i = 0; i < mr; i++) acc[i][j] = dot(acc[i][j], xv[h][i], half(wv, h));
    }
}

/* Adds the last `n` elements of K, less than a vector of W. */
INLINE void add_rest(V (*acc)[ACC], const flat_x *x, long sx, const elem *w, long sw, long n, const int mr, const int nr) {
    for (int i = 0; i < mr; i++)
        for (int j = 0; j < nr; j++) {
            const VI wv = part(w + j * sw, n);
            for (int h = 0; h < HALVES; h++)
                acc[i][j] = dot(acc[i][j], part_of_x(x + i * sx + h * LANES, n), half(wv, h));
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

/* acc[i][j] += x_i . w_j over `k` elements. Each step prefetches `fetch` cache lines from `next` on. */
INLINE void tile(V (*acc)[ACC], const flat_x *x, long sx, const elem *w, long sw, long k, const int mr, const int nr,
                 const char *next, const int fetch, const int near) {
    long at = 0;
    for (; at + FLAT_STEP <= k; at += FLAT_STEP, next += fetch * LINE) {
        fetch_lines(next, fetch, near);
        add_step(acc, x + at, sx, w + at, sw, mr, nr);
    }
    if (at < k) add_rest(acc, x + at, sx, w + at, sw, k - at, mr, nr);
}

/* The same for widened rows of W. */
INLINE void wide_tile(V (*acc)[ACC], const float *x, long sx, const float *w, long k, const int mr, const int nr,
                      const char *next, const int fetch) {
    for (long at = 0; at < k; at += LANES, next += fetch * LINE) {
        VI xv[MR];
        fetch_lines(next, fetch, 0);
#pragma GCC unroll 3
        for (int i = 0; i < mr; i++) xv[i] = in_register(vi_load(x + i * sx + at));
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) {
            const VI wv = in_register(vi_load(w + j * TILE_ELEMS + at));
#pragma GCC unroll 3
            for (int i = 0; i < mr; i++) acc[i][j] = (V)OP(fmadd_ps)((V)xv[i], (V)wv, acc[i][j]);
        }
    }
}

/* Returns the words of scratch per row of x: its widened elements, padded. */
long NAME(linear_scratch)(long k) { return HALVES > 1 ? (k + FLAT_STEP - 1) / FLAT_STEP * FLAT_STEP : 0; }

/* Multiplies rows [m, m + mr) of x with W rows [n, n + nr) over K from k0 to k1. `kept` holds unfinished sums. `wide`
 * has this part of W widened, or is NULL. */
INLINE void step(const linear_args *a, long m, long n, long k0, long k1, const int mr, const int nr, V *kept,
                 const char *next, const int fetch, const float *wide, const int near) {
    V acc[MR][ACC];
#pragma GCC unroll 3
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) acc[i][j] = k0 ? kept[i * NR + j] : v_set(0);
    const flat_x *x = (const flat_x *)a->x + m * a->stride_x + k0;
    if (HALVES > 1 && wide)
        wide_tile(acc, (const float *)x, a->stride_x, wide, NAME(linear_scratch)(k1 - k0), mr, nr, next, fetch);
    else
        tile(acc, x, a->stride_x, a->w + n * a->k + k0, a->k, k1 - k0, mr, nr, next, fetch, near);
    if (k1 < a->k) {
#pragma GCC unroll 3
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
            for (int j = 0; j < nr; j++) kept[i * NR + j] = acc[i][j];
        return;
    }
#pragma GCC unroll 3
    for (int i = 0; i < mr; i++) put_sums(a, m + i, n, nr, acc[i]);
}

#define STEP(MR_, NR_, FETCH_) step(a, m, n, k0, k1, MR_, NR_, kept, next, FETCH_, WIDE_TILE, 0)
#define BY_ROWS(NR_, FETCH_)                                                                                           \
    (mr == 3   ? STEP(3, NR_, FETCH_)                                                                                  \
     : mr == 2 ? STEP(2, NR_, FETCH_)                                                                                  \
               : STEP(1, NR_, FETCH_))

#define WIDE_TILE wide
static void pick(const linear_args *a, long m, int mr, long n, long k0, long k1, V *kept, const char *next, int fetch,
                 const float *wide) {
    if (fetch == 8) BY_ROWS(NR, 8);
    else if (fetch == 4) BY_ROWS(NR, 4);
    else if (fetch == 2) BY_ROWS(NR, 2);
    else if (fetch == 1) BY_ROWS(NR, 1);
    else BY_ROWS(NR, 0);
}
#undef WIDE_TILE

#define WIDE_TILE NULL
/* Multiplies the last rows of W, fewer than a tile, in one pass. All rows of W, if there is one row of x. */
static void rest(const linear_args *a, long m, int mr, long n, long end) {
    const long k0 = 0, k1 = a->k;
    V kept[MR * NR]; /* unused, because K is not divided */
    const char *next = NULL;
    if (mr == 1) {
        const int near = 2 * SINGLE * a->k * (long)sizeof(elem) <= NEAR_BYTES;
        for (; n + SINGLE <= end; n += SINGLE) {
            next = (const char *)(a->w + (n + 2 * SINGLE) * a->k);
            if (near) step(a, m, n, k0, k1, 1, SINGLE, kept, next, SINGLE_LINES, NULL, 1);
            else step(a, m, n, k0, k1, 1, SINGLE, kept, next, SINGLE_LINES, NULL, 0);
        }
    }
    for (; n + 4 <= end; n += 4) BY_ROWS(4, 0);
    for (; n < end; n++) BY_ROWS(1, 0);
}
#undef WIDE_TILE

#ifdef AT_ONCE
/* Multiplies `mr` rows of x with W rows [n, n + nr), and prefetches the tile `ahead` tiles later in memory order. */
INLINE void once_tile(const linear_args *a, long m, long n, const int mr, const int nr, const int ahead) {
    const flat_x *x = (const flat_x *)a->x + m * a->stride_x;
    const elem *w = a->w + n * a->k;
    const char *next = (const char *)(w + ahead * nr * a->k);
    long at = 0;
    V acc[ONCE][ACC];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nr; j++) acc[i][j] = v_set(0);
    for (; at + FLAT_STEP <= a->k; at += FLAT_STEP, next += nr * sizeof(V)) {
        fetch_lines(next, nr * (int)sizeof(V) / LINE, 1);
        VI wv[BROAD];
#pragma GCC unroll 4
        for (int j = 0; j < nr; j++) wv[j] = vi_load(w + j * a->k + at);
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const VI xv = vi_load(x + i * a->stride_x + at);
#pragma GCC unroll 4
            for (int j = 0; j < nr; j++) acc[i][j] = dot(acc[i][j], xv, wv[j]);
        }
    }
    if (at < a->k) add_rest(acc, x + at, a->stride_x, w + at, a->k, a->k - at, mr, nr);
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) put_sums(a, m + i, n, nr, acc[i]);
}

#define TILES(MR_, NR_, AHEAD_)                                                                                        \
    for (; n + NR_ <= end; n += NR_) once_tile(a, m, n, MR_, NR_, AHEAD_);                                             \
    break

/* Multiplies rows [m, m + rows) of x in one pass over W rows [n, end). */
static void once(const linear_args *a, long m, long rows, long n, long end) {
    switch (rows) {
    case 2: TILES(2, BROAD, 1);
    case 3: TILES(3, BROAD, 1);
#ifdef __AVX512F__
    case 4: TILES(4, BROAD, 1);
    case 5: TILES(5, BROAD, 1);
    case 6: TILES(6, BROAD, 1);
    case 7: TILES(7, NARROW, 2);
    case 8: TILES(8, NARROW, 2);
#endif
    }
    for (long i = 0; i < rows; i += MR) rest(a, m + i, (int)MIN(MR, rows - i), n, end);
}
#endif

/* Multiplies all rows of a panel of x with W rows [begin, end). */
static void panel(const linear_args *a, long first, long rows, long begin, long end) {
    static __thread V kept[(MAX_PANEL + MR) * NR];
#ifdef AT_ONCE
    const long near = 2 * NARROW * a->k * (long)sizeof(elem) <= NEAR_BYTES;
    if (1 < rows && rows <= (near ? ONCE : WIDE)) {
        once(a, first, rows, begin, end);
        return;
    }
#endif
    const long passes = (rows + MR - 1) / MR;
    const long parts = rows > MR ? (a->k + TILE_ELEMS - 1) / TILE_ELEMS : 1;
    const long kb = ((a->k + parts - 1) / parts + 63) / 64 * 64;
    const int each = LINES / (passes > 1 ? HALVES : 1);
    const int fetch = MAX(1, passes >= 8 ? each / 8 : passes >= 4 ? each / 4 : passes >= 2 ? each / 2 : each);
    const long lines = fetch * LINE;
    long n = begin;
    for (; n + NR <= end && rows > 1; n += NR) {
        /* Prefetches the next rows of W in memory order, which is the fastest order. */
        const char *next = (const char *)(a->w + (n + NR) * a->k), *stop = next + NR * a->k * sizeof(elem);
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
                const int mine = n + 2 * NR <= end && next < stop ? fetch : 0;
                pick(a, first + m, (int)count, n, k0, k1, kept + m * NR, next, mine, wide);
                next += mine ? (k1 - k0) / (wide ? LANES : FLAT_STEP) * lines : 0;
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

static void flat(const linear_args *a, int threads) {
    const long most = MAX(MR, MIN(MAX_PANEL, PANEL_BYTES / (long)(a->k * sizeof(flat_x)) / MR * MR));
    const long panels = (a->rows + most - 1) / most;
    const long even = (a->n + threads - 1) / threads, row = a->k * sizeof(elem);
    const long piece = threads > 1 ? (MIN(even, MAX(PIECE_BYTES / row, even / 16)) + 63) / 64 * 64 : a->n;
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
