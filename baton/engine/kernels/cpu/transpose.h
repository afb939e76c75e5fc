#pragma once
#include "common.h"

#define TRANSPOSED_STRIDE 64 /* words from one transposed row to the next */

/* Transposes 16 vectors of 16 words: out[w * TRANSPOSED_STRIDE + i] = r[i][w]. */
INLINE void transpose(__m512i r[16], int32_t *out) {
    __m512i t[16];
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
        __m512i a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88), b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
        __m512i c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88), d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
        _mm512_storeu_si512(out + (long)i * TRANSPOSED_STRIDE, _mm512_shuffle_i32x4(a, c, 0x88));
        _mm512_storeu_si512(out + (long)(i + 8) * TRANSPOSED_STRIDE, _mm512_shuffle_i32x4(a, c, 0xdd));
        _mm512_storeu_si512(out + (long)(i + 4) * TRANSPOSED_STRIDE, _mm512_shuffle_i32x4(b, d, 0x88));
        _mm512_storeu_si512(out + (long)(i + 12) * TRANSPOSED_STRIDE, _mm512_shuffle_i32x4(b, d, 0xdd));
    }
}
