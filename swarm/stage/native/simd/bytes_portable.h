/* Sixty-four bytes in plain C; see bytes_avx512.h for what the operations do. */
#ifndef SWARM_SIMD_BYTES_H
#define SWARM_SIMD_BYTES_H

#include "../halves.h"

typedef struct {
  uint8_t at[64];
} byte_vec;
typedef struct {
  uint16_t at[32];
} pair_vec;

#define B_EACH(expression)                                        \
  byte_vec result;                                                   \
  for (int i = 0; i < 64; i++) result.at[i] = (uint8_t)(expression); \
  return result

INLINE byte_vec b_load(const void *from) {
  byte_vec result;
  memcpy(result.at, from, sizeof result.at);
  return result;
}
INLINE void p_store(uint16_t *to, pair_vec x) { memcpy(to, x.at, sizeof x.at); }
#define TABLE_BITS 6
INLINE byte_vec b_table(const uint8_t table[64]) { return b_load(table); }
INLINE byte_vec b_low(byte_vec x) { B_EACH(x.at[i] & 0x0f); }
INLINE byte_vec b_high(byte_vec x) { B_EACH(x.at[i] >> 4); }
INLINE byte_vec b_with_bits(byte_vec codes, byte_vec line, int at, int mask) {
  B_EACH(codes.at[i] | ((line.at[i] << 4 >> at) & mask));
}

INLINE void p_join(byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  for (int i = 0; i < 32; i++) {
    first->at[i] = (uint16_t)(low.at[2 * i] | high.at[2 * i] << 8);
    second->at[i] = (uint16_t)(low.at[2 * i + 1] | high.at[2 * i + 1] << 8);
  }
}

INLINE byte_vec look_up(byte_vec table, byte_vec codes) { B_EACH(table.at[codes.at[i] & 63]); }

INLINE void p_from_differences(byte_vec codes, int64_t offset, pair_vec *first, pair_vec *second) {
  for (int i = 0; i < 32; i++) {
    first->at[i] = narrow_1((float)(codes.at[2 * i] - (int)offset));
    second->at[i] = narrow_1((float)(codes.at[2 * i + 1] - (int)offset));
  }
}

INLINE uint16_t float8_1(uint8_t code, byte_vec low, byte_vec high) {
  int size = code & 0x7f, sign = (code & 0x80) << 8;
  int number = size < 8 ? low.at[size] | high.at[size] << 8 : (size << 4) + 0x3c00;
  return (uint16_t)(sign | number);
}
INLINE void p_from_floats8(byte_vec codes, byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  for (int i = 0; i < 32; i++) {
    first->at[i] = float8_1(codes.at[2 * i], low, high);
    second->at[i] = float8_1(codes.at[2 * i + 1], low, high);
  }
}

INLINE vec v_load_f16(const uint16_t *from) {
  vec result;
  for (int i = 0; i < 16; i++) result.lane[i] = swarm_widen_f16(from[i]);
  return result;
}
INLINE vec v_load_i8(const int8_t *from) {
  vec result;
  for (int i = 0; i < 16; i++) result.lane[i] = (float)from[i];
  return result;
}
INLINE vec v_load_u8(const uint8_t *from) {
  vec result;
  for (int i = 0; i < 16; i++) result.lane[i] = (float)from[i];
  return result;
}

#undef B_EACH
#endif
