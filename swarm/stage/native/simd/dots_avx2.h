/*
 * Small whole numbers of AVX2; see dots_avx512.h for what the operations do. Codes beyond 127 are signed: less by 128.
 */
#ifndef SWARM_DOTS_H
#define SWARM_DOTS_H

typedef struct {
  __m256i a, b;
} ints;

/* How products are added: four quads, or two, at a time in 16 bits; one, with the code's sign moved to the row. */
enum { DOTS_BY_FOUR, DOTS_BY_TWO, DOTS_SIGNED, NUM_DOTS };

#define INT8_ROWS 3
#define INT8_VECTORS(dots) 1
#define SIGNED_CODES(largest) ((largest) > 127)

#define INT8_EACH_TILE(DEFINE) \
  INT8_EACH_ROWS(DEFINE, DOTS_BY_FOUR) INT8_EACH_ROWS(DEFINE, DOTS_BY_TWO) INT8_EACH_ROWS(DEFINE, DOTS_SIGNED)
#define INT8_EACH_ROWS(DEFINE, DOTS) DEFINE(DOTS, 1) DEFINE(DOTS, 2) DEFINE(DOTS, 3)
INLINE int quads_at_once(int dots) { return dots == DOTS_BY_FOUR ? 4 : dots == DOTS_BY_TWO ? 2 : 1; }
INLINE int dots_for(int largest) { return largest <= 31 ? DOTS_BY_FOUR : largest <= 63 ? DOTS_BY_TWO : DOTS_SIGNED; }

INLINE __m256i bits_32(__m256i x, int by, int mask) {
  __m256i moved = by > 0 ? _mm256_srli_epi16(x, by) : by < 0 ? _mm256_slli_epi16(x, -by) : x;
  return _mm256_and_si256(moved, _mm256_set1_epi8((char)mask));
}
INLINE byte_vec b_bits(byte_vec x, int by, int mask) {
  return (byte_vec){bits_32(x.a, by, mask), bits_32(x.b, by, mask)};
}
INLINE byte_vec b_or(byte_vec x, byte_vec y) {
  return (byte_vec){_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)};
}
INLINE byte_vec b_sixteen(const uint8_t table[16]) {
  __m256i both = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  return (byte_vec){both, both};
}
INLINE void b_store(uint8_t *to, byte_vec x) {
  _mm256_storeu_si256((__m256i *)to, x.a);
  _mm256_storeu_si256((__m256i *)to + 1, x.b);
}
INLINE byte_vec b_minus(byte_vec x, int y) {
  __m256i all = _mm256_set1_epi8((char)y);
  return (byte_vec){_mm256_sub_epi8(x.a, all), _mm256_sub_epi8(x.b, all)};
}
INLINE byte_vec b_lookup(byte_vec table, byte_vec at) {
  return (byte_vec){_mm256_shuffle_epi8(table.a, at.a), _mm256_shuffle_epi8(table.b, at.b)};
}

INLINE ints i_set(int32_t x) { return (ints){_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
INLINE vec v_from_ints(ints x) { return (vec){_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }

INLINE __m256i products_8(int dots, __m256i codes, __m256i quads) {
  if (dots != DOTS_SIGNED) return _mm256_maddubs_epi16(codes, quads);
  return _mm256_maddubs_epi16(_mm256_abs_epi8(codes), _mm256_sign_epi8(quads, codes));
}
INLINE __m256i widened_sum_8(__m256i sum, __m256i pairs) {
  return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
}
INLINE ints i_dots(int dots, ints sum, const byte_vec *codes, const ints *quads) {
  const int step = dots == DOTS_BY_FOUR ? 4 : dots == DOTS_BY_TWO ? 2 : 1;
  __m256i a = products_8(dots, codes[0].a, quads[0].a), b = products_8(dots, codes[0].b, quads[0].b);
  _Pragma("GCC unroll 4") for (int quad = 1; quad < step; quad++) {
    a = _mm256_add_epi16(a, products_8(dots, codes[quad].a, quads[quad].a));
    b = _mm256_add_epi16(b, products_8(dots, codes[quad].b, quads[quad].b));
  }
  return (ints){widened_sum_8(sum.a, a), widened_sum_8(sum.b, b)};
}

INLINE void v_store_quads(int8_t *to, vec x) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)); /* within halves */
  words = _mm256_permute4x64_epi64(words, 0xd8);
  __m128i all = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
  _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(all, order));
}

#endif
