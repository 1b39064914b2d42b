/*
 * Up to 16 rows times a block of a quantized matrix, by tiles (AMX). The same sums as multiply_group makes, in another
 * order of instructions: eight inputs of a later group are decoded between two tile products, because a tile's latency
 * is long and a tile that reads what was written just before it waits for that.
 */
#ifndef SWARM_STREAM_AMX_H
#define SWARM_STREAM_AMX_H

#include "tiles_amx.h"

/* One group's decoded weights and factors, and what its tiles gave. */
typedef struct {
  uint16_t *weights;
  Factors *factors;
  float *parts;
} Slot;

typedef struct {
  const Quantized *job;
  Stream stream;
  const uint16_t *x;
  int64_t stride, rows;
  const float *row_sums;
  float *sums;
} Streamed;

/* Decodes eight inputs after the other. `left` of them: none when all groups are decoded. */
typedef struct {
  const char *from, *ahead;
  uint16_t *to;
  int64_t left;
} Decoding;

INLINE void decode_next(int kind, const Values *values, byte_vec low, byte_vec high, Decoding *at) {
  if (at->left == 0) return;
  decode_eight(kind, values, low, high, at->from, at->to, at->ahead);
  int64_t bytes = lines_of_eight(kind) * LINE;
  at->from += bytes, at->ahead += bytes, at->to += 4 * PAIR_OF_BLOCK, at->left--;
}

INLINE Slot slot_at(Bench *bench, int64_t group, int64_t slots, int64_t room) {
  int64_t slot = group % slots;
  return (Slot){bench->weights + slot * room, &bench->factors[slot], bench->parts + group % 2 * TILE_PAIRS * WIDTH};
}

INLINE void add_slot(const Streamed *all, Slot slot, int64_t group) {
  const float *row_sums = all->row_sums == NULL ? NULL : all->row_sums + group;
  add_parts(slot.parts, slot.factors, all->rows, all->sums, group == 0, row_sums, all->job->layout.groups);
}

/* One step's product for sixteen outputs; before it, eight inputs are decoded if `decodes`. */
#define STREAM_TILE(sums, weights, decodes)                                                       \
  do {                                                                                            \
    if (decodes) decode_next(kind, values, low, high, &decoding);                                 \
    if (from == NULL) break;                                                                      \
    if (step == 0) TILE_ZERO(sums);                                                               \
    TILE_LOAD(weights, from + (sums) * 32, PAIR_OF_BLOCK * 2);                                    \
    TILE_MULTIPLY(sums, 4, weights);                                                              \
  } while (0)

INLINE void stream_kind(int kind, const Streamed *all, Bench *bench) {
  const Quantized *job = all->job;
  const Values *values = &job->values;
  const byte_vec low = b_table(values->low), high = b_table(values->high);
  const int64_t size = job->format->group, groups = job->layout.groups, room = size / 2 * PAIR_OF_BLOCK;
  const int64_t lead = (DECODE_LEAD + size - 1) / size, slots = lead + 2; /* the one before is still to be added */
  const int64_t steps = size < 2 * TILE_PAIRS ? 1 : size / (2 * TILE_PAIRS), whole = size >= 2 * TILE_PAIRS;
  shape_tiles(all->rows, whole ? TILE_PAIRS : size / 2);
  for (int64_t group = 0; group < groups + lead; group++) {
    int64_t mine = group - lead; /* the one that is multiplied */
    Decoding decoding = {.left = 0};
    if (group < groups) {
      Slot slot = slot_at(bench, group, slots, room);
      const char *from = codes_of_group(job, all->stream, group), *ahead = ahead_of(job, all->stream, from);
      for (int64_t at = job->layout.codes; at < job->layout.group; at += LINE) fetch_far(ahead + at);
      load_factors(job->format, &job->layout, all->stream.block, group, slot.factors);
      decoding = (Decoding){from, ahead, slot.weights, size / 8};
    }
    Slot slot = slot_at(bench, mine < 0 ? 0 : mine, slots, room);
    for (int64_t step = 0; step < steps; step++) {
      const uint16_t *from = mine < 0 ? NULL : slot.weights + step * TILE_PAIRS * PAIR_OF_BLOCK;
      if (from != NULL) TILE_LOAD(4, all->x + mine * size + step * 2 * TILE_PAIRS, all->stride * 2);
      STREAM_TILE(0, 5, 1);
      STREAM_TILE(1, 6, whole);
      STREAM_TILE(2, 7, 1);
      STREAM_TILE(3, 5, whole);
    }
    if (mine > 0) {
      Slot before = slot_at(bench, mine - 1, slots, room);
      add_slot(all, before, mine - 1);
    }
    if (mine < 0) continue;
    TILE_STORE(0, slot.parts, WIDTH * 4);
    TILE_STORE(1, slot.parts + 16, WIDTH * 4);
    TILE_STORE(2, slot.parts + 32, WIDTH * 4);
    TILE_STORE(3, slot.parts + 48, WIDTH * 4);
  }
  add_slot(all, slot_at(bench, groups - 1, slots, room), groups - 1);
}

static void stream_tiles(const Streamed *all, Bench *bench) {
  int64_t kind = all->job->format->codes;
  if (kind == SWARM_CODES4)
    stream_kind(SWARM_CODES4, all, bench);
  else if (kind == SWARM_CODES5)
    stream_kind(SWARM_CODES5, all, bench);
  else if (kind == SWARM_CODES6)
    stream_kind(SWARM_CODES6, all, bench);
  else if (kind == SWARM_CODES8)
    stream_kind(SWARM_CODES8, all, bench);
  else
    stream_kind(SWARM_FLOATS8, all, bench);
}

#endif
