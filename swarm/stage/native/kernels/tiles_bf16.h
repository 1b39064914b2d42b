/*
 * Tiles of bfloat16 rows, by the instruction that multiplies two pairs at once (VDPBF16PS, AVX-512 BF16). Every output
 * is one chain over the pairs of inputs; its bits are its own, not those of tiles.h.
 */
#ifndef SWARM_TILES_BF16_H
#define SWARM_TILES_BF16_H

#include "tiles.h"

INLINE void pair_tile(int rows, int vectors, const uint16_t *weights, int64_t step, int64_t pairs, const uint16_t *x,
                      int64_t stride, Sums sums, Fetch fetch) {
  vec sum[MOST_ROWS][4];
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      sum[row][v] = sums.first ? v_set(0.0f) : v_load(sums.at + row * sums.stride + v * 16);
    }
  }
  for (int64_t pair = 0; pair < pairs; pair++, weights += step / 2) {
    __m512bh some[4];
    fetch_on_the_way(&fetch, pair, (const char *)weights, step);
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      some[v] = (__m512bh)_mm512_loadu_si512(weights + v * 32);
    }
    _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
      int both;
      __builtin_memcpy(&both, x + row * stride + 2 * pair, sizeof both);
      __m512bh pairs_of_row = (__m512bh)_mm512_set1_epi32(both);
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
        sum[row][v] = _mm512_dpbf16_ps(sum[row][v], some[v], pairs_of_row);
      }
    }
  }
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) v_store(sums.at + row * sums.stride + v * 16, sum[row][v]);
  }
}

#define DEFINE_PAIR_TILE(ROWS, VECTORS)                                                                          \
  static void pair_tile_##ROWS##_##VECTORS(Piece piece, const uint16_t *x, int64_t stride, Sums sums, Fetch fetch) { \
    pair_tile(ROWS, VECTORS, (const uint16_t *)piece.weights, piece.step, piece.pairs, x, stride, sums, fetch);  \
  }
#define DEFINE_PAIR_TILES(ROWS) \
  DEFINE_PAIR_TILE(ROWS, 1) DEFINE_PAIR_TILE(ROWS, 2) DEFINE_PAIR_TILE(ROWS, 3) DEFINE_PAIR_TILE(ROWS, 4)
#define PAIR_TILES(ROWS) {pair_tile_##ROWS##_1, pair_tile_##ROWS##_2, pair_tile_##ROWS##_3, pair_tile_##ROWS##_4}

DEFINE_PAIR_TILES(1)
DEFINE_PAIR_TILES(2)
DEFINE_PAIR_TILES(3)
DEFINE_PAIR_TILES(4)
DEFINE_PAIR_TILES(5)
DEFINE_PAIR_TILES(6)

typedef void (*PairTile)(Piece, const uint16_t *, int64_t, Sums, Fetch);
static const PairTile PAIRS_TILES[][4] = {PAIR_TILES(1), PAIR_TILES(2), PAIR_TILES(3),
                                          PAIR_TILES(4), PAIR_TILES(5), PAIR_TILES(6)};

/* As multiply_wide of tiles.h. */
static void multiply_pairs(Piece piece, const uint16_t *x, int64_t stride, int64_t rows, Sums sums,
                           const char *ahead) {
  int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, step_lines = piece.step / 64;
  int lines = tiles == 1 || ahead == NULL ? 0 : (int)(tiles < step_lines ? (step_lines + tiles - 1) / tiles : 1);
  for (int64_t row = 0, at = 0; at < tiles; at++) {
    int64_t some = (rows - row) / (tiles - at);
    int fetched = at * lines < step_lines ? lines : NONE;
    PAIRS_TILES[some - 1][piece.vectors - 1](piece, x + row * stride, stride,
                                             (Sums){sums.at + row * sums.stride, sums.stride, sums.first},
                                             (Fetch){ahead, fetched});
    if (fetched > 0) ahead += fetched * piece.pairs * 64;
    row += some;
  }
}

/* As v_store_bf16, in one instruction; what is denormal becomes 0, as it does when it is multiplied. */
INLINE void store_pairs(uint16_t *to, vec x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

#define MULTIPLIES_PAIRS(kind) ((kind) == SWARM_BFLOAT16)
#define MULTIPLY_PAIRS multiply_pairs
#define STORE_PAIRS store_pairs

#endif
