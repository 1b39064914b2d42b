/* Sixty-four bytes in two registers (AVX2 with F16C); see bytes_avx512.h for what the operations do. */
#ifndef SWARM_SIMD_BYTES_H
#define SWARM_SIMD_BYTES_H

typedef struct {
  __m256i a, b;
} byte_vec;
typedef byte_vec pair_vec;

INLINE byte_vec b_load(const void *from) {
  return (byte_vec){_mm256_loadu_si256((const __m256i *)from), _mm256_loadu_si256((const __m256i *)from + 1)};
}
INLINE void p_store(uint16_t *to, pair_vec x) {
  _mm256_storeu_si256((__m256i *)to, x.a);
  _mm256_storeu_si256((__m256i *)to + 1, x.b);
}
#define TABLE_BITS 4
INLINE byte_vec b_table(const uint8_t table[64]) { return b_load(table); }

INLINE __m256i low_32(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi8(0x0f)); }
INLINE __m256i high_32(__m256i x) { return low_32(_mm256_srli_epi16(x, 4)); }
INLINE byte_vec b_low(byte_vec x) { return (byte_vec){low_32(x.a), low_32(x.b)}; }
INLINE byte_vec b_high(byte_vec x) { return (byte_vec){high_32(x.a), high_32(x.b)}; }

INLINE __m256i with_bits_32(__m256i codes, __m256i line, int at, int mask) {
  __m256i moved = at <= 4 ? _mm256_slli_epi16(line, 4 - at) : _mm256_srli_epi16(line, at - 4);
  return _mm256_or_si256(codes, _mm256_and_si256(moved, _mm256_set1_epi8((char)mask)));
}
INLINE byte_vec b_with_bits(byte_vec codes, byte_vec line, int at, int mask) {
  return (byte_vec){with_bits_32(codes.a, line.a, at, mask), with_bits_32(codes.b, line.b, at, mask)};
}

INLINE __m256i join_first(__m256i low, __m256i high) {
  return _mm256_or_si256(_mm256_and_si256(low, _mm256_set1_epi16(0x00ff)), _mm256_slli_epi16(high, 8));
}
INLINE __m256i join_second(__m256i low, __m256i high) {
  return _mm256_or_si256(_mm256_srli_epi16(low, 8), _mm256_andnot_si256(_mm256_set1_epi16(0x00ff), high));
}
INLINE void p_join(byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  *first = (pair_vec){join_first(low.a, high.a), join_first(low.b, high.b)};
  *second = (pair_vec){join_second(low.a, high.a), join_second(low.b, high.b)};
}

INLINE byte_vec look_up(byte_vec table, byte_vec at) {
  return (byte_vec){_mm256_shuffle_epi8(table.a, at.a), _mm256_shuffle_epi8(table.b, at.b)};
}

INLINE __m256i difference(__m256i codes, int k, __m256 offset) {
  __m256i number = _mm256_and_si256(_mm256_srli_epi32(codes, 8 * k), _mm256_set1_epi32(0xff));
  number = _mm256_or_si256(number, _mm256_set1_epi32(0x4b000000));
  return _mm256_castps_si256(_mm256_sub_ps(_mm256_castsi256_ps(number), offset));
}
INLINE __m256i differences(__m256i codes, int k, __m256 offset) { /* of bytes k and k + 2 */
  __m256i a = difference(codes, k, offset), b = difference(codes, k + 2, offset);
  return _mm256_blend_epi16(_mm256_srli_epi32(a, 16), b, 0xaa);
}
INLINE void p_from_differences(byte_vec codes, int64_t offset, pair_vec *first, pair_vec *second) {
  __m256 from = _mm256_set1_ps((float)((1 << 23) + offset));
  *first = (pair_vec){differences(codes.a, 0, from), differences(codes.b, 0, from)};
  *second = (pair_vec){differences(codes.a, 1, from), differences(codes.b, 1, from)};
}

INLINE void floats8_32(__m256i codes, __m256i low, __m256i high, __m256i *lower, __m256i *upper) {
  const __m256i sign = _mm256_set1_epi8((char)0x80);
  __m256i size = _mm256_andnot_si256(sign, codes), small = _mm256_cmpgt_epi8(_mm256_set1_epi8(8), size);
  __m256i up = _mm256_add_epi8(high_32(size), _mm256_set1_epi8(0x3c));
  __m256i down = _mm256_and_si256(_mm256_slli_epi16(size, 4), _mm256_set1_epi8((char)0xf0));
  up = _mm256_blendv_epi8(up, _mm256_shuffle_epi8(high, size), small);
  *lower = _mm256_blendv_epi8(down, _mm256_shuffle_epi8(low, size), small);
  *upper = _mm256_or_si256(up, _mm256_and_si256(codes, sign));
}
INLINE void p_from_floats8(byte_vec codes, byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  byte_vec lower, upper;
  floats8_32(codes.a, low.a, high.a, &lower.a, &upper.a);
  floats8_32(codes.b, low.b, high.b, &lower.b, &upper.b);
  p_join(lower, upper, first, second);
}

INLINE vec v_load_f16(const uint16_t *from) {
  const __m128i *at = (const __m128i *)from;
  return (vec){_mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1))};
}
INLINE vec v_load_i8(const int8_t *from) {
  __m128i all = _mm_loadu_si128((const __m128i *)from);
  return (vec){_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(all)),
               _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(all, 8)))};
}
INLINE vec v_load_u8(const uint8_t *from) {
  __m128i all = _mm_loadu_si128((const __m128i *)from);
  return (vec){_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(all)),
               _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(all, 8)))};
}

#endif
