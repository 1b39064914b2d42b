/* Sixteen float32 lanes in plain C; see avx512.h for what the operations do. Slow, right, and the same bits. */
#ifndef SWARM_SIMD_H
#define SWARM_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((unused))

#define VECTORS_AT_ONCE(rows) 1

typedef struct {
  float lane[16];
} vec;
typedef unsigned mask;

#define V_EACH1(name, expression)                                  \
  INLINE vec name(vec x) {                                         \
    vec result;                                                    \
    for (int i = 0; i < 16; i++) {                                 \
      float a = x.lane[i];                                         \
      result.lane[i] = (expression);                               \
    }                                                              \
    return result;                                                 \
  }
#define V_EACH2(name, expression)                                  \
  INLINE vec name(vec x, vec y) {                                  \
    vec result;                                                    \
    for (int i = 0; i < 16; i++) {                                 \
      float a = x.lane[i], b = y.lane[i];                          \
      result.lane[i] = (expression);                               \
    }                                                              \
    return result;                                                 \
  }
#define V_EACH3(name, expression)                                  \
  INLINE vec name(vec x, vec y, vec z) {                           \
    vec result;                                                    \
    for (int i = 0; i < 16; i++) {                                 \
      float a = x.lane[i], b = y.lane[i], c = z.lane[i];           \
      result.lane[i] = (expression);                               \
    }                                                              \
    return result;                                                 \
  }
#define M_EACH2(name, expression)                                  \
  INLINE mask name(vec x, vec y) {                                 \
    mask result = 0;                                               \
    for (int i = 0; i < 16; i++) {                                 \
      float a = x.lane[i], b = y.lane[i];                          \
      if (expression) result |= 1u << i;                           \
    }                                                              \
    return result;                                                 \
  }

INLINE float power_1(float n) {
  uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
  float power;
  memcpy(&power, &bits, sizeof power);
  return power;
}

INLINE vec v_set(float x) {
  vec result;
  for (int i = 0; i < 16; i++) result.lane[i] = x;
  return result;
}
INLINE vec v_load(const float *from) {
  vec result;
  memcpy(result.lane, from, sizeof result.lane);
  return result;
}
INLINE void v_store(float *to, vec x) { memcpy(to, x.lane, sizeof x.lane); }
V_EACH2(v_add, a + b)
V_EACH2(v_sub, a - b)
V_EACH2(v_mul, a *b)
V_EACH2(v_div, a / b)
V_EACH3(v_fma, fmaf(a, b, c))
V_EACH3(v_fnma, fmaf(-a, b, c))
V_EACH2(v_max, a > b ? a : b)
V_EACH2(v_min, a < b ? a : b)
V_EACH1(v_round, rintf(a)) /* to even: nobody changes the rounding mode */
V_EACH1(v_power, power_1(a))
M_EACH2(m_less, a < b)
M_EACH2(m_equal, a == b)

INLINE unsigned m_bits(mask m) { return m; }
INLINE vec v_select(mask m, vec yes, vec no) {
  for (int i = 0; i < 16; i++)
    if (m >> i & 1) no.lane[i] = yes.lane[i];
  return no;
}

INLINE vec v_load_some(const float *from, int64_t count) {
  vec result = v_set(0.0f);
  for (int64_t i = 0; i < count && i < 16; i++) result.lane[i] = from[i];
  return result;
}
INLINE void v_store_some(float *to, vec x, int64_t count) {
  for (int64_t i = 0; i < count && i < 16; i++) to[i] = x.lane[i];
}

INLINE float widen_1(uint16_t half) {
  uint32_t bits = (uint32_t)half << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}
INLINE uint16_t narrow_1(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
INLINE vec v_load_bf16_some(const uint16_t *from, int64_t count) {
  vec result = v_set(0.0f);
  for (int64_t i = 0; i < count && i < 16; i++) result.lane[i] = widen_1(from[i]);
  return result;
}
INLINE vec v_load_bf16(const uint16_t *from) { return v_load_bf16_some(from, 16); }
INLINE void v_store_bf16_some(uint16_t *to, vec x, int64_t count) {
  for (int64_t i = 0; i < count && i < 16; i++) to[i] = narrow_1(x.lane[i]);
}
INLINE void v_store_bf16(uint16_t *to, vec x) { v_store_bf16_some(to, x, 16); }

INLINE void v_load_pairs(const uint16_t *from, vec *first, vec *second) {
  for (int i = 0; i < 16; i++) {
    first->lane[i] = widen_1(from[2 * i]);
    second->lane[i] = widen_1(from[2 * i + 1]);
  }
}

INLINE void v_to_array(vec x, float lanes[16]) { memcpy(lanes, x.lane, sizeof x.lane); }

INLINE void fetch_near(const void *from) { __builtin_prefetch(from, 0, 3); }
INLINE void fetch_far(const void *from) { __builtin_prefetch(from, 0, 2); }

#include "bytes_portable.h"
#include "dots_portable.h"

#undef V_EACH1
#undef V_EACH2
#undef V_EACH3
#undef M_EACH2
#endif
