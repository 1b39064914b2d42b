/* Root-mean-square norms of rows: bfloat16 in and out, in the models' own order of rounding. */
#if defined(__x86_64__) && defined(__linux__)
#include "norms.h"

#include "vectors.h"

TARGET static float mean_square(const uint16_t *row, int64_t size) {
  __m512 sum = _mm512_setzero_ps();
  for (int64_t at = 0; at < size; at += 16) {
    __m512 some = load_wide(row + at, first_of_16(size - at));
    sum = _mm512_fmadd_ps(some, some, sum);
  }
  return _mm512_reduce_add_ps(sum) / (float)size;
}

TARGET void swarm_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t size,
                           uint16_t *out) {
  for (int64_t row = 0; row < rows; row++, x += size, out += size) {
    __m512 inverse = _mm512_set1_ps(1.0f / __builtin_sqrtf(mean_square(x, size) + epsilon));
    for (int64_t at = 0; at < size; at += 16) {
      __mmask16 which = first_of_16(size - at);
      __m512 scaled = _mm512_mul_ps(load_wide(x + at, which), inverse);
      scaled = widen((__m256i)_mm512_cvtneps_pbh(scaled)); /* rounded before it is weighted */
      store_bf16(out + at, which, _mm512_mul_ps(scaled, load_wide(weight + at, which)));
    }
  }
}
#endif
