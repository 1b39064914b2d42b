/* Numbers of either kind, sixteen at a time; where there are fewer, the rest is 0. */
#ifndef SWARM_NUMBERS_H
#define SWARM_NUMBERS_H

#include "../kernels.h"

INLINE vec load_number(int kind, const void *from, int64_t at, int64_t count) {
  if (kind == SWARM_BFLOAT16)
    return count >= 16 ? v_load_bf16((const uint16_t *)from + at) : v_load_bf16_some((const uint16_t *)from + at, count);
  return count >= 16 ? v_load((const float *)from + at) : v_load_some((const float *)from + at, count);
}

INLINE void store_number(int kind, void *to, int64_t at, vec x, int64_t count) {
  if (kind == SWARM_BFLOAT16 && count >= 16)
    v_store_bf16((uint16_t *)to + at, x);
  else if (kind == SWARM_BFLOAT16)
    v_store_bf16_some((uint16_t *)to + at, x, count);
  else if (count >= 16)
    v_store((float *)to + at, x);
  else
    v_store_some((float *)to + at, x, count);
}

INLINE vec only_first(vec x, int64_t count) {
  float lanes[16];
  v_to_array(x, lanes);
  return v_load_some(lanes, count);
}

/* What is left of x once it is written as this kind. */
INLINE vec rounded_to(int kind, vec x) {
  uint16_t narrow[16];
  if (kind != SWARM_BFLOAT16) return x;
  v_store_bf16(narrow, x);
  return v_load_bf16(narrow);
}

#endif
