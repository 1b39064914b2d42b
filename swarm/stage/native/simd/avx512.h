/* Sixteen float32 lanes in one register (AVX-512), and the operations that every kernel is written with. */
#ifndef SWARM_SIMD_H
#define SWARM_SIMD_H

#include <immintrin.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline, unused))

/* How many vectors of outputs a tile of so many rows multiplies at a time: 24 sums of the 32 registers. */
#define VECTORS_AT_ONCE(rows) 4

/* Up to how many rows weights of a few bits are decoded again for each block rather than kept (fused.h). */
#define FUSED_ROWS 4

typedef __m512 vec;
typedef __mmask16 mask;

INLINE vec v_set(float x) { return _mm512_set1_ps(x); }
INLINE vec v_load(const float *from) { return _mm512_loadu_ps(from); }
INLINE void v_store(float *to, vec x) { _mm512_storeu_ps(to, x); }
INLINE vec v_add(vec a, vec b) { return _mm512_add_ps(a, b); }
INLINE vec v_sub(vec a, vec b) { return _mm512_sub_ps(a, b); }
INLINE vec v_mul(vec a, vec b) { return _mm512_mul_ps(a, b); }
INLINE vec v_div(vec a, vec b) { return _mm512_div_ps(a, b); }
INLINE vec v_fma(vec a, vec b, vec c) { return _mm512_fmadd_ps(a, b, c); }
INLINE vec v_fnma(vec a, vec b, vec c) { return _mm512_fnmadd_ps(a, b, c); }
INLINE vec v_max(vec a, vec b) { return _mm512_max_ps(a, b); }
INLINE vec v_min(vec a, vec b) { return _mm512_min_ps(a, b); }
INLINE vec v_round(vec a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }

INLINE mask m_less(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_LT_OQ); }
INLINE mask m_equal(vec a, vec b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
INLINE unsigned m_bits(mask m) { return (unsigned)m; }
INLINE vec v_select(mask m, vec yes, vec no) { return _mm512_mask_mov_ps(no, m, yes); }

INLINE mask first_lanes(int64_t count) {
  return count >= 16 ? (mask)0xffff : count <= 0 ? (mask)0 : (mask)((1u << count) - 1);
}
INLINE vec v_load_some(const float *from, int64_t count) { return _mm512_maskz_loadu_ps(first_lanes(count), from); }
INLINE void v_store_some(float *to, vec x, int64_t count) { _mm512_mask_storeu_ps(to, first_lanes(count), x); }

#define HAS_PACK /* as selection.h has it for the others */
INLINE int64_t v_pack(float *to, vec x, mask which) {
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(which, x)); /* far quicker than compressing into memory */
  return __builtin_popcount(which);
}

/* 2 to the n, of whole numbers between -126 and 127. */
INLINE vec v_power(vec n) {
  __m512i bits = _mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127));
  return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 23));
}

/* bfloat16: what they are as float32, and back, rounded to the nearest, ties to even, NaN stays one. */
INLINE vec v_widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}
INLINE __m256i v_narrow(vec x) {
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd);
  rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}
INLINE vec v_load_bf16(const uint16_t *from) { return v_widen(_mm256_loadu_si256((const __m256i *)from)); }
INLINE vec v_load_bf16_some(const uint16_t *from, int64_t count) {
  return v_widen(_mm256_maskz_loadu_epi16(first_lanes(count), from));
}
INLINE void v_store_bf16(uint16_t *to, vec x) { _mm256_storeu_si256((__m256i *)to, v_narrow(x)); }
INLINE void v_store_bf16_some(uint16_t *to, vec x, int64_t count) {
  _mm256_mask_storeu_epi16(to, first_lanes(count), v_narrow(x));
}

/* Sixteen pairs of bfloat16: the first of each, and the second. */
INLINE void v_load_pairs(const uint16_t *from, vec *first, vec *second) {
  __m512i both = _mm512_loadu_si512(from);
  *first = _mm512_castsi512_ps(_mm512_slli_epi32(both, 16));
  *second = _mm512_castsi512_ps(_mm512_and_si512(both, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE void v_to_array(vec x, float lanes[16]) { _mm512_storeu_ps(lanes, x); }

INLINE void fetch_near(const void *from) { _mm_prefetch((const char *)from, _MM_HINT_T0); }
INLINE void fetch_far(const void *from) { _mm_prefetch((const char *)from, _MM_HINT_T1); }

#include "bytes_avx512.h"
#include "dots_avx512.h"

#endif
