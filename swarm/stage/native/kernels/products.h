/*
 * Rows times packed matrices. A piece of work is a block of 64 outputs times a panel of rows: the block streams from
 * memory once, and stays in the second-level cache for the rows that follow. While one segment is multiplied, the next
 * one is fetched, so that memory and arithmetic work at the same time.
 */
#ifndef SWARM_PRODUCTS_H
#define SWARM_PRODUCTS_H

#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "../counting.h"
#include "../pool.h"
#include "activations.h"
#include "adapters.h"
#include "numbers.h"
#include "operands.h"
#include "int8_products.h"
#include "quantized.h"

#define SEGMENT 128 /* pairs of inputs that are multiplied at a time: 32 or 64 KiB of the matrix */
#ifndef PANEL
#define PANEL 240   /* rows of a piece: what they are multiplied from stays in the second-level cache, too */
#endif

typedef struct {
  const SwarmMatrix *matrices;
  const int64_t *offsets, *before; /* rows, and pieces of work, before each group's */
  int64_t groups, blocks, pairs;
  Operand x; /* the rows in the form that is multiplied */
  Quantized quantized; /* if the matrices have a format */
  Int8Rows int8;       /* if it asks for them */
  const SwarmRows *rows;
  atomic_int *failed;
} Product;

typedef struct {
  const SwarmMatrix *matrix;
  int64_t block, first, rows;
} Share;

static int64_t block_bytes(const Product *job) {
  return job->matrices->format != NULL ? job->quantized.layout.block : job->pairs * pair_bytes(job->matrices->kind);
}

static const char *block_at(const SwarmMatrix *matrix, const Product *job, int64_t block) {
  return (const char *)matrix->packed + block * block_bytes(job);
}

static Share share_of(const Product *job, int64_t piece) {
  int64_t group = owner_of(job->before, job->groups, piece);
  int64_t mine = piece - job->before[group], panel = mine / job->blocks * PANEL;
  int64_t first = job->offsets[group] + panel;
  return (Share){&job->matrices[group], mine % job->blocks, first, least(PANEL, job->offsets[group + 1] - first)};
}

/* The sums of a block, [rows][64]; NULL if there is no memory for them. */
static float *sums_of_block(const Product *job, const Share *mine, int64_t next) {
  float *sums = swarm_scratch(SWARM_SUMS, mine->rows * WIDTH * (int64_t)sizeof(float));
  if (sums == NULL) {
    atomic_store(job->failed, 1);
    return NULL;
  }
  int kind = (int)job->matrices->kind;
  int64_t step = pair_bytes(kind);
  const char *weights = block_at(mine->matrix, job, mine->block), *after_all = NULL;
  if (next >= 0) {
    Share following = share_of(job, next);
    after_all = block_at(following.matrix, job, following.block);
  }
  if (job->matrices->format != NULL) {
    Stream stream = {weights, after_all};
    int failed = job->matrices->format->int8_rows
                     ? multiply_int8(job->matrices->format, &job->quantized.layout, stream, &job->int8, mine->first, mine->rows, sums)
                     : multiply_quantized(kind, &job->quantized, stream, job->x, mine->first, mine->rows, sums);
    if (failed) {
      atomic_store(job->failed, 1);
      sums = NULL;
    }
    multiplied();
    return sums;
  }
  for (int64_t pair = 0; pair < job->pairs; pair += SEGMENT) {
    int64_t count = least(SEGMENT, job->pairs - pair);
    Piece piece = {weights + pair * step, step, count, WIDTH / 16, 0};
    const char *after = pair + count < job->pairs ? piece.weights + count * step : after_all;
    multiply(kind, piece, operand_at(job->x, mine->first, 2 * pair), mine->rows, (Sums){sums, WIDTH, pair == 0}, after);
  }
  multiplied();
  return sums;
}

static void store_linear(const Product *job, const Share *mine, const float *sums) {
  const SwarmMatrix *matrix = mine->matrix;
  int64_t begin = mine->block * WIDTH, outputs = least(WIDTH, matrix->outputs - begin);
  for (int64_t row = 0; row < mine->rows; row++) {
    int64_t to = (mine->first + row) * job->rows->out_stride + begin;
    for (int64_t at = 0; at < outputs; at += 16) {
      vec sum = v_load(sums + row * WIDTH + at);
      if (matrix->bias != NULL) sum = v_add(sum, v_load_some(matrix->bias + begin + at, outputs - at));
      if (matrix->function != SWARM_LINEAR) sum = activated(matrix->function - SWARM_ALONE, matrix->limit, sum);
      store_number((int)matrix->kind, job->rows->out, to + at, sum, outputs - at);
    }
  }
}

/* A block holds 32 outputs of the gate and the same 32 of what it gates. */
static void store_gated(const Product *job, const Share *mine, const float *sums) {
  const SwarmMatrix *matrix = mine->matrix;
  int64_t begin = mine->block * (WIDTH / 2), outputs = least(WIDTH / 2, matrix->outputs / 2 - begin);
  const float *bias = matrix->bias == NULL ? NULL : matrix->bias + mine->block * WIDTH;
  for (int64_t row = 0; row < mine->rows; row++) {
    int64_t to = (mine->first + row) * job->rows->out_stride + begin;
    for (int64_t at = 0; at < outputs; at += 16) {
      vec gate = v_load(sums + row * WIDTH + at), up = v_load(sums + row * WIDTH + WIDTH / 2 + at);
      if (bias != NULL) gate = v_add(gate, v_load(bias + at)), up = v_add(up, v_load(bias + WIDTH / 2 + at));
      store_number((int)matrix->kind, job->rows->out, to + at, gated(matrix, gate, up), outputs - at);
    }
  }
}

static void multiply_piece(const void *argument, int64_t index, int64_t next) {
  const Product *job = argument;
  Share mine = share_of(job, index);
  const int is_gated = mine.matrix->function != SWARM_LINEAR && mine.matrix->function < SWARM_ALONE;
  const int64_t outputs = is_gated ? mine.matrix->outputs / 2 : mine.matrix->outputs, width = is_gated ? 2 : 4;
  const int64_t groups = (outputs + 15) / 16, first = mine.block * width, count = least(width, groups - first);
  const BlockGroups block = {first, is_gated ? groups + first : -1, count};
  const SwarmAdapted *adapted = job->rows->adapted;
  fetch_groups(adapted, mine.first, mine.rows, mine.matrix->kind, first, count);
  if (is_gated) fetch_groups(adapted, mine.first, mine.rows, mine.matrix->kind, groups + first, count);
  float *sums = sums_of_block(job, &mine, next);
  if (sums == NULL) return;
  add_adapters(adapted, mine.matrix->kind, block, mine.first, mine.rows, sums);
  if (!is_gated)
    store_linear(job, &mine, sums);
  else
    store_gated(job, &mine, sums);
}

static int multiply_matrices(const SwarmMatrix *matrices, const int64_t *offsets, int64_t groups, const SwarmRows *rows,
                             int threads) {
  if (offsets[groups] == 0) return 0; /* rows of nobody have no memory, which is no failure */
  atomic_int failed = 0;
  int64_t blocks = (matrices->outputs + WIDTH - 1) / WIDTH, pairs = (matrices->inputs + 1) / 2, pieces = 0;
  int64_t *before = swarm_scratch(SWARM_COUNTS, groups * (int64_t)sizeof *before);
  const SwarmFormat *format = matrices->format;
  Operand x = {0};
  Quantized quantized = {0};
  Int8Rows int8 = {0};
  if (before == NULL) return -1;
  if (format != NULL && format->int8_rows) {
    quantized.layout = swarm_layout(format, matrices->inputs);
    int8 = int8_rows_of(matrices, offsets, groups, rows, threads);
    if (int8.values == NULL) return -1;
  } else {
    int64_t whole = format == NULL ? 2 : format->group;
    x = operand_of((int)matrices->kind, rows, offsets[groups], matrices->inputs, whole, format == NULL ? NULL : format->order);
    if (x.at == NULL) return -1;
    if (format != NULL && prepare_quantized(format, matrices->inputs, x, offsets[groups], &quantized) != 0) return -1;
  }
  for (int64_t group = 0; group < groups; group++) {
    before[group] = pieces;
    pieces += (offsets[group + 1] - offsets[group] + PANEL - 1) / PANEL * blocks;
  }
  Product job = {matrices, offsets, before, groups, blocks, pairs, x, quantized, int8, rows, &failed};
  swarm_share(multiply_piece, &job, pieces, threads);
  return failed ? -1 : 0;
}

#endif
