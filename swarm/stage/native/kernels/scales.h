/* Scales and minima of a group's 64 outputs, as float32. All of them are exact but zero points times float32 scales. */
#ifndef SWARM_SCALES_H
#define SWARM_SCALES_H

#include "../layout.h"

/* Of a group: for each of the 64 outputs. */
typedef struct {
  float scales[64], minima[64];
} Factors;

/* The same in registers. Minima are 0 if the format has none. */
typedef struct {
  vec scale[4], minimum[4];
} FactorVectors;

INLINE vec load_scale(int64_t encoding, const char *from, const char *nested, int64_t at) {
  if (encoding == SWARM_SCALES_FLOAT16) return v_load_f16((const uint16_t *)from + at);
  if (encoding == SWARM_SCALES_BFLOAT16) return v_load_bf16((const uint16_t *)from + at);
  if (encoding == SWARM_SCALES_FLOAT32) return v_load((const float *)from + at);
  return v_mul(v_load_f16((const uint16_t *)nested + at), v_load_i8((const int8_t *)from + at));
}

INLINE vec load_minimum(const SwarmFormat *format, const char *from, const char *nested, int64_t at, vec scale) {
  if (format->minima == SWARM_NO_MINIMA) return v_set(0.0f);
  if (format->minima == SWARM_MINIMA_FLOAT16) return v_load_f16((const uint16_t *)from + at);
  vec number = v_load_u8((const uint8_t *)from + at);
  if (format->minima == SWARM_ZERO_POINTS) return v_mul(scale, v_sub(number, v_set((float)format->offset)));
  return v_mul(v_load_f16((const uint16_t *)nested + at), number);
}

/* Those of a group of a block. */
INLINE FactorVectors factors_of(const SwarmFormat *format, const SwarmLayout *layout, const char *block,
                                int64_t group) {
  const char *from = block + layout->nested + group * layout->group + layout->codes;
  const char *nested = block + group * format->group / SUPER_GROUP * layout->super;
  const char *nested_minima = nested + (format->scales == SWARM_SCALES_NESTED ? 128 : 0);
  FactorVectors all;
  _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {
    all.scale[v] = load_scale(format->scales, from, nested, v * 16);
    all.minimum[v] = load_minimum(format, from + layout->scales, nested_minima, v * 16, all.scale[v]);
  }
  return all;
}

static void load_factors(const SwarmFormat *format, const SwarmLayout *layout, const char *block, int64_t group,
                         Factors *to) {
  FactorVectors all = factors_of(format, layout, block, group);
  for (int v = 0; v < 4; v++) {
    v_store(to->scales + v * 16, all.scale[v]);
    if (format->minima != SWARM_NO_MINIMA) v_store(to->minima + v * 16, all.minimum[v]);
  }
}

INLINE FactorVectors loaded_factors(const Factors *from, int has_minima) {
  FactorVectors all;
  for (int v = 0; v < 4; v++) {
    all.scale[v] = v_load(from->scales + v * 16);
    all.minimum[v] = has_minima ? v_load(from->minima + v * 16) : v_set(0.0f);
  }
  return all;
}

#endif
