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

/* float16: rounded to the nearest, ties to even; too large is infinite. */
static inline uint16_t swarm_narrow_f16(float x) {
  uint32_t bits, least = 0x3f000000; /* 0.5, whose neighbour is one least float16 away */
  memcpy(&bits, &x, sizeof bits);
  uint16_t sign = (uint16_t)(bits >> 16 & 0x8000);
  bits &= 0x7fffffff;
  if (bits > 0x7f800000) return sign | 0x7e00;
  if (bits >= 0x477ff000) return sign | 0x7c00;
  if (bits >= 0x38800000) return (uint16_t)(sign | (bits - 0x38000000 + 0xfff + (bits >> 13 & 1)) >> 13);
  float moved = swarm_float_of(bits) + 0.5f;
  memcpy(&bits, &moved, sizeof bits);
  return (uint16_t)(sign | (bits - least));
}

#endif
