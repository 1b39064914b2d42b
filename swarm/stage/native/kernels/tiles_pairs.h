/*
 * Tiles of bfloat16 rows, by instructions that multiply pairs. Every output is one chain over the pairs of inputs; its
 * bits are its own, not those of tiles.h. The header before this one has `pair_tile`, whose rows and vectors are
 * constants where it is called.
 */
#ifndef SWARM_TILES_PAIRS_H
#define SWARM_TILES_PAIRS_H

#include "tiles.h"

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
  for (Shares shares = shares_of(&piece, rows, ahead); next_tile(&shares, &piece);)
    PAIRS_TILES[shares.rows - 1][piece.vectors - 1](piece, x + shares.row * stride, stride, sums_from(sums, shares.row),
                                                 shares.fetch);
}

#define MULTIPLIES_PAIRS(kind) ((kind) == SWARM_BFLOAT16)
#define MULTIPLY_PAIRS multiply_pairs

#endif
