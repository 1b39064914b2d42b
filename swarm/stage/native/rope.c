/* Rotary positions: the two halves of every head turned against each other, in place. */
#if defined(__x86_64__) && defined(__linux__)
#include "rope.h"

#include "vectors.h"

TARGET static void turn_head(uint16_t *head, int64_t half, const uint16_t *cosines, const uint16_t *sines) {
  for (int64_t at = 0; at < half; at += 16) {
    __mmask16 which = first_of_16(half - at);
    __m512 first = load_wide(head + at, which), second = load_wide(head + half + at, which);
    __m512 low = _mm512_mul_ps(second, load_wide(sines + at, which));
    __m512 high = _mm512_mul_ps(first, load_wide(sines + half + at, which));
    store_bf16(head + at, which, _mm512_fmsub_ps(first, load_wide(cosines + at, which), low));
    store_bf16(head + half + at, which, _mm512_fmadd_ps(second, load_wide(cosines + half + at, which), high));
  }
}

void swarm_turn(uint16_t *rows, int64_t stride, int64_t tokens, int64_t heads, int64_t size, const uint16_t *cosines,
                const uint16_t *sines) {
  for (int64_t token = 0; token < tokens; token++, rows += stride, cosines += size, sines += size)
    for (int64_t head = 0; head < heads; head++) turn_head(rows + head * size, size / 2, cosines, sines);
}
#endif
