/* Products of int8 activations with int8 or int4 weights. Sums within a group of K are integers, therefore exact in any
 * order, and groups are added in one order. So the bits of a row depend neither on other rows nor on the processor.
 *
 * Weights are stored without sign (`offset` is added) in panels of 16 outputs. A panel has 64 bytes for each 4 steps of
 * K: 4 bytes of each output. Levels of 4 bits take 8 steps: 4 in the low half of each byte and 4 in the high half. */
#include "common.h"

#define PANEL 16
#define QUAD 4 /* steps of K in one 32-bit lane */
#define Q_VECTORS (PANEL / QLANES) /* of one panel */
#define AHEAD 4096                 /* bytes; the processor's own prefetches are too few for 4 bits and one row */

#if defined(__aarch64__)
#define QLANES 4
#define QROWS 4
#define QWIDE 4
#define SIGNED8 /* `sdot` needs two factors with sign, as below */
typedef int32x4_t ints;
typedef float32x4_t floats;
#define REGISTER "+w"
#define q_set(v) vdupq_n_s32(v)
#define q_load(p) vld1q_s32((const int32_t *)(p))
#define q_and(a, b) ((a) & (b))
#define q_high(a) ((ints)vshrq_n_u8((uint8x16_t)(a), 4))
#define f_zero() vdupq_n_f32(0)
#define f_set(v) vdupq_n_f32(v)
#define f_load(p) vld1q_f32(p)
#define f_store(p, v) vst1q_f32(p, v)
#define f_of(a) vcvtq_f32_s32(a)
#define f_fma(a, b, c) vfmaq_f32(c, a, b)
#define f_mul(a, b) vmulq_f32(a, b)
#define f_half(p) vcvt_f32_f16((float16x4_t)vld1_u16(p))
INLINE floats f_bytes(const uint8_t *p) {
    uint32_t four;
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_u32(vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four)))));
}
#define q_weight8(w) ((w) ^ q_set((int32_t)0x80808080))
#define q_dot8(acc, w, x) vdotq_s32(acc, (int8x16_t)(w), (int8x16_t)(x))
#define q_dot4 q_dot8
#elif defined(__AVX512VNNI__)
#define QLANES 16
#define REGISTER "+v"
#define QROWS 6
#define QWIDE 4 /* vectors of outputs of a tile */
typedef __m512i ints;
typedef __m512 floats;
#define q_set(v) _mm512_set1_epi32(v)
#define q_load(p) _mm512_loadu_si512(p)
#define q_and(a, b) _mm512_and_si512(a, b)
#define q_high(a) _mm512_srli_epi16(a, 4)
#define f_zero() _mm512_setzero_ps()
#define f_set(v) _mm512_set1_ps(v)
#define f_load(p) _mm512_loadu_ps(p)
#define f_store(p, v) _mm512_storeu_ps(p, v)
#define f_of(a) _mm512_cvtepi32_ps(a)
#define f_fma(a, b, c) _mm512_fmadd_ps(a, b, c)
#define f_mul(a, b) _mm512_mul_ps(a, b)
#define f_half(p) _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(p)))
#define f_bytes(p) _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)(p))))
typedef ints weight_t;
#define q_weight8(w) (w)
#define q_dot8(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)
#define q_dot4(acc, w, x) _mm512_dpbusd_epi32(acc, w, x)
#else
#define REGISTER "+x"
#define QLANES 8
#define QROWS 3
#define QWIDE 2
typedef __m256i ints;
typedef __m256 floats;
#define q_set(v) _mm256_set1_epi32(v)
#define q_load(p) _mm256_loadu_si256((const __m256i *)(p))
#define q_and(a, b) _mm256_and_si256(a, b)
#define q_high(a) _mm256_srli_epi16(a, 4)
#define f_zero() _mm256_setzero_ps()
#define f_set(v) _mm256_set1_ps(v)
#define f_load(p) _mm256_loadu_ps(p)
#define f_store(p, v) _mm256_storeu_ps(p, v)
#define f_of(a) _mm256_cvtepi32_ps(a)
#define f_fma(a, b, c) _mm256_fmadd_ps(a, b, c)
#define f_mul(a, b) _mm256_mul_ps(a, b)
#define f_half(p) _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(p)))
#define f_bytes(p) _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)(p))))
#if defined(__AVXVNNI__)
#define q_dpbusd(acc, w, x) _mm256_dpbusd_avx_epi32(acc, w, x)
#elif defined(__AVX512VNNI__) && defined(__AVX512VL__)
#define q_dpbusd(acc, w, x) _mm256_dpbusd_epi32(acc, w, x)
#endif
#ifdef q_dpbusd
typedef ints weight_t;
#define q_weight8(w) (w)
#define q_dot8(acc, w, x) q_dpbusd(acc, w, x)
#define q_dot4(acc, w, x) q_dpbusd(acc, w, x)
#else
/* `vpmaddubsw` saturates at 16 bits: |w| * x is at most 128 * 127, so that two products fit. The offset of 128 stays
 * out of the product and is subtracted for these weights only. */
#define SIGNED8
#define q_pairs(acc, p) _mm256_add_epi32(acc, _mm256_madd_epi16(p, _mm256_set1_epi16(1)))
#define q_weight8(w) _mm256_xor_si256(w, _mm256_set1_epi8((char)0x80))
#define q_dot8(acc, w, x) q_pairs(acc, _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(x, w)))
#define q_dot4(acc, w, x) q_pairs(acc, _mm256_maddubs_epi16(w, x))
#endif
#endif

typedef struct {
    const elem *x;
    int8_t *q;      /* [rows, padded], zero from k on */
    float *scales;  /* [rows] */
    int32_t *sums;  /* [rows, padded / group] of q */
    long rows, k, padded, stride_x, group;
} quantize_args;

INLINE float wide_of(elem v) {
#ifdef ELEM_BF16
    const union { uint32_t bits; float value; } u = {(uint32_t)v << 16};
    return u.value;
#else
    return v;
#endif
}

INLINE int32_t bits_of(float v) {
    const union { float value; int32_t bits; } u = {v};
    return u.bits;
}

/* Writes a row to int8 with the scale max|x| / 127. A row that is not finite gets the scale NaN. */
static void quantize_row(const quantize_args *a, long row) {
    const elem *x = a->x + row * a->stride_x;
    int8_t *q = a->q + row * a->padded;
    int32_t most = 0;
    for (long i = 0; i < a->k; i++) most = MAX(most, bits_of(wide_of(x[i])) & 0x7fffffff);
    const union { int32_t bits; float value; } amax = {most};
    const int finite = most < 0x7f800000;
    a->scales[row] = finite ? amax.value / 127.0f : NAN;
    const float inverse = finite && amax.value > 1e-30f ? 127.0f / amax.value : 0.0f;
    const float magic = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer, ties to even */
    for (long i = 0; i < a->k; i++) q[i] = (int8_t)(bits_of(__builtin_fmaf(wide_of(x[i]), inverse, magic)) - 0x4b400000);
    memset(q + a->k, 0, a->padded - a->k);
    const long groups = a->padded / a->group;
    for (long g = 0; g < groups; g++) {
        int32_t sum = 0;
        for (long i = 0; i < a->group; i++) sum += q[g * a->group + i];
        a->sums[row * groups + g] = sum;
    }
}

void NAME(quantize)(const quantize_args *a, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static) if (threads > 1 && a->rows > 1)
    for (long row = 0; row < a->rows; row++) quantize_row(a, row);
}

typedef struct {
    const int8_t *q;
    const float *scales;
    const int32_t *sums;
    const uint8_t *w;       /* panels of 16 outputs */
    const uint16_t *groups; /* float16 [n / 16, padded / group, 16], or NULL for 1 */
    const uint8_t *zeros;   /* as groups, or NULL for the offset */
    const float *factors, *bias; /* [n] with whole panels; bias may be NULL */
    void *y; /* elements, or float32 if `wide` */
    long rows, n, padded, group, bits, stride_y, wide;
} product_args;

INLINE void put_panel(const product_args *a, long m, long panel, const float *sums) {
    const long n = panel * PANEL, count = MIN(PANEL, a->n - n), at = m * a->stride_y + n;
#ifdef ELEM_BF16
    if (!a->wide) {
        uint16_t *y = (uint16_t *)a->y + at;
        for (long i = 0; i < count; i++) {
            const uint32_t bits = (uint32_t)bits_of(sums[i]);
            const uint32_t near = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
            y[i] = (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? 0x7fc0 : near);
        }
        return;
    }
#endif
    memcpy((float *)a->y + at, sums, count * sizeof(float));
}

/* Prevents copies of sums, for which the compiler would store others to memory. */
INLINE ints q_held(ints v) {
    __asm__("" : REGISTER(v));
    return v;
}

/* acc += products of 4 steps of K from `x` on. */
INLINE void q_step(ints (*acc)[QWIDE], const ints *wv, const int8_t *x, long stride, const int mr, const int nv,
                   const int bits) {
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        const ints xv = q_set(*(const int32_t *)(x + i * stride));
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) acc[i][j] = bits == 8 ? q_dot8(acc[i][j], wv[j], xv) : q_dot4(acc[i][j], wv[j], xv);
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) acc[i][j] = q_held(acc[i][j]);
    }
}

/* acc += products of `length` steps of K. Low and high halves of bytes are multiplied in turn: with both of them at
 * once, the sums would not fit into the registers. */
INLINE void q_group(ints (*acc)[QWIDE], const uint8_t *w, long panel_bytes, const int8_t *x, long stride, long length,
                    const int mr, const int nv, const int bits) {
    const ints mask = q_set(0x0f0f0f0f);
    for (const int8_t *end = x + length; x < end; x += QUAD * 8 / bits, w += 64) {
#pragma GCC unroll 2
        for (int half = 0; half < 8 / bits; half++) {
            const uint8_t *here = w;
            ints wv[QWIDE];
            __asm__("" : "+r"(here)); /* the second half is loaded again */
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) {
                if (mr == 1 && bits == 4 && !half && j % Q_VECTORS == 0)
                    fetch_near(here + j / Q_VECTORS * panel_bytes + AHEAD);
                wv[j] = q_load(here + j / Q_VECTORS * panel_bytes + j % Q_VECTORS * (64 / Q_VECTORS));
                wv[j] = bits == 8 ? q_weight8(wv[j]) : q_and(half ? q_high(wv[j]) : wv[j], mask);
            }
            q_step(acc, wv, x + half * QUAD, stride, mr, nv, bits);
        }
    }
}

/* Multiplies `mr` rows with `nv` vectors of outputs, from vector v of panel p on. Totals of groups stay in memory, so
 * that the registers have room for the sums of one group. */
INLINE void q_tile(const product_args *a, long m, long p, const int mr, const int nv, const int bits) {
    const long panel_bytes = a->padded * PANEL * bits / 8, groups = a->padded / a->group, stride = a->padded;
    const uint8_t *w = a->w + p * panel_bytes;
    const int8_t *x = a->q + m * stride;
    const int32_t offset = bits == 4 ? 8 : 128;
#ifdef SIGNED8
    const int32_t hidden = bits == 8 ? 128 : 0; /* part of the offset that `q_weight8` has taken away */
#else
    const int32_t hidden = 0;
#endif
    const int32_t start = hidden - (a->zeros ? 0 : offset);
    floats total[QROWS][QWIDE];
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) total[i][j] = f_zero();
    for (long g = 0; g < groups; g++) {
        const int32_t *sums = a->sums + m * groups + g;
        ints acc[QROWS][QWIDE];
#pragma GCC unroll 8
        for (int i = 0; i < mr; i++)
#pragma GCC unroll 8
            for (int j = 0; j < nv; j++) acc[i][j] = q_held(q_set(start * sums[i * groups]));
        if (QLANES == 16 && mr == QROWS) __asm__("" : "+m"(total)); /* keeps the totals in memory */
        q_group(acc, w + g * a->group * PANEL * bits / 8, panel_bytes, x + g * a->group, stride, a->group, mr, nv, bits);
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            const long of = ((p + j / Q_VECTORS) * groups + g) * PANEL + j % Q_VECTORS * QLANES;
            const floats scale = a->groups ? f_half(a->groups + of) : f_set(1.0f);
#pragma GCC unroll 8
            for (int i = 0; i < mr; i++) {
                floats sum = f_of(acc[i][j]);
                if (a->zeros) sum = f_fma(f_bytes(a->zeros + of), f_set(-(float)sums[i * groups]), sum); /* exact */
                total[i][j] = f_fma(sum, scale, total[i][j]);
            }
        }
    }
#pragma GCC unroll 8
    for (int i = 0; i < mr; i++) {
        float out[QWIDE * QLANES];
#pragma GCC unroll 8
        for (int j = 0; j < nv; j++) {
            const long n = p * PANEL + j * QLANES;
            const floats factor = f_mul(f_load(a->factors + n), f_set(a->scales[m + i]));
            f_store(out + j * QLANES, f_fma(total[i][j], factor, a->bias ? f_load(a->bias + n) : f_zero()));
        }
        for (int b = 0; b < nv / Q_VECTORS; b++) put_panel(a, m + i, p + b, out + b * PANEL);
    }
}

/* All rows with panels [p, end). Few variants, because each takes a second to compile. One row takes one panel after
 * the other, because weights in memory order are read fastest. */
INLINE void q_panels(const product_args *a, long p, long end, const int bits) {
    for (; a->rows > 1 && p + QWIDE / Q_VECTORS <= end; p += QWIDE / Q_VECTORS) {
        long m = 0;
        for (; m + QROWS <= a->rows; m += QROWS) q_tile(a, m, p, QROWS, QWIDE, bits);
        for (; m + 2 <= a->rows; m += 2) q_tile(a, m, p, 2, QWIDE, bits);
        if (m < a->rows) q_tile(a, m, p, 1, QWIDE, bits);
    }
    for (; p < end; p++)
        for (long m = 0; m < a->rows; m++) q_tile(a, m, p, 1, Q_VECTORS, bits);
}

static void q_panels8(const product_args *a, long p, long end) { q_panels(a, p, end, 8); }
static void q_panels4(const product_args *a, long p, long end) { q_panels(a, p, end, 4); }

void NAME(quantized)(const product_args *a, int threads) {
    const long panels = (a->n + PANEL - 1) / PANEL, even = (panels + threads - 1) / threads;
    const long piece = threads > 1 ? MAX(4, MIN(even, (even / 8 + 3) / 4 * 4)) : panels;
    const long pieces = (panels + piece - 1) / piece;
#pragma omp parallel for num_threads(threads) schedule(dynamic, 1) if (threads > 1)
    for (long i = 0; i < pieces; i++) {
        const long begin = i * piece, end = MIN(panels, begin + piece);
        (a->bits == 4 ? q_panels4 : q_panels8)(a, begin, end);
    }
}
