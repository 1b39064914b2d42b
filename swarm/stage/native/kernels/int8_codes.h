/* Codes of a quantized matrix as bytes, for products with int8 rows: in the order of CODES8, [quad][64][4]. */
#ifndef SWARM_INT8_CODES_H
#define SWARM_INT8_CODES_H

#include "codes.h"
#include "int8_rows.h"

INLINE void store_codes(int kind, const Int8Codes *codes, byte_vec code, byte_vec table, uint8_t *to) {
  if (kind == SWARM_CODES4 && codes->has_table) code = b_lookup(table, code);
  if (codes->subtracted) code = b_minus(code, codes->subtracted);
  b_store(to, code);
}

/* A quad of all 64 outputs. `more`: the line with the bits above the first four. */
INLINE void decode_bytes_of_quad(int kind, const Int8Codes *codes, const char *from, int quad, byte_vec more,
                                 byte_vec table, uint8_t *to) {
  _Pragma("GCC unroll 4") for (int vector = 0; vector < 4; vector++) {
    byte_vec code = b_load(from + (kind == SWARM_CODES8 ? vector : vector / 2) * LINE);
    if (kind != SWARM_CODES8) code = b_bits(code, vector % 2 * 4, 0x0f);
    if (kind == SWARM_CODES5) code = b_or(code, b_bits(more, 4 * quad + vector - 4, 0x10));
    if (kind == SWARM_CODES6) code = b_or(code, b_bits(more, 2 * vector - 4, 0x30));
    store_codes(kind, codes, code, table, to + vector * LINE);
  }
}

/* `inputs` of a group, fetching as many bytes from `ahead` on as are read. `kind` is a constant where this is called. */
INLINE void decode_bytes_of_kind(int kind, const Int8Codes *codes, const char *from, int64_t inputs, uint8_t *to,
                                 const char *ahead) {
  const byte_vec table = b_sixteen(codes->table);
  const int64_t lines = lines_of_eight(kind);
  const int quad = kind == SWARM_CODES8 ? 4 : 2; /* lines of a quad */
  for (int64_t input = 0; input < inputs; input += 8, to += 8 * LINE, from += lines * LINE, ahead += lines * LINE) {
    byte_vec more = table;
    for (int64_t line = 0; line < lines; line++) fetch_near(ahead + line * LINE);
    if (kind == SWARM_CODES5 || kind == SWARM_CODES6) more = b_load(from + 4 * LINE);
    decode_bytes_of_quad(kind, codes, from, 0, more, table, to);
    if (kind == SWARM_CODES6) more = b_load(from + 5 * LINE);
    decode_bytes_of_quad(kind, codes, from + quad * LINE, 1, more, table, to + 4 * LINE);
  }
}

static void decode_bytes(const Int8Codes *codes, const char *from, int64_t inputs, uint8_t *to, const char *ahead) {
  if (codes->kind == SWARM_CODES4)
    decode_bytes_of_kind(SWARM_CODES4, codes, from, inputs, to, ahead);
  else if (codes->kind == SWARM_CODES5)
    decode_bytes_of_kind(SWARM_CODES5, codes, from, inputs, to, ahead);
  else if (codes->kind == SWARM_CODES6)
    decode_bytes_of_kind(SWARM_CODES6, codes, from, inputs, to, ahead);
  else
    decode_bytes_of_kind(SWARM_CODES8, codes, from, inputs, to, ahead);
}

#endif
