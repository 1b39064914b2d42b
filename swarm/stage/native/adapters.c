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
#define ROWS 8   /* of a piece, at most */

typedef struct {
  const SwarmKernels *kernels;
  const SwarmMatrix *matrix;
  const SwarmRows *rows;
  int64_t num_rows;
  int64_t rows_each; /* of a piece */
  int64_t pieces;    /* of a row */
} Job;

/* Rows with the same adapter are neighbours in the order, so that what they share is read once. */
static void lower_piece(const void *argument, int64_t index, int64_t next) {
  const Job *job = argument;
  const SwarmAdapted *adapted = job->rows->adapted;
  const int64_t begin = index / job->pieces * job->rows_each, end = least(begin + job->rows_each, job->num_rows);
  const int64_t first = index % job->pieces * RANKS;
  (void)next;
  for (int64_t at = begin, stop; at < end; at = stop) {
    const int32_t which = adapted->which[adapted->order[at]];
    for (stop = at + 1; stop < end && adapted->which[adapted->order[stop]] == which;) stop++;
    if (which < 0) continue;
    const SwarmAdapter *adapter = &adapted->adapters[which][adapted->slot];
    if (first < adapter->rank)
      job->kernels->lower(job->matrix->kind, adapter, job->rows, adapted->order + at, stop - at, job->matrix->inputs,
                          first, least(RANKS, adapter->rank - first));
  }
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
    const int64_t pieces = (mine.stride + RANKS - 1) / RANKS, parts = 2 * (threads > 1 ? threads : 1);
    const int64_t rows_each = least(ROWS, (num_rows * pieces + parts - 1) / parts);
    const Job job = {kernels, matrix, &rows, num_rows, rows_each, pieces};
    swarm_share(lower_piece, &job, (num_rows + rows_each - 1) / rows_each * pieces, threads);
  }
  return kernels->multiply(matrix, offsets, 1, &rows, threads);
}
