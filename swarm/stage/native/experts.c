/*
 * Mixtures of experts: the rows that go to the same expert are multiplied together.
 *
 * Rows are copied into the order of the experts' numbers, so that each expert's lie side by side: their slots. Two
 * grouped products later the answers of a row are added up, in the order of the experts' numbers. What a row gets
 * depends on nothing but the row: products have the same bits whatever is beside it, and so has each of the rest.
 */
#include "experts.h"

#include <stddef.h>
#include <string.h>

#include "counting.h"
#include "pool.h"

#define MOST_BYTES (64 << 20) /* about what a panel of rows may take to work in */
#define FEW_ROWS 16           /* rows of a piece of work between two products */

typedef struct {
  const SwarmKernels *kernels;
  const SwarmExperts *all;
  const SwarmRows *rows;
  int64_t num_rows, size, bytes; /* of a row: its elements; bytes of one */
  void *logits;                  /* [row][expert] */
  int32_t *chosen;               /* [row][choice] */
  float *weights;                /* [row][choice] */
  int64_t *slots;                /* [row][choice]; -1: nobody's */
  int64_t *offsets;              /* of each expert's first slot */
  char *gathered, *inner;        /* [slot][…]: rows, then answers; what is between the two products */
} Mix;

static int64_t inner_size(const SwarmExperts *all) { return all->down->inputs; }

static int64_t aligned(int64_t bytes) { return (bytes + 63) / 64 * 64; }

/* Cut scratch memory into the parts for so many rows; how much it is where there is none. */
static int64_t lay_out(Mix *mix, int64_t num_rows, char *memory) {
  const SwarmExperts *all = mix->all;
  int64_t slots = num_rows * all->choices, at = 0;
#define PART(name, count)                                            \
  do {                                                               \
    if (memory != NULL) mix->name = (void *)(memory + at);           \
    at += aligned((count) * (int64_t)sizeof *mix->name);             \
  } while (0)
  PART(offsets, all->experts + 1);
  PART(slots, slots);
  PART(chosen, slots);
  PART(weights, slots);
  PART(gathered, slots * mix->size * mix->bytes);
  PART(inner, slots * inner_size(all) * mix->bytes);
#undef PART
  if (memory != NULL) mix->logits = memory + at;
  return at + aligned(num_rows * all->experts * mix->bytes);
}

static const char *row_at(const Mix *mix, int64_t row) {
  return (const char *)mix->rows->x + row * mix->rows->stride * mix->bytes;
}

static void route_piece(const void *argument, int64_t index, int64_t next) {
  const Mix *mix = argument;
  const SwarmExperts *all = mix->all;
  int64_t first = index * FEW_ROWS, count = least(FEW_ROWS, mix->num_rows - first);
  (void)next;
  mix->kernels->route(all->router->kind, (const char *)mix->logits + first * all->experts * mix->bytes, all->experts,
                      count, all->experts, all->choices, all->normed, all->rounded,
                      mix->chosen + first * all->choices, mix->weights + first * all->choices);
}

/* What the caller chose for rows from `first` on, in the order of the experts' numbers. */
static void take_choices(const Mix *mix, int64_t first, const int32_t *chosen, const float *weights) {
  int64_t choices = mix->all->choices, count = mix->num_rows * choices;
  memcpy(mix->chosen, chosen + first * choices, (size_t)count * sizeof *chosen);
  memcpy(mix->weights, weights + first * choices, (size_t)count * sizeof *weights);
  for (int64_t row = 0; row < mix->num_rows; row++)
    sort_by_number(mix->chosen + row * choices, mix->weights + row * choices, choices);
}

/* Slots by expert, and within an expert by row. */
static void assign_slots(const Mix *mix) {
  int64_t count = mix->num_rows * mix->all->choices, experts = mix->all->experts;
  memset(mix->offsets, 0, (size_t)(experts + 1) * sizeof *mix->offsets);
  for (int64_t i = 0; i < count; i++)
    if (mix->chosen[i] >= 0 && mix->chosen[i] < experts) mix->offsets[mix->chosen[i] + 1]++;
  for (int64_t expert = 0; expert < experts; expert++) mix->offsets[expert + 1] += mix->offsets[expert];
  for (int64_t i = 0; i < count; i++)
    mix->slots[i] = mix->chosen[i] >= 0 && mix->chosen[i] < experts ? mix->offsets[mix->chosen[i]]++ : -1;
  for (int64_t expert = experts; expert > 0; expert--) mix->offsets[expert] = mix->offsets[expert - 1];
  mix->offsets[0] = 0;
}

static void gather_piece(const void *argument, int64_t index, int64_t next) {
  const Mix *mix = argument;
  int64_t choices = mix->all->choices, bytes = mix->size * mix->bytes;
  (void)next;
  for (int64_t row = index * FEW_ROWS; row < least(mix->num_rows, (index + 1) * FEW_ROWS); row++)
    for (int64_t i = row * choices; i < (row + 1) * choices; i++)
      if (mix->slots[i] >= 0) memcpy(mix->gathered + mix->slots[i] * bytes, row_at(mix, row), (size_t)bytes);
}

static void combine_piece(const void *argument, int64_t index, int64_t next) {
  const Mix *mix = argument;
  const SwarmRows *rows = mix->rows;
  int64_t first = index * FEW_ROWS, count = least(FEW_ROWS, mix->num_rows - first), choices = mix->all->choices;
  (void)next;
  SwarmRows answers = {mix->gathered, mix->size, (char *)rows->out + first * rows->out_stride * mix->bytes,
                       rows->out_stride, NULL};
  mix->kernels->combine(mix->all->down->kind, &answers, mix->slots + first * choices, mix->weights + first * choices,
                        choices, count, mix->size);
}

/* A product of one matrix and all rows. */
static int route_rows(const Mix *mix, int threads) {
  const int64_t offsets[] = {0, mix->num_rows};
  const SwarmRows rows = {mix->rows->x, mix->rows->stride, mix->logits, mix->all->experts, NULL};
  return mix->kernels->multiply(mix->all->router, offsets, 1, &rows, threads);
}

static int mix_panel(const Mix *mix, int threads) {
  const SwarmExperts *all = mix->all;
  int64_t pieces = (mix->num_rows + FEW_ROWS - 1) / FEW_ROWS, inner = inner_size(all);
  assign_slots(mix);
  swarm_share(gather_piece, mix, pieces, threads);
  const SwarmRows in = {mix->gathered, mix->size, mix->inner, inner, NULL};
  if (mix->kernels->multiply(all->inner, mix->offsets, all->experts, &in, threads) != 0) return -1;
  const SwarmRows out = {mix->inner, inner, mix->gathered, mix->size, NULL};
  if (mix->kernels->multiply(all->down, mix->offsets, all->experts, &out, threads) != 0) return -1;
  swarm_share(combine_piece, mix, pieces, threads);
  return 0;
}

int swarm_mix(const SwarmExperts *all, const SwarmRows *rows, int64_t num_rows, const int32_t *chosen,
              const float *weights, int threads) {
  int64_t bytes = all->down->kind == SWARM_BFLOAT16 ? 2 : 4;
  Mix mix = {.kernels = swarm_kernels(), .all = all, .size = all->down->outputs, .bytes = bytes};
  int64_t for_one = lay_out(&mix, 1, NULL);
  int64_t panel = least(num_rows, for_one > MOST_BYTES / FEW_ROWS ? FEW_ROWS : MOST_BYTES / for_one);
  char *memory = swarm_scratch(SWARM_MIXED, lay_out(&mix, panel, NULL));
  if (memory == NULL) return num_rows > 0 ? -1 : 0;
  lay_out(&mix, panel, memory);
  for (int64_t first = 0; first < num_rows; first += panel) {
    SwarmRows some = {(const char *)rows->x + first * rows->stride * bytes, rows->stride,
                      (char *)rows->out + first * rows->out_stride * bytes, rows->out_stride, NULL};
    mix.rows = &some;
    mix.num_rows = least(panel, num_rows - first);
    if (all->router == NULL)
      take_choices(&mix, first, chosen, weights);
    else if (route_rows(&mix, threads) != 0)
      return -1;
    else
      swarm_share(route_piece, &mix, (mix.num_rows + FEW_ROWS - 1) / FEW_ROWS, threads);
    if (mix_panel(&mix, threads) != 0) return -1;
  }
  return 0;
}
