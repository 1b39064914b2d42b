/* Sixteen float32 lanes in four registers (NEON, aarch64); see avx512.h for what the operations do. */
#ifndef SWARM_SIMD_H
#define SWARM_SIMD_H

#include <arm_neon.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))

#define VECTORS_AT_ONCE(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1) /* no more than 24 of the 32 registers */

typedef struct {
  float32x4_t a, b, c, d;
} vec;
typedef struct {
  uint32x4_t a, b, c, d; /* all ones where it holds */
} mask;

#define V_EACH1(name, f) \
  INLINE vec name(vec x) { return (vec){f(x.a), f(x.b), f(x.c), f(x.d)}; }
#define V_EACH2(name, f) \
  INLINE vec name(vec x, vec y) { return (vec){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}; }
#define V_EACH3(name, f)                                                                      \
  INLINE vec name(vec x, vec y, vec z) {                                                      \
    return (vec){f(x.a, y.a, z.a), f(x.b, y.b, z.b), f(x.c, y.c, z.c), f(x.d, y.d, z.d)};     \
  }
#define M_EACH2(name, f) \
  INLINE mask name(vec x, vec y) { return (mask){f(x.a, y.a), f(x.b, y.b), f(x.c, y.c), f(x.d, y.d)}; }

INLINE float32x4_t fma_4(float32x4_t x, float32x4_t y, float32x4_t z) { return vfmaq_f32(z, x, y); }
INLINE float32x4_t fnma_4(float32x4_t x, float32x4_t y, float32x4_t z) { return vfmsq_f32(z, x, y); }
/* As on x86: the second one unless the first is greater (less). */
INLINE float32x4_t max_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcgtq_f32(x, y), x, y); }
INLINE float32x4_t min_4(float32x4_t x, float32x4_t y) { return vbslq_f32(vcltq_f32(x, y), x, y); }
INLINE float32x4_t power_4(float32x4_t n) {
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(vcvtnq_s32_f32(n), vdupq_n_s32(127)), 23));
}

INLINE vec v_set(float x) { return (vec){vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x), vdupq_n_f32(x)}; }
INLINE vec v_load(const float *from) {
  return (vec){vld1q_f32(from), vld1q_f32(from + 4), vld1q_f32(from + 8), vld1q_f32(from + 12)};
}
INLINE void v_store(float *to, vec x) {
  vst1q_f32(to, x.a);
  vst1q_f32(to + 4, x.b);
  vst1q_f32(to + 8, x.c);
  vst1q_f32(to + 12, x.d);
}
V_EACH2(v_add, vaddq_f32)
V_EACH2(v_sub, vsubq_f32)
V_EACH2(v_mul, vmulq_f32)
V_EACH2(v_div, vdivq_f32)
V_EACH3(v_fma, fma_4)
V_EACH3(v_fnma, fnma_4)
V_EACH2(v_max, max_4)
V_EACH2(v_min, min_4)
V_EACH1(v_round, vrndnq_f32)
V_EACH1(v_power, power_4)
M_EACH2(m_less, vcltq_f32)
M_EACH2(m_equal, vceqq_f32)

INLINE unsigned bits_4(uint32x4_t m) {
  const uint32x4_t weights = {1, 2, 4, 8};
  return vaddvq_u32(vandq_u32(m, weights));
}
INLINE unsigned m_bits(mask m) { return bits_4(m.a) | bits_4(m.b) << 4 | bits_4(m.c) << 8 | bits_4(m.d) << 12; }
INLINE vec v_select(mask m, vec yes, vec no) {
  return (vec){vbslq_f32(m.a, yes.a, no.a), vbslq_f32(m.b, yes.b, no.b), vbslq_f32(m.c, yes.c, no.c),
               vbslq_f32(m.d, yes.d, no.d)};
}

INLINE vec v_load_some(const float *from, int64_t count) {
  float some[16] = {0};
  for (int64_t i = 0; i < count && i < 16; i++) some[i] = from[i];
  return v_load(some);
}
INLINE void v_store_some(float *to, vec x, int64_t count) {
  float all[16];
  v_store(all, x);
  for (int64_t i = 0; i < count && i < 16; i++) to[i] = all[i];
}

INLINE float32x4_t widen_4(uint16x4_t halves) { return vreinterpretq_f32_u32(vshll_n_u16(halves, 16)); }
INLINE uint16x4_t narrow_4(float32x4_t x) {
  uint32x4_t bits = vreinterpretq_u32_f32(x);
  uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
  uint32x4_t rounded = vaddq_u32(vaddq_u32(bits, vdupq_n_u32(0x7fff)), odd);
  rounded = vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000));
  return vshrn_n_u32(rounded, 16);
}
INLINE vec v_load_bf16(const uint16_t *from) {
  return (vec){widen_4(vld1_u16(from)), widen_4(vld1_u16(from + 4)), widen_4(vld1_u16(from + 8)),
               widen_4(vld1_u16(from + 12))};
}
INLINE void v_store_bf16(uint16_t *to, vec x) {
  vst1_u16(to, narrow_4(x.a));
  vst1_u16(to + 4, narrow_4(x.b));
  vst1_u16(to + 8, narrow_4(x.c));
  vst1_u16(to + 12, narrow_4(x.d));
}
#include "tails.h"

INLINE float32x4_t lower_4(uint32x4_t both) { return vreinterpretq_f32_u32(vshlq_n_u32(both, 16)); }
INLINE float32x4_t upper_4(uint32x4_t both) {
  return vreinterpretq_f32_u32(vandq_u32(both, vdupq_n_u32(0xffff0000u)));
}
INLINE uint32x4_t both_4(const uint16_t *from) { return vreinterpretq_u32_u16(vld1q_u16(from)); }
INLINE void v_load_pairs(const uint16_t *from, vec *first, vec *second) {
  uint32x4_t a = both_4(from), b = both_4(from + 8), c = both_4(from + 16), d = both_4(from + 24);
  *first = (vec){lower_4(a), lower_4(b), lower_4(c), lower_4(d)};
  *second = (vec){upper_4(a), upper_4(b), upper_4(c), upper_4(d)};
}

INLINE void v_to_array(vec x, float lanes[16]) { v_store(lanes, x); }

INLINE void fetch_near(const void *from) { __builtin_prefetch(from, 0, 3); }
INLINE void fetch_far(const void *from) { __builtin_prefetch(from, 0, 2); }

#include "bytes_neon.h"
#include "dots_neon.h"

#undef V_EACH1
#undef V_EACH2
#undef V_EACH3
#undef M_EACH2
#endif
