/*
 * int8 rows times decoded groups by the instructions that multiply matrices of bytes (TDPBSSD, TDPBSUD, AMX): up to 16
 * rows × 16 quads of inputs times 16 quads × 16 outputs. A group's whole sums go to memory, where they are scaled and
 * added in the order of the groups; so the bits are those of int8_tiles.h.
 *
 * Codes are decoded as signed numbers, so that no offset remains.
 */
#ifndef SWARM_INT8_AMX_H
#define SWARM_INT8_AMX_H

#include "int8_tiles.h"
#include "tiles_amx.h"

#define INT8_TILED_ROWS 9 /* fewer are multiplied by int8_tiles.h */
#define GROUPS_AT_ONCE 4  /* whose sums stay in the first-level cache */

#define TILE_MULTIPLY_SIGNED(sums, rows, weights) \
  __asm__ volatile("tdpbssd %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums ::)
#define TILE_MULTIPLY_UNSIGNED(sums, rows, weights) \
  __asm__ volatile("tdpbsud %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums ::)
#define TILE_MULTIPLY_BYTES(sums, rows, weights)      \
  do {                                                \
    if (is_signed)                                    \
      TILE_MULTIPLY_SIGNED(sums, rows, weights);      \
    else                                              \
      TILE_MULTIPLY_UNSIGNED(sums, rows, weights);    \
  } while (0)

/* Whole sums of some groups: [group][row][output]. */
typedef struct {
  int32_t at[GROUPS_AT_ONCE][TWO_TILES * 32];
} Int8Sums;

/* The codes without an offset: signed, or unsigned if there is none. `largest` is -1 if they fit neither. */
static Int8Codes codes_for_tiles(const Int8Codes *codes) {
  Int8Codes mine = *codes;
  if (codes->offset == 0) return mine;
  mine.subtracted = codes->offset;
  mine.offset = 0;
  if (codes->offset > 128 || codes->largest - codes->offset > 127 || codes->offset < -127) mine.largest = -1;
  return mine;
}

/* Two tiles of rows times two vectors of a group: 32 outputs for each row. */
INLINE void multiply_wide_group(int is_signed, const int8_t *x, int64_t stride, int64_t size, const uint8_t *codes,
                                int32_t *sums) {
  const int8_t *x_low = x + TILE_PAIRS * stride;
  TILE_ZERO(0);
  TILE_ZERO(1);
  TILE_ZERO(2);
  TILE_ZERO(3);
  for (int64_t at = 0; at < size; at += 64) {
    TILE_LOAD(4, x + at, stride);
    TILE_LOAD(5, x_low + at, stride);
    TILE_LOAD(6, codes + at * WIDTH, 4 * LINE);
    TILE_LOAD(7, codes + at * WIDTH + LINE, 4 * LINE);
    TILE_MULTIPLY_BYTES(0, 4, 6);
    TILE_MULTIPLY_BYTES(1, 4, 7);
    TILE_MULTIPLY_BYTES(2, 5, 6);
    TILE_MULTIPLY_BYTES(3, 5, 7);
  }
  TILE_STORE(0, sums, 128);
  TILE_STORE(1, sums + 16, 128);
  TILE_STORE(2, sums + TILE_PAIRS * 32, 128);
  TILE_STORE(3, sums + TILE_PAIRS * 32 + 16, 128);
}

/* Up to sixteen rows times two vectors of a group. */
INLINE void multiply_narrow_group(int is_signed, const int8_t *x, int64_t stride, int64_t size, const uint8_t *codes,
                                  int32_t *sums) {
  TILE_ZERO(0);
  TILE_ZERO(1);
  for (int64_t at = 0; at < size; at += 64) {
    TILE_LOAD(4, x + at, stride);
    TILE_LOAD(6, codes + at * WIDTH, 4 * LINE);
    TILE_LOAD(7, codes + at * WIDTH + LINE, 4 * LINE);
    TILE_MULTIPLY_BYTES(0, 4, 6);
    TILE_MULTIPLY_BYTES(1, 4, 7);
  }
  TILE_STORE(0, sums, 128);
  TILE_STORE(1, sums + 16, 128);
}

/* Where groups are added: two vectors of some rows' sums. */
typedef struct {
  const Factors *factors; /* of the first group */
  const Int8Sums *wholes;
  float *sums;
  int64_t row, rows, group;
  int vector;
} Int8Added;

INLINE void add_tiled_groups(int count, int has_minima, Int8Added to, const Int8Rows *x) {
  const int64_t groups = x->groups, at = to.row * groups + to.group;
  const float *row_scales = x->scales + at, *row_sums = x->sums + at;
  vec scales[GROUPS_AT_ONCE][2];
  for (int g = 0; g < count; g++)
    for (int v = 0; v < 2; v++) scales[g][v] = v_load(to.factors[g].scales + (to.vector + v) * 16);
  for (int64_t row = 0; row < to.rows; row++, row_scales += groups, row_sums += groups, to.sums += WIDTH) {
    vec sum[2] = {v_load(to.sums), v_load(to.sums + 16)};
    _Pragma("GCC unroll 4") for (int g = 0; g < count; g++) {
      vec scale = v_set(row_scales[g]);
      _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) {
        ints dots = _mm512_loadu_si512(to.wholes->at[g] + row * 32 + v * 16);
        sum[v] = v_fma(v_from_ints(dots), v_mul(scale, scales[g][v]), sum[v]);
        if (has_minima)
          sum[v] = v_fnma(v_load(to.factors[g].minima + (to.vector + v) * 16), v_set(row_sums[g]), sum[v]);
      }
    }
    v_store(to.sums, sum[0]);
    v_store(to.sums + 16, sum[1]);
  }
}

static void add_tiled(int64_t count, Int8Added to, const Int8Rows *x) {
  if (count == GROUPS_AT_ONCE && !x->has_minima)
    add_tiled_groups(GROUPS_AT_ONCE, 0, to, x);
  else if (count == GROUPS_AT_ONCE)
    add_tiled_groups(GROUPS_AT_ONCE, 1, to, x);
  else
    add_tiled_groups((int)count, x->has_minima != 0, to, x);
}

/* Up to 32 rows times a piece. */
INLINE void int8_tiled_rows(int is_signed, const Int8Piece *piece, const Int8Rows *x, int64_t row, int64_t rows,
                            float *sums) {
  Int8Sums wholes;
  shape_tiles(rows, least(x->group, 64) / 4);
  for (int vector = 0; vector < 4; vector += 2) {
    for (int64_t group = 0; group < piece->groups; group += GROUPS_AT_ONCE) {
      int64_t count = least(GROUPS_AT_ONCE, piece->groups - group);
      for (int64_t g = 0; g < count; g++) {
        const int8_t *values = x->values + row * x->stride + (piece->first + group + g) * x->group;
        const uint8_t *codes = piece->codes + (group + g) * piece->step + vector * LINE;
        if (rows > TILE_PAIRS)
          multiply_wide_group(is_signed, values, x->stride, x->group, codes, wholes.at[g]);
        else
          multiply_narrow_group(is_signed, values, x->stride, x->group, codes, wholes.at[g]);
      }
      add_tiled(count,
                (Int8Added){piece->factors + group, &wholes, sums + vector * 16, row, rows, piece->first + group, vector},
                x);
    }
  }
}

/* As int8_tiles of int8_tiles.h, of decoded `codes_for_tiles`. */
static void int8_by_tiles(const Int8Piece *piece, const Int8Rows *x, int64_t row, int64_t rows, float *sums) {
  for (int64_t done = 0; done < rows; done += TWO_TILES) {
    int64_t count = least(TWO_TILES, rows - done);
    if (x->codes.offset != 0)
      int8_tiled_rows(1, piece, x, row + done, count, sums + done * WIDTH);
    else
      int8_tiled_rows(0, piece, x, row + done, count, sums + done * WIDTH);
  }
}

#define HAS_INT8_TILES

#endif
