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
#define COPIED 128   /* pairs that are copied side by side for many rows: 16 KiB */
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

/*
 * Many rows, where the registers have no room for more than sixteen outputs of six rows: the weights of sixteen outputs
 * are copied side by side, widened, and stay in the nearest cache while all rows pass. The chains are those of `tile`.
 */
enum { IS_NARROW = VECTORS_AT_ONCE(MOST_ROWS) == 1 };

INLINE void narrow_tile(int rows, const float *weights, int64_t inputs, const float *x, int64_t stride, Sums sums) {
  const float *from[MOST_ROWS] = {NULL};
  vec sum[MOST_ROWS];
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    from[row] = x + row * stride;
    sum[row] = sums.first ? v_set(0.0f) : v_load(sums.at + row * sums.stride);
  }
  for (int64_t input = 0; input < inputs; input++) {
    vec weight = v_load(weights + input * 16);
    _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
      sum[row] = v_fma(weight, v_set(from[row][input]), sum[row]);
    }
  }
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) v_store(sums.at + row * sums.stride, sum[row]);
}

#define DEFINE_NARROW_TILE(ROWS)                                                                                     \
  static void narrow_tile_##ROWS(const float *weights, int64_t inputs, const float *x, int64_t stride, Sums sums) { \
    narrow_tile(ROWS, weights, inputs, x, stride, sums);                                                             \
  }
DEFINE_NARROW_TILE(1)
DEFINE_NARROW_TILE(2)
DEFINE_NARROW_TILE(3)
DEFINE_NARROW_TILE(4)
DEFINE_NARROW_TILE(5)
DEFINE_NARROW_TILE(6)

typedef void (*NarrowTile)(const float *, int64_t, const float *, int64_t, Sums);
static const NarrowTile NARROW_TILES[] = {NULL,          narrow_tile_1, narrow_tile_2, narrow_tile_3,
                                          narrow_tile_4, narrow_tile_5, narrow_tile_6};

/* Copy one vector of a piece, widened: [input][16]. */
static void copy_vector(int kind, const char *weights, int64_t step, int64_t pairs, int vector, float *to) {
  for (int64_t pair = 0; pair < pairs; pair++, weights += step, to += 32) {
    vec even, odd;
    load_pair(kind, weights, step, vector, &even, &odd);
    v_store(to, even);
    v_store(to + 16, odd);
  }
}

/* All tiles together fetch what is copied next. */
static void multiply_narrow(int kind, Piece piece, const float *x, int64_t stride, int64_t rows, Sums sums,
                            const char *ahead) {
  float weights[COPIED * 32] __attribute__((aligned(64)));
  int64_t tiles = (rows + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t pair = 0, pairs; pair < piece.pairs; pair += pairs) {
    const char *from = piece.weights + pair * piece.step;
    pairs = piece.pairs - pair < COPIED ? piece.pairs - pair : COPIED;
    const char *next = pair + pairs < piece.pairs ? from + pairs * piece.step : ahead;
    int64_t lines = piece.cached || next == NULL ? 0 : pairs * piece.step / 64 / (tiles * piece.vectors) + 1;
    for (int vector = 0; vector < piece.vectors; vector++) {
      copy_vector(kind, from, piece.step, pairs, vector, weights);
      for (int64_t tile = 0, row = 0, count; tile < tiles; tile++, row += count) {
        count = (rows - row) / (tiles - tile);
        for (int64_t line = 0; line < lines; line++, next += 64) fetch_far(next);
        NARROW_TILES[count](weights, 2 * pairs, x + row * stride + 2 * pair, stride,
                            (Sums){sums.at + row * sums.stride + vector * 16, sums.stride, sums.first && pair == 0});
      }
    }
  }
}

/* All rows times a piece of the matrix. */
static void multiply_wide(int kind, Piece piece, const float *x, int64_t stride, int64_t rows, Sums sums,
                          const char *ahead) {
  if (IS_NARROW && rows > 2 * MOST_ROWS) {
    multiply_narrow(kind, piece, x, stride, rows, sums, ahead);
    return;
  }
  const WideTile *tiles = kind == SWARM_BFLOAT16 ? SWARM_BFLOAT16_TILES : SWARM_FLOAT32_TILES;
  for (Shares shares = shares_of(&piece, rows, ahead); next_tile(&shares, &piece);)
    tiles[shares.rows](piece, x + shares.row * stride, stride, sums_from(sums, shares.row), shares.fetch);
}

#endif
