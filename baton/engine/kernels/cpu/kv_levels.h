#pragma once
/* Heads of an int8 cache: `dim` levels, then their scale as a bfloat16 (baton/engine/kernels/kv_levels.py). */
#include "common.h"

#define TINY 1e-30f

INLINE V v_from_levels(const int8_t *p) {
#ifdef __aarch64__
    int32_t four; /* no more is read */
    memcpy(&four, p, sizeof four);
    return vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(vcreate_s8((uint32_t)four)))));
#elif defined(__AVX512F__)
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
#else
    return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
#endif
}

/* Writes the nearest integers, ties to even. */
INLINE void v_to_levels(int8_t *p, V x) {
#ifdef __aarch64__
    const int16x4_t narrow = vqmovn_s32(vcvtnq_s32_f32(x));
    const int8x8_t bytes = vqmovn_s16(vcombine_s16(narrow, narrow));
    memcpy(p, &bytes, LANES);
#elif defined(__AVX512F__)
    _mm_storeu_si128((__m128i *)p, _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(x)));
#else
    const VI wide = _mm256_cvtps_epi32(x);
    const __m128i half = _mm_packs_epi32(_mm256_castsi256_si128(wide), _mm256_extracti128_si256(wide, 1));
    _mm_storel_epi64((__m128i *)p, _mm_packs_epi16(half, half));
#endif
}

/* Loads the levels of `n` words, at most LANES, as words. They are exact in bfloat16. The rest is zero. */
INLINE VI load_levels(const int8_t *p, long n) {
    int8_t some[LANES * PAIR];
    if (!WHOLE(n)) {
        memset(some, 0, sizeof some);
        memcpy(some, p, MIN(n, LANES) * PAIR);
        p = some;
    }
#if PAIR == 2
    return (VI)_mm512_cvtne2ps_pbh(v_from_levels(p + LANES), v_from_levels(p));
#else
    return (VI)v_from_levels(p);
#endif
}

INLINE float scale_of(const int8_t *head, long dim) {
    uint16_t bits;
    memcpy(&bits, head + dim, sizeof bits);
    const union { uint32_t bits; float value; } u = {(uint32_t)bits << 16};
    return u.value;
}

INLINE void store_levels(const elem *x, int8_t *head, long dim) {
    V most = v_set(0), odd = v_set(0);
    EACH_VECTOR(i, lanes, dim, {
        const V v = load(x + i, lanes);
        most = OP(max_ps)(OP(max_ps)(v, -v), most); /* in this order, zero stays positive */
        odd += v - v; /* NaN unless all are finite */
    });
    const V scale = v_narrow(v_set(v_sum(odd) == 0 ? v_top(most) / 127.0f : NAN));
    const float step = OP(cvtss_f32)(scale);
    EACH_VECTOR(i, lanes, dim, {
        int8_t levels[LANES];
        V v = v_set(0);
        if (step > TINY) v = load(x + i, lanes) / scale;
        v_to_levels(levels, v);
        memcpy(head + i, levels, lanes);
    });
    memcpy(head + dim, (const char *)&step + 2, 2);
}
