/* Sixty-four bytes in one register: codes of weights, and the pairs of bfloat16 that they become (AVX-512). */
#ifndef SWARM_SIMD_BYTES_H
#define SWARM_SIMD_BYTES_H

typedef __m512i byte_vec;
typedef __m512i pair_vec; /* sixteen outputs' pairs of bfloat16 */

INLINE byte_vec b_load(const void *from) { return _mm512_loadu_si512(from); }
INLINE void p_store(uint16_t *to, pair_vec x) { _mm512_storeu_si512(to, x); }

/* A table of bytes, and how many bits of a code are its index. Bits above these don't matter, but the highest. */
INLINE byte_vec b_table(const uint8_t table[64]) { return _mm512_loadu_si512(table); }
INLINE byte_vec b_moved(byte_vec line, int at) { /* bit `at` becomes bit 4 */
  return at <= 4 ? _mm512_slli_epi16(line, (unsigned)(4 - at)) : _mm512_srli_epi16(line, (unsigned)(at - 4));
}
#ifdef __AVX512VBMI__
#define TABLE_BITS 6
INLINE byte_vec look_up(byte_vec table, byte_vec at) { return _mm512_permutexvar_epi8(at, table); }

/* The low and the high four bits of every byte, as indices: what is above them is arbitrary. */
INLINE byte_vec b_low(byte_vec x) { return x; }
INLINE byte_vec b_high(byte_vec x) { return _mm512_srli_epi16(x, 4); }

/* Codes with bits number `at` and on of each byte of `line` put in from bit 4 on, where `mask` is. */
INLINE byte_vec b_with_bits(byte_vec codes, byte_vec line, int at, int mask) {
  (void)mask;
  return _mm512_ternarylogic_epi32(_mm512_set1_epi8(0x0f), codes, b_moved(line, at), 0xca); /* which ? codes : moved */
}
#else
#define TABLE_BITS 4 /* sixteen entries, four times over */
INLINE byte_vec look_up(byte_vec table, byte_vec at) { return _mm512_shuffle_epi8(table, at); }
INLINE byte_vec b_low(byte_vec x) { return _mm512_and_si512(x, _mm512_set1_epi8(0x0f)); }
INLINE byte_vec b_high(byte_vec x) { return _mm512_and_si512(_mm512_srli_epi16(x, 4), _mm512_set1_epi8(0x0f)); }
INLINE byte_vec b_with_bits(byte_vec codes, byte_vec line, int at, int mask) {
  return _mm512_ternarylogic_epi32(codes, b_moved(line, at), _mm512_set1_epi8((char)mask), 0xf8); /* codes | moved & mask */
}
#endif


/* Low and high bytes of bfloat16: those of the even bytes are the first pairs, those of the odd ones the second. */
INLINE void p_join(byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  const __m512i lower = _mm512_set1_epi16(0x00ff);
  *first = _mm512_ternarylogic_epi32(lower, low, _mm512_slli_epi16(high, 8), 0xca); /* lower ? low : high */
  *second = _mm512_ternarylogic_epi32(lower, _mm512_srli_epi16(low, 8), high, 0xca);
}

/* Numbers of sixteen bits, and which of them each lane of sixteen bits names by its lowest five bits. */
#define HAS_NUMBER_TABLE
INLINE byte_vec p_table(const uint16_t table[32]) { return _mm512_loadu_si512(table); }
INLINE pair_vec p_look_up(byte_vec table, byte_vec at) { return _mm512_permutexvar_epi16(at, table); }
INLINE byte_vec p_moved(byte_vec codes, unsigned bits) { return _mm512_srli_epi16(codes, bits); }

/* A byte of each lane, where `mask` is, minus the offset: it becomes the last bits of a large number, `large`. */
INLINE __m512i difference(byte_vec codes, int mask, int large, __m512 offset) {
  __m512i number = _mm512_ternarylogic_epi32(codes, _mm512_set1_epi32(mask), _mm512_set1_epi32(large), 0xea);
  return _mm512_castps_si512(_mm512_sub_ps(_mm512_castsi512_ps(number), offset)); /* codes & mask | large */
}

/* The upper halves of two vectors' lanes side by side. */
INLINE pair_vec upper_halves(__m512i even, __m512i odd) {
  const __m512i upper = _mm512_set4_epi32(0x0f0e0f0e, 0x0b0a0b0a, 0x07060706, 0x03020302);
  return _mm512_mask_shuffle_epi8(odd, 0x3333333333333333, even, upper);
}

INLINE void p_from_differences(byte_vec codes, int64_t offset, pair_vec *first, pair_vec *second) {
  enum { LARGE = 0x4b000000, LESS_LARGE = 0x47000000 }; /* 2^23 and 2^15: bits 0 and 8 are 1 */
  const __m512 from = _mm512_set1_ps((float)((1 << 23) + offset)), less = _mm512_set1_ps((float)((1 << 15) + offset));
  __m512i moved = _mm512_srli_epi32(codes, 16);
  *first = upper_halves(difference(codes, 0xff, LARGE, from), difference(moved, 0xff, LARGE, from));
  *second = upper_halves(difference(codes, 0xff00, LESS_LARGE, less), difference(moved, 0xff00, LESS_LARGE, less));
}

/* E4M3. `low` and `high` hold the eight numbers whose exponent is 0. */
INLINE void p_from_floats8(byte_vec codes, byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  const __m512i sign = _mm512_set1_epi8((char)0x80);
  __m512i size = _mm512_andnot_si512(sign, codes);
  __mmask64 small = _mm512_cmplt_epi8_mask(size, _mm512_set1_epi8(8));
  __m512i upper = _mm512_and_si512(_mm512_srli_epi16(size, 4), _mm512_set1_epi8(0x07));
  upper = _mm512_add_epi8(upper, _mm512_set1_epi8(0x3c));
  __m512i lower = _mm512_and_si512(_mm512_slli_epi16(size, 4), _mm512_set1_epi8((char)0xf0));
  upper = _mm512_mask_shuffle_epi8(upper, small, high, size);
  lower = _mm512_mask_shuffle_epi8(lower, small, low, size);
  p_join(lower, _mm512_ternarylogic_epi32(upper, codes, sign, 0xf8), first, second);
}

INLINE vec v_load_f16(const uint16_t *from) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from)); }
INLINE vec v_load_i8(const int8_t *from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}
INLINE vec v_load_u8(const uint8_t *from) {
  return _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

#endif
