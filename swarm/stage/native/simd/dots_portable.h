/* Small whole numbers in plain C; see dots_avx512.h for what the operations do. */
#ifndef SWARM_DOTS_H
#define SWARM_DOTS_H

typedef struct {
  int32_t lane[16];
} ints;

enum { DOTS_ONE_BY_ONE, NUM_DOTS };

#define INT8_ROWS 1
#define INT8_VECTORS(dots) 1
#define SIGNED_CODES(largest) 0

#define INT8_EACH_TILE(DEFINE) DEFINE(DOTS_ONE_BY_ONE, 1)
INLINE int quads_at_once(int dots) { return dots == NUM_DOTS ? 0 : 1; }
INLINE int dots_for(int largest) { return largest < 0 ? NUM_DOTS : DOTS_ONE_BY_ONE; }

INLINE byte_vec b_bits(byte_vec x, int by, int mask) {
  for (int i = 0; i < 64; i++) x.at[i] = (uint8_t)((by > 0 ? x.at[i] >> by : x.at[i] << -by) & mask);
  return x;
}
INLINE byte_vec b_or(byte_vec x, byte_vec y) {
  for (int i = 0; i < 64; i++) x.at[i] |= y.at[i];
  return x;
}
INLINE byte_vec b_sixteen(const uint8_t table[16]) {
  byte_vec all;
  for (int i = 0; i < 64; i++) all.at[i] = table[i % 16];
  return all;
}
INLINE void b_store(uint8_t *to, byte_vec x) { memcpy(to, x.at, sizeof x.at); }
INLINE byte_vec b_minus(byte_vec x, int y) {
  for (int i = 0; i < 64; i++) x.at[i] = (uint8_t)(x.at[i] - y);
  return x;
}
INLINE byte_vec b_lookup(byte_vec table, byte_vec at) {
  for (int i = 0; i < 64; i++) at.at[i] = table.at[at.at[i]];
  return at;
}

INLINE ints i_set(int32_t x) {
  ints result;
  for (int i = 0; i < 16; i++) result.lane[i] = x;
  return result;
}
INLINE vec v_from_ints(ints x) {
  vec result;
  for (int i = 0; i < 16; i++) result.lane[i] = (float)x.lane[i];
  return result;
}
INLINE ints i_dots(int dots, ints sum, const byte_vec *codes, const ints *quads) {
  int8_t four[4];
  (void)dots;
  memcpy(four, quads->lane, sizeof four);
  for (int i = 0; i < 64; i++) sum.lane[i / 4] += codes->at[i] * four[i % 4];
  return sum;
}

INLINE void v_store_quads(int8_t *to, vec x) {
  for (int i = 0; i < 16; i += 4) {
    const int8_t quad[] = {(int8_t)x.lane[i], (int8_t)x.lane[i + 2], (int8_t)x.lane[i + 1], (int8_t)x.lane[i + 3]};
    memcpy(to + i, quad, sizeof quad);
  }
}

#endif
