/*
 * Tiles of int8 rows times decoded groups: whole sums of a group, then one fused multiply-add for each output with the
 * row's scale times the weights', and one more with the minimum.
 */
#ifndef SWARM_INT8_TILES_H
#define SWARM_INT8_TILES_H

#include "int8_codes.h"
#include "scales.h"
#include "tiles.h"

/* Decoded groups side by side. */
typedef struct {
  const uint8_t *codes; /* [group][quad][64][4] */
  int64_t step;         /* bytes from group to group */
  const Factors *factors;
  int64_t first, groups; /* number of the first one; how many there are */
} Int8Piece;

/* Where the rows of a tile have what belongs to one group. Copies: a store of sums could change what lies in memory. */
typedef struct {
  const int8_t *values;
  const float *scales, *sums;
  const int32_t *wholes;
  int64_t stride, groups, quads;
  int has_minima;
} Int8Group;

INLINE Int8Group group_of_rows(const Int8Rows *x, int64_t row, int64_t group) {
  int64_t at = row * x->groups + group;
  return (Int8Group){x->values + row * x->stride + group * x->group, x->scales + at, x->sums + at, x->wholes + at,
                     x->stride, x->groups, x->group / 4, x->has_minima != 0};
}

/* Add a group's dot products to the sums of all rows. */
INLINE void add_group(int rows, int vectors, Int8Group x, ints dots[][4], const float *scales, const float *minima,
                      float *sums) {
  _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
    vec scale = v_load(scales + v * 16);
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
      float *to = sums + r * WIDTH + v * 16;
      vec sum = v_fma(v_from_ints(dots[r][v]), v_mul(v_set(x.scales[r * x.groups]), scale), v_load(to));
      if (minima != NULL) sum = v_fnma(v_load(minima + v * 16), v_set(x.sums[r * x.groups]), sum);
      v_store(to, sum);
    }
  }
}

/* `vectors` of the outputs and all rows, over one group. */
INLINE void int8_group(int dots, int rows, int vectors, Int8Group x, const uint8_t *codes, const float *scales,
                       const float *minima, float *sums) {
  const int step = quads_at_once(dots);
  ints sum[INT8_ROWS][4];
  _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[r][v] = i_set(-x.wholes[r * x.groups]);
  }
  for (int64_t quad = 0; quad < x.quads; quad += step) {
    byte_vec code[4][4];
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      _Pragma("GCC unroll 4") for (int q = 0; q < step; q++) code[v][q] = b_load(codes + (quad + q) * 4 * LINE + v * LINE);
    }
    _Pragma("GCC unroll 6") for (int r = 0; r < rows; r++) {
      ints quads[4];
      _Pragma("GCC unroll 4") for (int q = 0; q < step; q++) {
        int32_t four;
        __builtin_memcpy(&four, x.values + r * x.stride + (quad + q) * 4, sizeof four);
        quads[q] = i_set(four);
      }
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) sum[r][v] = i_dots(dots, sum[r][v], code[v], quads);
    }
  }
  if (x.has_minima)
    add_group(rows, vectors, x, sum, scales, minima, sums);
  else
    add_group(rows, vectors, x, sum, scales, NULL, sums);
}

INLINE void int8_tile(int dots, int rows, const Int8Piece *pointer, const Int8Rows *x, int64_t row, float *sums) {
  const int vectors = INT8_VECTORS(dots);
  const Int8Piece piece = *pointer;
  for (int64_t group = 0; group < piece.groups; group++) {
    const uint8_t *codes = piece.codes + group * piece.step;
    const float *scales = piece.factors[group].scales, *minima = piece.factors[group].minima;
    Int8Group mine = group_of_rows(x, row, piece.first + group);
    for (int v = 0; v < 4; v += vectors)
      int8_group(dots, rows, vectors, mine, codes + v * LINE, scales + v * 16, minima + v * 16, sums + v * 16);
  }
}

typedef void (*Int8Tile)(const Int8Piece *, const Int8Rows *, int64_t, float *);

/* One function for each way of adding products and number of rows. */
#define DEFINE_INT8_TILE(DOTS, ROWS)                                                                            \
  static void DOTS##_tile_##ROWS(const Int8Piece *piece, const Int8Rows *x, int64_t row, float *sums) {         \
    int8_tile(DOTS, ROWS, piece, x, row, sums);                                                                 \
  }
INT8_EACH_TILE(DEFINE_INT8_TILE)

#define NAME_OF_INT8_TILE(DOTS, ROWS) [DOTS][ROWS] = DOTS##_tile_##ROWS,
static const Int8Tile INT8_TILES[NUM_DOTS][INT8_ROWS + 1] = {INT8_EACH_TILE(NAME_OF_INT8_TILE)};

/* All rows from `row` on, by as few tiles as can be, evenly. */
static void int8_tiles(const Int8Piece *piece, const Int8Rows *x, int64_t row, int64_t rows, float *sums) {
  const Int8Tile *tiles = INT8_TILES[dots_for(x->codes.largest)];
  for (int64_t left = rows, num_tiles = (rows + INT8_ROWS - 1) / INT8_ROWS; num_tiles > 0; num_tiles--) {
    int64_t count = left / num_tiles;
    tiles[count](piece, x, row, sums);
    row += count, sums += count * WIDTH, left -= count;
  }
}

#endif
