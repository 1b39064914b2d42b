/* Some of sixteen bfloat16, where the processor has no loads and stores under a mask for them: by way of an array. */
#ifndef SWARM_SIMD_TAILS_H
#define SWARM_SIMD_TAILS_H

INLINE vec v_load_bf16_some(const uint16_t *from, int64_t count) {
  uint16_t some[16] = {0};
  for (int64_t i = 0; i < count && i < 16; i++) some[i] = from[i];
  return v_load_bf16(some);
}
INLINE void v_store_bf16_some(uint16_t *to, vec x, int64_t count) {
  uint16_t all[16];
  v_store_bf16(all, x);
  for (int64_t i = 0; i < count && i < 16; i++) to[i] = all[i];
}

#endif
