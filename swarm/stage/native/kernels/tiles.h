/*
 * Rows times a piece of a packed matrix: what products and attention are made of.
 *
 * Sixteen outputs are the lanes of a vector; every output is one chain of fused multiply-adds over the inputs in their
 * order, whatever the number of rows, of vectors at a time, and the cut into pieces. So a row's bits depend on nothing
 * but the row, and they are the same on every processor.
 *
 * Inputs come in pairs, the weights of a pair `step` bytes after those of the one before. bfloat16: the two weights of
 * an output side by side, sixteen outputs in 64 bytes. float32: the first inputs' weights, and half a step later the
 * second ones'. Rows are float32 here; tiles_bf16.h has what multiplies bfloat16 by instructions of its own.
 */
#ifndef SWARM_TILES_H
#define SWARM_TILES_H

#include <stddef.h>

#include "../kernels.h"

#define WIDTH 64     /* outputs of a block of a matrix */
#define MOST_ROWS 6  /* rows of a tile: with four vectors each, the sums fill 24 registers of 32 */
#define CHUNK 64     /* pairs after which a tile that takes some of the vectors at a time turns to the next ones */
#define NEAR 1024    /* bytes ahead that a single tile fetches */
#define NONE -1

/* What a tile shall fetch on its way: `lines` cache lines a pair from `ahead` on, into the second-level cache. With 0
 * lines, what it reads itself a little later, as fast as memory gives it; with NONE, nothing. */
typedef struct {
  const char *ahead;
  int lines;
} Fetch;

/* A piece of a packed matrix. */
typedef struct {
  const char *weights;
  int64_t step;  /* bytes from pair to pair */
  int64_t pairs; /* of inputs */
  int vectors;   /* of sixteen outputs, four at most */
  int cached;    /* the weights are in the cache: nothing is fetched */
} Piece;

/* Where sums are: [row][outputs], `stride` apart. `first`: they begin at 0. */
typedef struct {
  float *at;
  int64_t stride;
  int first;
} Sums;

INLINE void load_pair(int kind, const char *weights, int64_t step, int vector, vec *even, vec *odd) {
  if (kind == SWARM_BFLOAT16) {
    v_load_pairs((const uint16_t *)weights + vector * 32, even, odd);
  } else {
    *even = v_load((const float *)weights + vector * 16);
    *odd = v_load((const float *)(weights + step / 2) + vector * 16);
  }
}

INLINE void fetch_on_the_way(const Fetch *fetch, int64_t pair, const char *weights, int64_t step) {
  if (fetch->lines == 0)
    for (int64_t at = 0; at < step; at += 64) fetch_near(weights + NEAR + at);
  for (int line = 0; line < fetch->lines; line++) fetch_far(fetch->ahead + (pair * fetch->lines + line) * 64);
}

/* `rows` and `vectors` are constants where this is called, so that the sums stay in registers. */
INLINE void tile(int kind, int rows, int vectors, const char *weights, int64_t step, int64_t pairs, const float *x,
                 int64_t stride, Sums sums, Fetch fetch) {
  vec sum[MOST_ROWS][4];
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      sum[row][v] = sums.first ? v_set(0.0f) : v_load(sums.at + row * sums.stride + v * 16);
    }
  }
  for (int64_t pair = 0; pair < pairs; pair++, weights += step) {
    vec even[4], odd[4];
    fetch_on_the_way(&fetch, pair, weights, step);
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) load_pair(kind, weights, step, v, &even[v], &odd[v]);
    _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
      vec first = v_set(x[row * stride + 2 * pair]), second = v_set(x[row * stride + 2 * pair + 1]);
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[row][v] = v_fma(even[v], first, sum[row][v]);
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[row][v] = v_fma(odd[v], second, sum[row][v]);
    }
  }
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) v_store(sums.at + row * sums.stride + v * 16, sum[row][v]);
  }
}

/*
 * What a pass over a chunk fetches. Where a chunk is passed over several times, for some of its vectors each, every
 * pass fetches its share of the next chunk: memory shall not rest while the later ones read from the cache.
 */
INLINE Fetch fetch_of_pass(const Piece *piece, Fetch fetch, int64_t pair, int vector, int at_once) {
  if (fetch.lines != 0 || at_once >= piece->vectors || piece->cached)
    return (Fetch){fetch.ahead + pair * fetch.lines * 64, vector == 0 ? fetch.lines : NONE};
  int lines = (int)(piece->step / 64) * at_once / piece->vectors;
  return (Fetch){piece->weights + (pair + CHUNK) * piece->step + (int64_t)vector / at_once * lines * CHUNK * 64, lines};
}

/* One function for each number of rows, for as many vectors as go at a time, and for one. */
#define DEFINE_TILE(KIND, ROWS)                                                                                     \
  static void KIND##_tile_##ROWS(Piece piece, const float *x, int64_t stride, Sums sums, Fetch fetch) {             \
    enum { AT_ONCE = VECTORS_AT_ONCE(ROWS), LENGTH = AT_ONCE == 4 ? 1 << 30 : CHUNK };                              \
    for (int64_t pair = 0; pair < piece.pairs; pair += LENGTH) {                                                    \
      int64_t pairs = piece.pairs - pair < LENGTH ? piece.pairs - pair : LENGTH;                                    \
      const char *weights = piece.weights + pair * piece.step;                                                      \
      int vector = 0;                                                                                               \
      for (; vector + AT_ONCE <= piece.vectors; vector += AT_ONCE)                                                  \
        tile(KIND, ROWS, AT_ONCE, weights + vector * 64, piece.step, pairs, x + 2 * pair, stride,                   \
             (Sums){sums.at + vector * 16, sums.stride, sums.first && pair == 0},                                   \
             fetch_of_pass(&piece, fetch, pair, vector, AT_ONCE));                                                  \
      for (; vector < piece.vectors; vector++)                                                                      \
        tile(KIND, ROWS, 1, weights + vector * 64, piece.step, pairs, x + 2 * pair, stride,                         \
             (Sums){sums.at + vector * 16, sums.stride, sums.first && pair == 0}, (Fetch){NULL, NONE});             \
    }                                                                                                               \
  }

#define DEFINE_TILES(KIND)                                                                                      \
  DEFINE_TILE(KIND, 1)                                                                                          \
  DEFINE_TILE(KIND, 2)                                                                                          \
  DEFINE_TILE(KIND, 3)                                                                                          \
  DEFINE_TILE(KIND, 4)                                                                                          \
  DEFINE_TILE(KIND, 5)                                                                                          \
  DEFINE_TILE(KIND, 6)                                                                                          \
  static const WideTile KIND##_TILES[] = {NULL,           KIND##_tile_1, KIND##_tile_2, KIND##_tile_3,          \
                                          KIND##_tile_4, KIND##_tile_5, KIND##_tile_6};

typedef void (*WideTile)(Piece, const float *, int64_t, Sums, Fetch);
DEFINE_TILES(SWARM_FLOAT32)
DEFINE_TILES(SWARM_BFLOAT16)

/*
 * How the rows of a piece are shared: evenly, by as few tiles as can be. `ahead`: what this thread multiplies next, to be
 * fetched on the way, a part by each tile, or NULL.
 */
typedef struct {
  int64_t row, rows; /* the first one of the tile at hand, and how many it has */
  Fetch fetch;       /* what it fetches */
  int64_t left, tiles_left;
  int64_t lines_left; /* of a pair of `ahead`, that no tile has fetched */
  int lines;
  const char *ahead;
} Shares;

INLINE Shares shares_of(const Piece *piece, int64_t rows, const char *ahead) {
  int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS, lines = piece->step / 64;
  int each = tiles == 1 || ahead == NULL ? 0 : (int)(tiles < lines ? (lines + tiles - 1) / tiles : 1);
  if (piece->cached) each = NONE, lines = 0;
  return (Shares){.left = rows, .tiles_left = tiles, .lines_left = lines, .lines = each, .ahead = ahead};
}

/* Turn to the next tile; 0 if there is none. */
INLINE int next_tile(Shares *shares, const Piece *piece) {
  if (shares->tiles_left == 0) return 0;
  shares->row += shares->rows;
  shares->rows = shares->left / shares->tiles_left;
  shares->left -= shares->rows, shares->tiles_left--;
  shares->fetch = (Fetch){shares->ahead, shares->lines_left > 0 ? shares->lines : NONE};
  shares->lines_left -= shares->lines;
  if (shares->fetch.lines > 0) shares->ahead += shares->lines * piece->pairs * 64;
  return 1;
}

INLINE Sums sums_from(Sums sums, int64_t row) {
  sums.at += row * sums.stride;
  return sums;
}

/* All rows times a piece of the matrix. */
static void multiply_wide(int kind, Piece piece, const float *x, int64_t stride, int64_t rows, Sums sums,
                          const char *ahead) {
  const WideTile *tiles = kind == SWARM_BFLOAT16 ? SWARM_BFLOAT16_TILES : SWARM_FLOAT32_TILES;
  for (Shares shares = shares_of(&piece, rows, ahead); next_tile(&shares, &piece);)
    tiles[shares.rows](piece, x + shares.row * stride, stride, sums_from(sums, shares.row), shares.fetch);
}

#endif
