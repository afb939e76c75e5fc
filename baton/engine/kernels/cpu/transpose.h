#pragma once
#include "common.h"

/* Transposes LANES vectors of LANES words: out[w * stride + i] = r[i][w]. */
#ifdef __aarch64__
INLINE void transpose(VI r[LANES], int32_t *out, const long stride) {
    const int32x4x2_t a = vtrnq_s32(r[0], r[1]), b = vtrnq_s32(r[2], r[3]);
    for (int i = 0; i < 2; i++) {
        vi_store(out + i * stride, vcombine_s32(vget_low_s32(a.val[i]), vget_low_s32(b.val[i])));
        vi_store(out + (i + 2) * stride, vcombine_s32(vget_high_s32(a.val[i]), vget_high_s32(b.val[i])));
    }
}
#elif defined(__AVX512F__)
INLINE void transpose(VI r[LANES], int32_t *out, const long stride) {
    VI t[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) {
        r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        VI a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        VI c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        vi_store(out + i * stride, _mm512_shuffle_i32x4(a, c, 0x88));
        vi_store(out + (i + 8) * stride, _mm512_shuffle_i32x4(a, c, 0xdd));
        vi_store(out + (i + 4) * stride, _mm512_shuffle_i32x4(b, d, 0x88));
        vi_store(out + (i + 12) * stride, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}
#else
INLINE void transpose(VI r[LANES], int32_t *out, const long stride) {
    VI t[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_epi32(r[i], r[i + 1]);
        t[i + 1] = _mm256_unpackhi_epi32(r[i], r[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        r[i] = _mm256_unpacklo_epi64(t[i], t[i + 2]);
        r[i + 1] = _mm256_unpackhi_epi64(t[i], t[i + 2]);
        r[i + 2] = _mm256_unpacklo_epi64(t[i + 1], t[i + 3]);
        r[i + 3] = _mm256_unpackhi_epi64(t[i + 1], t[i + 3]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        vi_store(out + i * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x20));
        vi_store(out + (i + 4) * stride, _mm256_permute2x128_si256(r[i], r[i + 4], 0x31));
    }
}
#endif
