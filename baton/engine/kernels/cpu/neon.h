#pragma once
/* Vectors of 4 float32 for NEON, with the names of vec.h. `OP` serves the names that both families of processors use. */
#include <arm_neon.h>

#define LANES 4
#define OP(name) neon_##name
typedef float32x4_t V;
typedef int32x4_t VI;

/* Products are acc + a * b, rounded once. */
INLINE V neon_fmadd_ps(V a, V b, V acc) { return vfmaq_f32(acc, a, b); }
INLINE V neon_fnmadd_ps(V a, V b, V acc) { return vfmsq_f32(acc, a, b); }
/* Return y if a lane of either is NaN, as the instructions of x86 do. */
INLINE V neon_max_ps(V x, V y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE V neon_min_ps(V x, V y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE float neon_cvtss_f32(V x) { return vgetq_lane_f32(x, 0); }
INLINE VI neon_add_epi32(VI a, VI b) { return vaddq_s32(a, b); }
#define neon_slli_epi32(x, n) vshlq_n_s32(x, n)
#define neon_srli_epi32(x, n) vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), n))

INLINE V v_set(float x) { return vdupq_n_f32(x); }
INLINE V v_load(const void *p) { return vld1q_f32((const float *)p); }
INLINE void v_store(void *p, V x) { vst1q_f32((float *)p, x); }
INLINE VI vi_set(int32_t x) { return vdupq_n_s32(x); }
INLINE VI vi_load(const void *p) { return vld1q_s32((const int32_t *)p); }
INLINE void vi_store(void *p, VI x) { vst1q_s32((int32_t *)p, x); }
INLINE void vi_stream(void *p, VI x) { vi_store(p, x); }
INLINE uint32x4_t first_lanes(long n) {
    const int32_t order[LANES] = {0, 1, 2, 3};
    return vcgtq_s32(vi_set((int32_t)MAX(-1, MIN(n, LANES))), vi_load(order));
}
INLINE V v_load_first(const float *p, long n) {
    float all[LANES] = {0};
    if (WHOLE(n)) return v_load(p);
    memcpy(all, p, MIN(n, LANES) * sizeof(float));
    return v_load(all);
}
INLINE void v_store_first(float *p, long n, V x) { memcpy(p, &x, MIN(n, LANES) * sizeof(float)); }
INLINE V v_within(V x, long low, long end, V other) {
    return vbslq_f32(vbicq_u32(first_lanes(end), first_lanes(low)), x, other);
}
INLINE int v_any_above(V x, V y) { return vmaxvq_u32(vcgtq_f32(x, y)) != 0; }
INLINE V v_or_nan(V x, V y) { return vbslq_f32(vceqq_f32(y, y), x, y); }
INLINE float v_sum(V x) { return vaddvq_f32(x); }
INLINE float v_top(V x) { return vmaxvq_f32(x); }
INLINE V v_nearest(V x) { return vrndnq_f32(x); }
/* Returns x times 2^n for n from -200 on, by two steps because 2^n itself may be out of range. */
INLINE V v_scale(V x, V n) {
    const VI all = vcvtnq_s32_f32(vminq_f32(v_set(254.0f), n)), half = vshrq_n_s32(all, 1), bias = vi_set(127);
    const V first = vreinterpretq_f32_s32(vshlq_n_s32(half + bias, 23));
    return x * first * vreinterpretq_f32_s32(vshlq_n_s32(all - half + bias, 23));
}
INLINE V v_over(V x, V y) { return x / y; }
INLINE V v_from_bf16(const uint16_t *p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
