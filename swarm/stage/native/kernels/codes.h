/*
 * Codes of weights become bfloat16, without their scales: exact, and in the layout of a plain matrix, [pair][64][2]. So
 * whatever multiplies plain matrices multiplies these. What is denormal would count as 0, but no value is.
 */
#ifndef SWARM_CODES_H
#define SWARM_CODES_H

#include "../halves.h"
#include "../kernels.h"

#define LINE 64 /* bytes */
#define PAIR_OF_BLOCK 128 /* numbers of a pair of inputs in a block of 64 outputs */

/* What codes are decoded with: the low and the high bytes of bfloat16 values, over and over; the first 32, whole. */
typedef struct {
  uint8_t low[64], high[64];
  uint16_t whole[32];
  int64_t offset;
} Values;

/* The tables that a kind of codes needs, in registers. */
typedef struct {
  byte_vec low, high;
  int64_t offset;
} Tables;

/* Of codes of up to six bits the values of all; of E4M3 of those whose exponent is 0, multiples of 2^-9. */
static uint16_t value_of_code(const SwarmFormat *format, int code) {
  static const uint16_t small[8] = {0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
  if (format->codes == SWARM_CODES4) return format->table[code % 16];
  if (format->codes == SWARM_FLOATS8) return small[code % 8];
  return swarm_narrow_bf16((float)(code % (format->codes == SWARM_CODES5 ? 32 : 64) - (int)format->offset));
}

static Values values_of(const SwarmFormat *format) {
  Values values = {.offset = format->offset};
  for (int code = 0; code < 64; code++) {
    uint16_t value = value_of_code(format, code);
    values.low[code] = (uint8_t)value, values.high[code] = (uint8_t)(value >> 8);
    if (code < 32) values.whole[code] = value;
  }
  return values;
}

/* Are codes of this kind looked up in a table of whole numbers? */
INLINE int has_number_table(int kind) {
#ifdef HAS_NUMBER_TABLE
  return kind == SWARM_CODES4;
#else
  (void)kind;
  return 0;
#endif
}

INLINE Tables tables_of(int kind, const Values *values) {
#ifdef HAS_NUMBER_TABLE
  if (has_number_table(kind)) {
    byte_vec whole = p_table(values->whole);
    return (Tables){whole, whole, values->offset};
  }
#endif
  (void)kind;
  return (Tables){b_table(values->low), b_table(values->high), values->offset};
}

INLINE int has_table(int kind) {
  return kind == SWARM_CODES4 || (TABLE_BITS == 6 && (kind == SWARM_CODES5 || kind == SWARM_CODES6));
}

/* Where four inputs of sixteen outputs go: two pairs. `vector`: which of the four sixteens. */
INLINE void store_quad(uint16_t *to, int vector, pair_vec first, pair_vec second) {
  p_store(to + vector * 32, first);
  p_store(to + PAIR_OF_BLOCK + vector * 32, second);
}

/* A byte's four bits: its low ones, and its high ones. What is above them does not matter. */
INLINE byte_vec low_code(int kind, byte_vec both) { return has_number_table(kind) ? both : b_low(both); }
INLINE byte_vec high_code(int kind, byte_vec both) {
#ifdef HAS_NUMBER_TABLE
  if (has_number_table(kind)) return p_moved(both, 4);
#endif
  (void)kind;
  return b_high(both);
}

INLINE void decode_pairs(int kind, const Tables *tables, byte_vec codes, pair_vec *first, pair_vec *second) {
#ifdef HAS_NUMBER_TABLE
  if (has_number_table(kind)) {
    *first = p_look_up(tables->low, codes);
    *second = p_look_up(tables->low, p_moved(codes, 8));
    return;
  }
#endif
  if (has_table(kind))
    p_join(look_up(tables->low, codes), look_up(tables->high, codes), first, second);
  else if (kind == SWARM_FLOATS8)
    p_from_floats8(codes, tables->low, tables->high, first, second);
  else
    p_from_differences(codes, tables->offset, first, second);
}

INLINE void decode_half(int kind, const Tables *tables, byte_vec codes, uint16_t *to, int vector) {
  pair_vec first, second;
  decode_pairs(kind, tables, codes, &first, &second);
  store_quad(to, vector, first, second);
}

/* Lines of eight inputs. */
INLINE int64_t lines_of_eight(int kind) {
  return kind == SWARM_CODES4 ? 4 : kind == SWARM_CODES5 ? 5 : kind == SWARM_CODES6 ? 6 : 8;
}

/* A byte's codes: the lines of a quad. */
INLINE void decode_whole_quad(int kind, const Tables *tables, const char *from, uint16_t *to) {
  _Pragma("GCC unroll 4") for (int vector = 0; vector < 4; vector++)
    decode_half(kind, tables, b_load(from + vector * LINE), to, vector);
}

/* Codes of four bits and more: `more` is the line with the bits above them. */
INLINE void decode_split_quad(int kind, const Tables *tables, const char *from, int quad, byte_vec more, uint16_t *to) {
  _Pragma("GCC unroll 2") for (int half = 0; half < 2; half++) {
    byte_vec both = b_load(from + half * LINE), lower = low_code(kind, both), upper = high_code(kind, both);
    int vector = 2 * half;
    if (kind == SWARM_CODES5) {
      lower = b_with_bits(lower, more, 4 * quad + vector, 0x10);
      upper = b_with_bits(upper, more, 4 * quad + vector + 1, 0x10);
    } else if (kind == SWARM_CODES6) {
      lower = b_with_bits(lower, more, 2 * vector, 0x30);
      upper = b_with_bits(upper, more, 2 * vector + 2, 0x30);
    }
    decode_half(kind, tables, lower, to, vector);
    decode_half(kind, tables, upper, to, vector + 1);
  }
}

/* Eight inputs, fetching as many bytes from `ahead` on as are read. `kind` is a constant where this is called. */
INLINE void decode_eight(int kind, const Tables *tables, const char *from, uint16_t *to, const char *ahead) {
  for (int64_t line = 0; line < lines_of_eight(kind); line++) fetch_far(ahead + line * LINE);
  if (kind == SWARM_CODES8 || kind == SWARM_FLOATS8) {
    decode_whole_quad(kind, tables, from, to);
    decode_whole_quad(kind, tables, from + 4 * LINE, to + 2 * PAIR_OF_BLOCK);
    return;
  }
  byte_vec more = kind == SWARM_CODES4 ? tables->low : b_load(from + 4 * LINE);
  decode_split_quad(kind, tables, from, 0, more, to);
  if (kind == SWARM_CODES6) more = b_load(from + 5 * LINE);
  decode_split_quad(kind, tables, from + 2 * LINE, 1, more, to + 2 * PAIR_OF_BLOCK);
}

INLINE void decode_kind(int kind, const Values *values, const char *from, int64_t inputs, uint16_t *to,
                        const char *ahead) {
  const Tables tables = tables_of(kind, values);
  const int64_t bytes = lines_of_eight(kind) * LINE;
  for (int64_t input = 0; input < inputs; input += 8, to += 4 * PAIR_OF_BLOCK, from += bytes, ahead += bytes)
    decode_eight(kind, &tables, from, to, ahead);
}

static void decode_codes(int kind, const Values *values, const char *from, int64_t inputs, uint16_t *to,
                         const char *ahead) {
  if (kind == SWARM_CODES4)
    decode_kind(SWARM_CODES4, values, from, inputs, to, ahead);
  else if (kind == SWARM_CODES5)
    decode_kind(SWARM_CODES5, values, from, inputs, to, ahead);
  else if (kind == SWARM_CODES6)
    decode_kind(SWARM_CODES6, values, from, inputs, to, ahead);
  else if (kind == SWARM_CODES8)
    decode_kind(SWARM_CODES8, values, from, inputs, to, ahead);
  else
    decode_kind(SWARM_FLOATS8, values, from, inputs, to, ahead);
}

#endif
