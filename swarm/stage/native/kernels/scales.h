/* Scales and minima of a group's 64 outputs, as float32. All of them are exact but zero points times float32 scales. */
#ifndef SWARM_SCALES_H
#define SWARM_SCALES_H

#include "../layout.h"

/* Of a group: for each of the 64 outputs. */
typedef struct {
  float scales[64], minima[64];
} Factors;

INLINE vec load_scale(int64_t encoding, const char *from, const char *nested, int64_t at) {
  if (encoding == SWARM_SCALES_FLOAT16) return v_load_f16((const uint16_t *)from + at);
  if (encoding == SWARM_SCALES_BFLOAT16) return v_load_bf16((const uint16_t *)from + at);
  if (encoding == SWARM_SCALES_FLOAT32) return v_load((const float *)from + at);
  return v_mul(v_load_f16((const uint16_t *)nested + at), v_load_i8((const int8_t *)from + at));
}

INLINE vec load_minimum(const SwarmFormat *format, const char *from, const char *nested, int64_t at, vec scale) {
  if (format->minima == SWARM_MINIMA_FLOAT16) return v_load_f16((const uint16_t *)from + at);
  vec number = v_load_u8((const uint8_t *)from + at);
  if (format->minima == SWARM_ZERO_POINTS) return v_mul(scale, v_sub(number, v_set((float)format->offset)));
  return v_mul(v_load_f16((const uint16_t *)nested + at), number);
}

/* Those of a group of a block. */
static void load_factors(const SwarmFormat *format, const SwarmLayout *layout, const char *block, int64_t group,
                         Factors *to) {
  const char *from = block + layout->nested + group * layout->group + layout->codes;
  const char *nested = block + group * format->group / SUPER_GROUP * layout->super;
  const char *nested_minima = nested + (format->scales == SWARM_SCALES_NESTED ? 128 : 0);
  for (int at = 0; at < 64; at += 16) {
    vec scale = load_scale(format->scales, from, nested, at);
    v_store(to->scales + at, scale);
    if (format->minima == SWARM_NO_MINIMA) continue;
    v_store(to->minima + at, load_minimum(format, from + layout->scales, nested_minima, at, scale));
  }
}

#endif
