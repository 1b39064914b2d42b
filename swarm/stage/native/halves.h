/* Numbers of sixteen bits one at a time, in plain C. */
#ifndef SWARM_HALVES_H
#define SWARM_HALVES_H

#include <stdint.h>
#include <string.h>

static inline float swarm_float_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float swarm_widen_bf16(uint16_t half) { return swarm_float_of((uint32_t)half << 16); }

/* float16: five bits of exponent, ten of fraction. Exact. */
static inline float swarm_widen_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16, exponent = half >> 10 & 0x1f, fraction = half & 0x3ff;
  if (exponent == 0x1f) return swarm_float_of(sign | 0x7f800000 | fraction << 13);
  if (exponent != 0) return swarm_float_of(sign | (exponent + 112) << 23 | fraction << 13);
  float small = (float)fraction * 0x1p-24f;
  return sign ? -small : small;
}

/* bfloat16: rounded to the nearest, ties to even; NaN stays one. */
static inline uint16_t swarm_narrow_bf16(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (x != x) return 0x7fc0;
  return (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

#endif
