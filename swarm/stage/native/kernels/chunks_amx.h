/*
 * Many rows times decoded groups of a block, by tiles (AMX). The same sums as multiply_groups makes. 32 rows and
 * 32 outputs take all tiles; what they give for a few groups goes to memory that stays in the first-level cache, and is
 * added to the sums while the tiles multiply the next groups. So a sum is read and written once for these groups, and
 * no addition waits for a tile.
 */
#ifndef SWARM_CHUNKS_AMX_H
#define SWARM_CHUNKS_AMX_H

#include "tiles_amx.h"

#define HALF 32 /* outputs that are multiplied at a time */
#define BATCH 2 /* groups that are added together */

/* Parts of a few groups that are still to be added: for 32 outputs of up to 32 rows. `count` is 0 if there are none. */
typedef struct {
  const float *parts; /* [group][row][HALF] */
  const Factors *factors;
  const float *row_sums;
  float *sums;
  int64_t rows, count, output;
  int first;
} Pending;

/* Add the parts of some rows, of `count` groups. */
INLINE void add_rows_of(int count, int has_minima, const Pending *from, int64_t groups, int64_t row, int64_t end) {
  vec scale[BATCH][2], minimum[BATCH][2];
  for (int g = 0; g < count; g++) {
    for (int v = 0; v < 2; v++) {
      scale[g][v] = v_load(from->factors[g].scales + from->output + v * 16);
      if (has_minima) minimum[g][v] = v_load(from->factors[g].minima + from->output + v * 16);
    }
  }
  for (; row < end; row++) {
    float *to = from->sums + row * WIDTH;
    vec sum[2] = {from->first ? v_set(0.0f) : v_load(to), from->first ? v_set(0.0f) : v_load(to + 16)};
    _Pragma("GCC unroll 4") for (int g = 0; g < count; g++) {
      const float *parts = from->parts + (g * CHUNK_ROWS + row) * HALF;
      _Pragma("GCC unroll 2") for (int v = 0; v < 2; v++) {
        sum[v] = v_fma(v_load(parts + v * 16), scale[g][v], sum[v]);
        if (has_minima) sum[v] = v_fnma(minimum[g][v], v_set(from->row_sums[row * groups + g]), sum[v]);
      }
    }
    v_store(to, sum[0]);
    v_store(to + 16, sum[1]);
  }
}

/* Add the parts of one of several equal shares of the rows. */
INLINE void add_pending(int has_minima, const Pending *from, int64_t groups, int64_t share, int64_t shares) {
  int64_t row = from->rows * share / shares, end = from->rows * (share + 1) / shares;
  if (from->count == BATCH)
    add_rows_of(BATCH, has_minima, from, groups, row, end);
  else if (from->count == 1)
    add_rows_of(1, has_minima, from, groups, row, end);
}

/* One group's products with 32 outputs. `two`: of 17 to 32 rows, else of up to 16. */
INLINE void multiply_half(const uint16_t *weights, int64_t steps, const uint16_t *x, int64_t stride, int two,
                          float *parts) {
  const uint16_t *x_low = x + TILE_PAIRS * stride;
  const int64_t step = PAIR_OF_BLOCK * 2;
  TILE_ZERO(0);
  TILE_ZERO(1);
  if (two) {
    TILE_ZERO(2);
    TILE_ZERO(3);
  }
  for (int64_t at = 0; at < steps; at++, weights += TILE_PAIRS * PAIR_OF_BLOCK) {
    TILE_LOAD(4, x + at * 2 * TILE_PAIRS, stride * 2);
    TILE_LOAD(6, weights, step);
    TILE_MULTIPLY(0, 4, 6);
    TILE_LOAD(7, weights + 32, step);
    TILE_MULTIPLY(1, 4, 7);
    if (two) {
      TILE_LOAD(5, x_low + at * 2 * TILE_PAIRS, stride * 2);
      TILE_MULTIPLY(2, 5, 6);
      TILE_MULTIPLY(3, 5, 7);
    }
  }
  TILE_STORE(0, parts, HALF * 4);
  TILE_STORE(1, parts + 16, HALF * 4);
  if (two) {
    TILE_STORE(2, parts + TILE_PAIRS * HALF, HALF * 4);
    TILE_STORE(3, parts + TILE_PAIRS * HALF + 16, HALF * 4);
  }
}

/* Multiply up to 32 rows and 32 outputs of all groups, adding the parts that were pending; the last ones stay pending. */
INLINE void multiply_chunk(int has_minima, const Segment *from, const BlockRows *all, int64_t row, int64_t rows,
                           int64_t output, float *parts[2], Pending *pending) {
  const int64_t size = from->job->format->group, groups = from->job->layout.groups;
  const int64_t steps = size < 2 * TILE_PAIRS ? 1 : size / (2 * TILE_PAIRS), room = size / 2 * PAIR_OF_BLOCK;
  const uint16_t *x = operand_at(all->x, row, from->group * size).at;
  const int64_t stride = all->x.stride;
  for (int64_t group = 0; group < from->count;) {
    int64_t count = from->count - group < BATCH ? 1 : BATCH;
    float *to = parts[0];
    for (int64_t g = 0; g < count; g++) {
      multiply_half(from->weights + (group + g) * room + output * 2, steps, x + (group + g) * size, stride,
                    rows > TILE_PAIRS, to + g * CHUNK_ROWS * HALF);
      add_pending(has_minima, pending, groups, g, count);
    }
    const float *row_sums = has_minima ? all->row_sums + row * groups + from->group + group : NULL;
    *pending = (Pending){to,   from->factors + group, row_sums, all->sums + row * WIDTH + output,
                         rows, count,                 output,   from->group + group == 0};
    parts[0] = parts[1];
    parts[1] = to;
    group += count;
  }
}

/* All rows times all outputs. A rest that fills no two tiles comes last, with tiles of its size. */
INLINE void multiply_chunks(int has_minima, const Segment *from, const BlockRows *all, float *room) {
  const int64_t pairs = least(TILE_PAIRS, from->job->format->group / 2);
  const int64_t rest = all->rows % TWO_TILES, whole = all->rows - rest;
  float *parts[2] = {room, room + BATCH * CHUNK_ROWS * HALF};
  Pending pending = {.count = 0};
  if (whole > 0) shape_tiles(TWO_TILES, pairs);
  for (int64_t output = 0; output < WIDTH; output += HALF)
    for (int64_t row = 0; row < whole; row += TWO_TILES)
      multiply_chunk(has_minima, from, all, row, TWO_TILES, output, parts, &pending);
  if (rest > 0) {
    if (whole == 0 || rest != TILE_PAIRS) shape_tiles(rest, pairs);
    for (int64_t output = 0; output < WIDTH; output += HALF)
      multiply_chunk(has_minima, from, all, whole, rest, output, parts, &pending);
  }
  add_pending(has_minima, &pending, from->job->layout.groups, 0, 1);
}

static void multiply_batches(const Segment *from, const BlockRows *all, float *room) {
  if (all->row_sums == NULL)
    multiply_chunks(0, from, all, room);
  else
    multiply_chunks(1, from, all, room);
}

#endif
