/*
 * An adapter's part of a product: first the rows are lowered, each by its own adapter, to a few numbers; the product
 * then adds what these make of its outputs, before its function and before it is rounded. Rows without an adapter pass
 * both untouched.
 */
#include "adapters.h"

#include <stddef.h>

#include "counting.h"
#include "pool.h"

#define RANKS 16 /* of a piece */

typedef struct {
  const SwarmKernels *kernels;
  const SwarmMatrix *matrix;
  const SwarmRows *rows;
  const SwarmAdapted *adapted;
  int64_t pieces; /* of a row */
} Job;

static void lower_piece(const void *argument, int64_t index, int64_t next) {
  const Job *job = argument;
  const SwarmAdapted *adapted = job->adapted;
  const int64_t row = index / job->pieces, first = index % job->pieces * RANKS, kind = job->matrix->kind;
  (void)next;
  if (adapted->which[row] < 0) return;
  const SwarmAdapter *adapter = &adapted->adapters[adapted->which[row]][adapted->slot];
  if (first >= adapter->rank) return;
  const char *x = (const char *)job->rows->x + row * job->rows->stride * (kind == SWARM_BFLOAT16 ? 2 : 4);
  job->kernels->lower(kind, adapter, x, job->matrix->inputs, first, least(RANKS, adapter->rank - first),
                      adapted->lowered + row * adapted->stride);
}

int swarm_adapt(const SwarmMatrix *matrix, SwarmRows rows, int64_t num_rows, const SwarmAdapted *adapted, int64_t slot,
                int threads) {
  const int64_t offsets[] = {0, num_rows};
  const SwarmKernels *kernels = swarm_kernels();
  SwarmAdapted mine = {0};
  if (adapted != NULL) {
    mine = *adapted;
    mine.slot = slot;
    for (int64_t i = 0; i < mine.num_adapters; i++)
      if (mine.adapters[i][slot].rank > mine.stride) mine.stride = mine.adapters[i][slot].rank;
  }
  if (mine.stride > 0) {
    mine.lowered = swarm_scratch(SWARM_LOWERED, num_rows * mine.stride * (int64_t)sizeof(float));
    if (mine.lowered == NULL) return -1;
    rows.adapted = &mine;
    const Job job = {kernels, matrix, &rows, &mine, (mine.stride + RANKS - 1) / RANKS};
    swarm_share(lower_piece, &job, num_rows * job.pieces, threads);
  }
  return kernels->multiply(matrix, offsets, 1, &rows, threads);
}
