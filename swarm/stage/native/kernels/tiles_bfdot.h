/*
 * A tile of bfloat16 rows by BFDOT (aarch64 with BF16), which adds a pair's two products to each of four sums. A vector
 * of sixteen is four of them, so few vectors go at a time: a segment of the matrix stays in the first-level cache.
 */
#ifndef SWARM_TILES_BFDOT_H
#define SWARM_TILES_BFDOT_H

#include "tiles.h"

enum { PARTS = 4 }; /* of a vector: registers of four sums */

/* Some vectors' sums in registers, over all pairs. `parts` is a constant where this is called, too. */
INLINE void pair_part(int rows, int parts, const uint16_t *weights, int64_t step, int64_t pairs, const uint16_t *x,
                      int64_t stride, Sums sums, Fetch fetch) {
  float32x4_t sum[MOST_ROWS][4 * PARTS];
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 16") for (int part = 0; part < parts; part++) {
      sum[row][part] = sums.first ? vdupq_n_f32(0.0f) : vld1q_f32(sums.at + row * sums.stride + part * 4);
    }
  }
  for (int64_t pair = 0; pair < pairs; pair++, weights += step / 2) {
    bfloat16x8_t some[4 * PARTS];
    fetch_on_the_way(&fetch, pair, (const char *)weights, step);
    _Pragma("GCC unroll 16") for (int part = 0; part < parts; part++) {
      some[part] = vreinterpretq_bf16_u16(vld1q_u16(weights + part * 8));
    }
    _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
      uint32_t both;
      __builtin_memcpy(&both, x + row * stride + 2 * pair, sizeof both);
      bfloat16x8_t pairs_of_row = vreinterpretq_bf16_u32(vdupq_n_u32(both));
      _Pragma("GCC unroll 16") for (int part = 0; part < parts; part++) {
        sum[row][part] = vbfdotq_f32(sum[row][part], some[part], pairs_of_row);
      }
    }
  }
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 16") for (int part = 0; part < parts; part++) {
      vst1q_f32(sums.at + row * sums.stride + part * 4, sum[row][part]);
    }
  }
}

INLINE void pair_tile(int rows, int vectors, const uint16_t *weights, int64_t step, int64_t pairs, const uint16_t *x,
                      int64_t stride, Sums sums, Fetch fetch) {
  int at_once = VECTORS_AT_ONCE(rows);
  for (int vector = 0; vector < vectors;) {
    Sums mine = {sums.at + vector * 16, sums.stride, sums.first};
    if (vectors - vector >= at_once) {
      pair_part(rows, at_once * PARTS, weights + vector * 32, step, pairs, x, stride, mine, fetch);
      vector += at_once;
    } else {
      pair_part(rows, PARTS, weights + vector * 32, step, pairs, x, stride, mine, fetch);
      vector++;
    }
    fetch.lines = NONE; /* once is enough */
  }
}

#include "tiles_pairs.h"

#endif
