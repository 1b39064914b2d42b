/*
 * Small whole numbers of AVX-512: 64 bytes, sixteen 32-bit sums, and the dot products between them.
 *
 * Codes are unsigned, rows are signed and between -127 and 127. VNNI multiplies them by one instruction; processors
 * without it multiply pairs into 16 bits, which hold the products of `step` quads if the codes are small enough.
 */
#ifndef SWARM_DOTS_H
#define SWARM_DOTS_H

typedef __m512i ints;

/* How products are added: by VNNI; four quads, or two, at a time in 16 bits; widened. */
enum { DOTS_AT_ONCE, DOTS_BY_FOUR, DOTS_BY_TWO, DOTS_WIDE, NUM_DOTS };

#ifdef __AVX512VNNI__
#define HAS_DOTS 1
#else
#define HAS_DOTS __builtin_cpu_supports("avx512vnni")
#endif

#define INT8_ROWS 6                                       /* rows of a tile */
#define INT8_VECTORS(dots) ((dots) == DOTS_AT_ONCE ? 4 : 1) /* vectors of sixteen outputs at a time */
#define SIGNED_CODES(largest) 0

#define INT8_EACH_TILE(DEFINE)                                                                       \
  INT8_EACH_ROWS(DEFINE, DOTS_AT_ONCE) INT8_EACH_ROWS(DEFINE, DOTS_BY_FOUR) INT8_EACH_ROWS(DEFINE, DOTS_BY_TWO) \
  INT8_EACH_ROWS(DEFINE, DOTS_WIDE)
#define INT8_EACH_ROWS(DEFINE, DOTS) \
  DEFINE(DOTS, 1) DEFINE(DOTS, 2) DEFINE(DOTS, 3) DEFINE(DOTS, 4) DEFINE(DOTS, 5) DEFINE(DOTS, 6)
INLINE int quads_at_once(int dots) { return dots == DOTS_BY_FOUR ? 4 : dots == DOTS_BY_TWO ? 2 : 1; }
INLINE int dots_for(int largest) {
  return HAS_DOTS ? DOTS_AT_ONCE : largest <= 31 ? DOTS_BY_FOUR : largest <= 63 ? DOTS_BY_TWO : DOTS_WIDE;
}

/* Bits of every byte, moved to the right, or left where `by` is negative; `mask` leaves out the neighbour's. */
INLINE byte_vec b_bits(byte_vec x, int by, int mask) {
  __m512i moved = by > 0 ? _mm512_srli_epi16(x, (unsigned)by) : by < 0 ? _mm512_slli_epi16(x, (unsigned)-by) : x;
  return _mm512_and_si512(moved, _mm512_set1_epi8((char)mask));
}
INLINE byte_vec b_or(byte_vec x, byte_vec y) { return _mm512_or_si512(x, y); }
INLINE byte_vec b_sixteen(const uint8_t table[16]) {
  return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
}
INLINE void b_store(uint8_t *to, byte_vec x) { _mm512_storeu_si512(to, x); }
INLINE byte_vec b_minus(byte_vec x, int y) { return _mm512_sub_epi8(x, _mm512_set1_epi8((char)y)); }
INLINE byte_vec b_lookup(byte_vec table, byte_vec at) { return _mm512_shuffle_epi8(table, at); }

INLINE ints i_set(int32_t x) { return _mm512_set1_epi32(x); }
INLINE vec v_from_ints(ints x) { return _mm512_cvtepi32_ps(x); }

/* sum + codes · quads, of so many quads as `dots` takes at a time. */
INLINE ints i_dots(int dots, ints sum, const byte_vec *codes, const ints *quads) {
  if (dots == DOTS_AT_ONCE) {
    /* As text: GCC keeps the sums of its own function in memory, and a variant may not know whether there is VNNI. */
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(codes[0]), "v"(quads[0]));
    return sum;
  }
  if (dots == DOTS_WIDE) {
    __m512i even = _mm512_srai_epi16(_mm512_slli_epi16(quads[0], 8), 8), odd = _mm512_srai_epi16(quads[0], 8);
    sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_and_si512(codes[0], _mm512_set1_epi16(255)), even));
    return _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_srli_epi16(codes[0], 8), odd));
  }
  __m512i pairs = _mm512_add_epi16(_mm512_maddubs_epi16(codes[0], quads[0]), _mm512_maddubs_epi16(codes[1], quads[1]));
  if (dots == DOTS_BY_FOUR) {
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes[2], quads[2]));
    pairs = _mm512_add_epi16(pairs, _mm512_maddubs_epi16(codes[3], quads[3]));
  }
  return _mm512_add_epi32(sum, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}

/* Sixteen whole numbers as int8, each quad in the order of the packed codes. */
INLINE void v_store_quads(int8_t *to, vec x) {
  const __m128i order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
  _mm_storeu_si128((__m128i *)to, _mm_shuffle_epi8(_mm512_cvtepi32_epi8(_mm512_cvtps_epi32(x)), order));
}

#endif
