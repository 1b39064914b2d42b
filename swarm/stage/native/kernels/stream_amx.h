/*
 * Up to 16 rows times a block of a quantized matrix, by tiles (AMX). The same sums as multiply_groups makes, in another
 * order of instructions.
 *
 * A step is 32 inputs. Its weights are decoded between the tile products of an earlier step, because a tile's latency is
 * long and a tile that reads what was written just before it waits for that.
 *
 * Two groups of 16 inputs share a step: each has rows of its own in the tile that multiplies the weights, and in them
 * the other group's inputs are 0. 0 times a weight changes no sum.
 */
#ifndef SWARM_STREAM_AMX_H
#define SWARM_STREAM_AMX_H

#include "tiles_amx.h"

#define STEP_INPUTS 32
#define STEP_NUMBERS (STEP_INPUTS / 2 * PAIR_OF_BLOCK)
#define RING 3 /* steps whose decoded weights are kept: the one that is multiplied, and those ahead of it */
_Static_assert(sizeof((Bench *)NULL)->weights >= RING * STEP_NUMBERS * sizeof(uint16_t), "weights of RING steps");
_Static_assert(sizeof((Bench *)NULL)->lines >= RING * TILE_PAIRS * STEP_INPUTS * sizeof(uint16_t), "rows of RING steps");

/* How a block is cut into steps. */
typedef struct {
  int64_t num_groups; /* of a step: 2 of 16 inputs, else 1 */
  int64_t num_steps;  /* of a group, or of two of 16 inputs */
  int64_t steps;      /* of the block */
  int64_t rows;       /* of a tile */
} StreamPlan;

/* Groups whose parts are to be added to the sums. `count` is 0 if there are none. */
typedef struct {
  const float *parts; /* [group][row][64] */
  int64_t group, count;
} StreamedParts;

static StreamPlan stream_plan(const Quantized *job, int64_t rows) {
  const int64_t size = job->format->group, groups = job->layout.groups;
  StreamPlan plan = {.num_groups = size < STEP_INPUTS ? STEP_INPUTS / size : 1};
  plan.num_steps = size < STEP_INPUTS ? 1 : size / STEP_INPUTS;
  plan.steps = (groups * size + STEP_INPUTS - 1) / STEP_INPUTS;
  plan.rows = rows * plan.num_groups;
  return plan;
}

/* The rows of a step of two groups: for the first group, then for the second one, which the last step may lack. */
INLINE void line_up(const BlockRows *all, int64_t step, int64_t groups, uint16_t *to) {
  const __mmask32 first = 0xffff, second = step * 2 + 1 < groups ? ~first : 0;
  for (int64_t row = 0; row < all->rows; row++) {
    const uint16_t *from = (const uint16_t *)all->x.at + row * all->x.stride + step * STEP_INPUTS;
    p_store(to + row * STEP_INPUTS, _mm512_maskz_loadu_epi16(first, from));
    p_store(to + (all->rows + row) * STEP_INPUTS, _mm512_maskz_loadu_epi16(second, from));
  }
}

/* A step that is decoded, eight inputs after the other. */
typedef struct {
  const char *from[2], *ahead[2]; /* of both halves; NULL if there is nothing to decode */
  uint16_t *to;
} Decoding;

INLINE void fetch_factors(const Quantized *job, Stream stream, int64_t group) {
  const char *ahead = ahead_of(job, stream, codes_of_group(job, stream, group));
  for (int64_t at = job->layout.codes; at < job->layout.group; at += LINE) fetch_far(ahead + at);
}

INLINE Decoding begin_step(int kind, const StreamPlan *plan, const Quantized *job, Stream stream, int64_t step,
                           uint16_t *to) {
  const int64_t half = 2 * lines_of_eight(kind) * LINE;
  Decoding next = {{NULL, NULL}, {NULL, NULL}, to};
  if (plan->num_groups == 1) {
    int64_t group = step / plan->num_steps, at = step % plan->num_steps;
    next.from[0] = codes_of_group(job, stream, group) + at * 2 * half;
    next.from[1] = next.from[0] + half;
    if (at == 0) fetch_factors(job, stream, group);
  } else {
    next.from[0] = codes_of_group(job, stream, 2 * step);
    fetch_factors(job, stream, 2 * step);
    if (2 * step + 1 < job->layout.groups) {
      next.from[1] = codes_of_group(job, stream, 2 * step + 1);
      fetch_factors(job, stream, 2 * step + 1);
    } else {
      memset(to + STEP_NUMBERS / 2, 0, STEP_NUMBERS); /* bytes of half a step: rows of 0 multiply them */
    }
  }
  for (int i = 0; i < 2; i++) next.ahead[i] = next.from[i] == NULL ? NULL : ahead_of(job, stream, next.from[i]);
  return next;
}

INLINE void decode_quarter(int kind, const Tables *tables, const Decoding *step, int quarter) {
  const int64_t skipped = quarter % 2 * lines_of_eight(kind) * LINE;
  const char *from = step->from[quarter / 2];
  if (from == NULL) return;
  decode_eight(kind, tables, from + skipped, step->to + quarter * 4 * PAIR_OF_BLOCK, step->ahead[quarter / 2] + skipped);
}

INLINE void add_streamed(const Quantized *job, Stream stream, const BlockRows *all, StreamedParts from) {
  for (int64_t i = 0; i < from.count; i++) {
    const int64_t group = from.group + i, groups = job->layout.groups;
    FactorVectors factors = factors_of(job->format, &job->layout, stream.block, group);
    add_parts(from.parts + i * all->rows * WIDTH, &factors, all->rows, all->sums, group == 0,
              all->row_sums == NULL ? NULL : all->row_sums + group, groups);
  }
}

/* A product of sixteen outputs; before it, a quarter of a step is decoded. */
#define STREAM_TILE(sums, weights)                             \
  do {                                                         \
    decode_quarter(kind, &tables, &decoding, sums);            \
    if (from == NULL) break;                                   \
    TILE_LOAD(weights, from + (sums) * 32, PAIR_OF_BLOCK * 2); \
    TILE_MULTIPLY(sums, 4, weights);                           \
  } while (0)

INLINE void stream_kind(int kind, const StreamPlan *plan, const Quantized *job, Stream stream, const BlockRows *all,
                        Bench *bench) {
  const Tables tables = tables_of(kind, &job->values);
  const int64_t ahead = RING - 1, groups = job->layout.groups;
  const int64_t room = TILE_PAIRS * STEP_INPUTS;
  StreamedParts pending = {.count = 0};
  float *parts = bench->parts, *other = bench->parts + TILE_PAIRS * WIDTH;
  shape_tiles(plan->rows, TILE_PAIRS);
  for (int64_t step = 0, turn = 0; step < plan->steps + ahead; step++) {
    const int64_t mine = step - ahead; /* the one that is multiplied */
    const uint16_t *from = mine < 0 ? NULL : bench->weights + mine % RING * STEP_NUMBERS;
    Decoding decoding = {.from = {NULL, NULL}};
    if (step < plan->steps) {
      decoding = begin_step(kind, plan, job, stream, step, bench->weights + step % RING * STEP_NUMBERS);
      if (plan->num_groups > 1) line_up(all, step, groups, bench->lines + step % RING * room);
    }
    if (from != NULL) {
      if (turn == 0) {
        TILE_ZERO(0);
        TILE_ZERO(1);
        TILE_ZERO(2);
        TILE_ZERO(3);
      }
      if (plan->num_groups > 1)
        TILE_LOAD(4, bench->lines + mine % RING * room, STEP_INPUTS * 2);
      else
        TILE_LOAD(4, (const uint16_t *)all->x.at + mine * STEP_INPUTS, all->x.stride * 2);
    }
    STREAM_TILE(0, 5);
    STREAM_TILE(1, 6);
    STREAM_TILE(2, 7);
    STREAM_TILE(3, 5);
    if (from == NULL || ++turn < plan->num_steps) continue;
    add_streamed(job, stream, all, pending);
    TILE_STORE(0, parts, WIDTH * 4);
    TILE_STORE(1, parts + 16, WIDTH * 4);
    TILE_STORE(2, parts + 32, WIDTH * 4);
    TILE_STORE(3, parts + 48, WIDTH * 4);
    int64_t group = mine / plan->num_steps * plan->num_groups;
    pending = (StreamedParts){parts, group, least(plan->num_groups, groups - group)};
    parts = other;
    other = (float *)pending.parts;
    turn = 0;
  }
  add_streamed(job, stream, all, pending);
}

/* 0 if there are too many rows. */
static int stream_tiles(const Quantized *job, Stream stream, const BlockRows *all, Bench *bench) {
  const int64_t kind = job->format->codes;
  StreamPlan plan = stream_plan(job, all->rows);
  if (plan.rows > TILE_PAIRS) return 0;
  if (kind == SWARM_CODES4)
    stream_kind(SWARM_CODES4, &plan, job, stream, all, bench);
  else if (kind == SWARM_CODES5)
    stream_kind(SWARM_CODES5, &plan, job, stream, all, bench);
  else if (kind == SWARM_CODES6)
    stream_kind(SWARM_CODES6, &plan, job, stream, all, bench);
  else if (kind == SWARM_CODES8)
    stream_kind(SWARM_CODES8, &plan, job, stream, all, bench);
  else
    stream_kind(SWARM_FLOATS8, &plan, job, stream, all, bench);
  return 1;
}

#endif
