/* y = x W^T + b for few rows of x. W [N, K] is read once, in memory order.
 *
 * Up to eight rows of x, as in decode steps, are multiplied with each word of W when it is loaded. For more, a tile is
 * NR rows of W times up to MR rows of x, over at most `kb` elements of K. Its part of W stays in the first-level cache
 * while rows of x come from the second. Each output is one chain of dots over K, then one fixed tree over 16 lanes,
 * so its bits depend neither on its tile nor on other rows. */
#include "common.h"

#define NR 8
#define MR 3
#define ONCE 8 /* most rows of x in one pass */
#define BROAD 4 /* rows of W in a tile of such a pass, for up to WIDE rows of x */
#define WIDE 6
#define NARROW 3 /* the same for more rows of x */
#define NEAR_BYTES (24 << 10) /* of tiles to prefetch into the first-level cache, in addition to the one in use */
#define LINE 64
#define TILE_BYTES 4096           /* of one row of W */
#define PANEL_BYTES (384 << 10)   /* of x, so that a panel stays in the second-level cache */
#define MAX_PANEL 192             /* rows of x */

INLINE __m256 halves(__m512 v) { return _mm256_add_ps(_mm512_castps512_ps256(v), _mm512_extractf32x8_ps(v, 1)); }

INLINE __m256 sum8(const __m512 v[8]) {
    __m256 a = _mm256_hadd_ps(halves(v[0]), halves(v[1])), b = _mm256_hadd_ps(halves(v[2]), halves(v[3]));
    __m256 c = _mm256_hadd_ps(halves(v[4]), halves(v[5])), d = _mm256_hadd_ps(halves(v[6]), halves(v[7]));
    a = _mm256_hadd_ps(a, b), c = _mm256_hadd_ps(c, d);
    return _mm256_add_ps(_mm256_permute2f128_ps(a, c, 0x20), _mm256_permute2f128_ps(a, c, 0x31));
}

typedef struct {
    const elem *x, *w, *bias;
    void *y; /* elements, or float32 if `wide` */
    long rows, n, k, stride_x, stride_y, wide;
} linear_args;

INLINE void put(const linear_args *a, long m, long n, int nr, __m512 sums) {
    const __mmask16 lanes = first_lanes(nr);
    const long at = m * a->stride_y + n;
    if (a->bias) sums = _mm512_add_ps(sums, load(a->bias + n, lanes));
    if (a->wide)
        _mm512_mask_storeu_ps((float *)a->y + at, lanes, sums);
#ifdef ELEM_BF16
    else if (nr == NR)
        _mm_storeu_si128((__m128i *)((elem *)a->y + at), _mm256_castsi256_si128((__m256i)_mm512_cvtneps_pbh(sums)));
    else if (nr == BROAD) /* stores with a mask are slow */
        _mm_storel_epi64((__m128i *)((elem *)a->y + at), _mm256_castsi256_si128((__m256i)_mm512_cvtneps_pbh(sums)));
#endif
    else if (nr == LANES)
        store((elem *)a->y + at, ALL, sums);
    else
        store((elem *)a->y + at, lanes, sums);
}

INLINE __m512i part(const elem *p, long n) {
#ifdef ELEM_BF16
    return _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
#else
    return _mm512_maskz_loadu_epi32((__mmask16)((1u << n) - 1), p);
#endif
}

/* Reduces the lanes of `nr` sums and stores them to row m of y. */
INLINE void put_sums(const linear_args *a, long m, long n, const int nr, const __m512 *acc) {
    __m512 sums[NR] = {0};
#pragma GCC unroll 8
    for (int j = 0; j < nr; j++) sums[j] = acc[j];
    put(a, m, n, nr, _mm512_castps256_ps512(sum8(sums)));
}

/* acc[i][j] += x_i . w_j over `k` elements. Each step prefetches `fetch` cache lines from `next` on. */
INLINE void tile(__m512 acc[MR][NR], const elem *x, long sx, const elem *w, long sw, long k, const int mr,
                       const int nr, const char *next, const int fetch) {
    const long step = LANES * PAIR;
    long at = 0;
    for (; at + step <= k; at += step) {
        __m512i xv[MR];
#pragma GCC unroll 3
        for (int i = 0; i < mr; i++) xv[i] = _mm512_loadu_si512(x + i * sx + at);
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) {
            const __m512i wv = _mm512_loadu_si512(w + j * sw + at);
            if (j < fetch) _mm_prefetch(next + j * LINE, _MM_HINT_T1);
#pragma GCC unroll 3
            for (int i = 0; i < mr; i++) acc[i][j] = dot(acc[i][j], xv[i], wv);
        }
        next += fetch * LINE;
    }
    if (at < k)
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j++)
                acc[i][j] = dot(acc[i][j], part(x + i * sx + at, k - at), part(w + j * sw + at, k - at));
}

/* Multiplies rows [m, m + mr) of x with W rows [n, n + nr) over K from k0 to k1. `kept` holds unfinished sums. */
INLINE void step(const linear_args * a, long m, long n, long k0, long k1, const int mr, const int nr,
                       __m512 *kept, const char *next, const int fetch) {
    __m512 acc[MR][NR];
#pragma GCC unroll 3
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nr; j++) acc[i][j] = k0 ? kept[i * NR + j] : _mm512_setzero_ps();
    tile(acc, a->x + m * a->stride_x + k0, a->stride_x, a->w + n * a->k + k0, a->k, k1 - k0, mr, nr, next, fetch);
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

#define STEP(MR_, NR_, FETCH_) step(a, m, n, k0, k1, MR_, NR_, kept, next, FETCH_)
#define BY_ROWS(NR_, FETCH_)                                                                                           \
    (mr == 3   ? STEP(3, NR_, FETCH_)                                                                                  \
     : mr == 2 ? STEP(2, NR_, FETCH_)                                                                                  \
               : STEP(1, NR_, FETCH_))

static void pick(const linear_args * a, long m, int mr, long n, long k0, long k1, __m512 *kept,
                       const char *next, int fetch) {
    if (fetch == 8) BY_ROWS(8, 8);
    else if (fetch == 4) BY_ROWS(8, 4);
    else if (fetch == 2) BY_ROWS(8, 2);
    else if (fetch == 1) BY_ROWS(8, 1);
    else BY_ROWS(8, 0);
}

/* Multiplies the last rows of W, fewer than a tile, in one pass. */
static void rest(const linear_args *a, long m, int mr, long n, long end) {
    const long k0 = 0, k1 = a->k;
    __m512 kept[MR * NR]; /* unused, because K is not divided */
    const char *next = NULL;
    for (; n + 4 <= end; n += 4) BY_ROWS(4, 0);
    for (; n < end; n++) BY_ROWS(1, 0);
}

/* Multiplies `mr` rows of x with W rows [n, n + nr), and prefetches the tile `ahead` tiles later in memory order. */
INLINE void once_tile(const linear_args *a, long m, long n, const int mr, const int nr, const int ahead) {
    const elem *x = a->x + m * a->stride_x, *w = a->w + n * a->k;
    const char *next = (const char *)(w + ahead * nr * a->k);
    const long step = LANES * PAIR;
    long at = 0;
    __m512 acc[ONCE][BROAD];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 4
        for (int j = 0; j < nr; j++) acc[i][j] = _mm512_setzero_ps();
    for (; at + step <= a->k; at += step, next += nr * LINE) {
        __m512i wv[BROAD];
#pragma GCC unroll 4
        for (int j = 0; j < nr; j++) {
            wv[j] = _mm512_loadu_si512(w + j * a->k + at);
            _mm_prefetch(next + j * LINE, _MM_HINT_T0);
        }
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++) {
            const __m512i xv = _mm512_loadu_si512(x + i * a->stride_x + at);
#pragma GCC unroll 4
            for (int j = 0; j < nr; j++) acc[i][j] = dot(acc[i][j], xv, wv[j]);
        }
    }
    if (at < a->k)
        for (int i = 0; i < mr; i++)
            for (int j = 0; j < nr; j++)
                acc[i][j] =
                    dot(acc[i][j], part(x + i * a->stride_x + at, a->k - at), part(w + j * a->k + at, a->k - at));
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
    case 4: TILES(4, BROAD, 1);
    case 5: TILES(5, BROAD, 1);
    case 6: TILES(6, BROAD, 1);
    case 7: TILES(7, NARROW, 2);
    case 8: TILES(8, NARROW, 2);
    }
    for (long i = 0; i < rows; i += MR) rest(a, m + i, (int)MIN(MR, rows - i), n, end);
}

/* Multiplies all rows of a panel of x with W rows [begin, end). */
static void panel(const linear_args * a, long first, long rows, long begin, long end) {
    static __thread __m512 kept[(MAX_PANEL + MR) * NR];
    const long near = 2 * NARROW * a->k * (long)sizeof(elem) <= NEAR_BYTES;
    if (1 < rows && rows <= (near ? ONCE : WIDE)) {
        once(a, first, rows, begin, end);
        return;
    }
    const long passes = (rows + MR - 1) / MR, most = TILE_BYTES / (long)sizeof(elem);
    const long parts = rows > MR ? (a->k + most - 1) / most : 1;
    const long kb = ((a->k + parts - 1) / parts + 63) / 64 * 64;
    const int fetch = passes >= 8 ? 1 : passes >= 4 ? 2 : passes >= 2 ? 4 : 8;
    const long lines = fetch * LINE, step = LANES * PAIR;
    long n = begin;
    for (; n + NR <= end && rows > 1; n += NR) {
        /* Prefetches the next rows of W in memory order, which is the fastest order. */
        const char *next = (const char *)(a->w + (n + NR) * a->k), *stop = next + NR * a->k * sizeof(elem);
        for (long k0 = 0; k0 < a->k; k0 += kb) {
            const long k1 = MIN(a->k, k0 + kb);
            for (long p = 0; p < passes; p++) {
                const long m = rows * p / passes, count = rows * (p + 1) / passes - m;
                const int mine = n + 2 * NR <= end && next < stop ? fetch : 0;
                pick(a, first + m, (int)count, n, k0, k1, kept + m * NR, next, mine);
                next += mine ? (k1 - k0) / step * lines : 0;
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

void NAME(linear)(const linear_args *a, int threads) {
    const long most = MAX(MR, MIN(MAX_PANEL, PANEL_BYTES / (long)(a->k * sizeof(elem)) / MR * MR));
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
#undef STEP
#undef BY_ROWS
