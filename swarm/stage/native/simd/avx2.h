/* Sixteen float32 lanes in two registers (AVX2 with FMA); see avx512.h for what the operations do. */
#ifndef SWARM_SIMD_H
#define SWARM_SIMD_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))

#define VECTORS_AT_ONCE(rows) ((rows) == 1 ? 4 : (rows) <= 3 ? 2 : 1) /* no more than 12 of the 16 registers */

typedef struct {
  __m256 a, b;
} vec;
typedef struct {
  __m256 a, b; /* all ones where it holds */
} mask;

#define V_EACH1(name, f) \
  INLINE vec name(vec x) { return (vec){f(x.a), f(x.b)}; }
#define V_EACH2(name, f) \
  INLINE vec name(vec x, vec y) { return (vec){f(x.a, y.a), f(x.b, y.b)}; }
#define V_EACH3(name, f) \
  INLINE vec name(vec x, vec y, vec z) { return (vec){f(x.a, y.a, z.a), f(x.b, y.b, z.b)}; }

INLINE __m256 round_8(__m256 x) { return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE vec v_set(float x) { return (vec){_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
INLINE vec v_load(const float *from) { return (vec){_mm256_loadu_ps(from), _mm256_loadu_ps(from + 8)}; }
INLINE void v_store(float *to, vec x) {
  _mm256_storeu_ps(to, x.a);
  _mm256_storeu_ps(to + 8, x.b);
}
V_EACH2(v_add, _mm256_add_ps)
V_EACH2(v_sub, _mm256_sub_ps)
V_EACH2(v_mul, _mm256_mul_ps)
V_EACH2(v_div, _mm256_div_ps)
V_EACH3(v_fma, _mm256_fmadd_ps)
V_EACH3(v_fnma, _mm256_fnmadd_ps)
V_EACH2(v_max, _mm256_max_ps)
V_EACH2(v_min, _mm256_min_ps)
V_EACH1(v_round, round_8)

INLINE mask m_less(vec x, vec y) {
  return (mask){_mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ)};
}
INLINE mask m_equal(vec x, vec y) {
  return (mask){_mm256_cmp_ps(x.a, y.a, _CMP_EQ_OQ), _mm256_cmp_ps(x.b, y.b, _CMP_EQ_OQ)};
}
INLINE unsigned m_bits(mask m) { return (unsigned)(_mm256_movemask_ps(m.a) | _mm256_movemask_ps(m.b) << 8); }
INLINE vec v_select(mask m, vec yes, vec no) {
  return (vec){_mm256_blendv_ps(no.a, yes.a, m.a), _mm256_blendv_ps(no.b, yes.b, m.b)};
}

INLINE __m256i first_8(int64_t count) {
  int most = count > 8 ? 8 : count < 0 ? 0 : (int)count;
  return _mm256_cmpgt_epi32(_mm256_set1_epi32(most), _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7));
}
INLINE vec v_load_some(const float *from, int64_t count) {
  return (vec){_mm256_maskload_ps(from, first_8(count)), _mm256_maskload_ps(from + 8, first_8(count - 8))};
}
INLINE void v_store_some(float *to, vec x, int64_t count) {
  _mm256_maskstore_ps(to, first_8(count), x.a);
  _mm256_maskstore_ps(to + 8, first_8(count - 8), x.b);
}

INLINE __m256 power_8(__m256 n) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
}
V_EACH1(v_power, power_8)

INLINE __m256 widen_8(__m128i halves) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}
INLINE __m256i narrow_8(__m256 x) { /* in the low halves of 32-bit lanes */
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd);
  __m256 none = _mm256_cmp_ps(x, x, _CMP_UNORD_Q);
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(none));
  return _mm256_srli_epi32(rounded, 16);
}
INLINE vec v_load_bf16(const uint16_t *from) {
  return (vec){widen_8(_mm_loadu_si128((const __m128i *)from)), widen_8(_mm_loadu_si128((const __m128i *)(from + 8)))};
}
INLINE void v_store_bf16(uint16_t *to, vec x) {
  __m256i both = _mm256_packus_epi32(narrow_8(x.a), narrow_8(x.b)); /* within the halves of the registers */
  _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(both, 0xd8));
}
#include "tails.h"

INLINE void v_load_pairs(const uint16_t *from, vec *first, vec *second) {
  const __m256i upper = _mm256_set1_epi32((int)0xffff0000);
  __m256i a = _mm256_loadu_si256((const __m256i *)from), b = _mm256_loadu_si256((const __m256i *)(from + 16));
  *first = (vec){_mm256_castsi256_ps(_mm256_slli_epi32(a, 16)), _mm256_castsi256_ps(_mm256_slli_epi32(b, 16))};
  *second = (vec){_mm256_castsi256_ps(_mm256_and_si256(a, upper)), _mm256_castsi256_ps(_mm256_and_si256(b, upper))};
}

INLINE void v_to_array(vec x, float lanes[16]) { v_store(lanes, x); }

INLINE void fetch_near(const void *from) { _mm_prefetch((const char *)from, _MM_HINT_T0); }
INLINE void fetch_far(const void *from) { _mm_prefetch((const char *)from, _MM_HINT_T1); }

#include "bytes_avx2.h"
#include "dots_avx2.h"

#undef V_EACH1
#undef V_EACH2
#undef V_EACH3
#endif
