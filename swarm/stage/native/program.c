/*
 * Runs a program. Products and attention share themselves out among the threads; operations on single rows do so where
 * there are many rows. Between two operations of a step there is nothing but this loop, so a helper that is out of work
 * finds the next one while it still looks for it, and no interpreter has to be waited for.
 */
#include "program.h"

#include <stddef.h>

#include "adapters.h"
#include "counting.h"
#include "experts.h"
#include "pool.h"

#define FEW_ROWS 16 /* rows of a piece of an operation on single rows */

typedef struct {
  const SwarmKernels *kernels;
  const SwarmOp *op;
  const SwarmStep *step;
} Job;

static char *at(const SwarmStep *step, int64_t buffer, int64_t element, int64_t kind) {
  return (char *)step->buffers[buffer] + element * (kind == SWARM_BFLOAT16 ? 2 : 4);
}

static void norm_rows(const Job *job, int64_t first, int64_t count) {
  const SwarmOp *op = job->op;
  const SwarmNorm *norm = op->what;
  int64_t begin = first * norm->stride + norm->first;
  SwarmRows rows = {at(job->step, op->from, begin, op->kind), norm->stride, at(job->step, op->to, begin, op->kind),
                    norm->stride, NULL};
  job->kernels->rms_norm(op->kind, &rows, count, norm->count, norm->size, norm->weight, norm->epsilon, norm->rounded);
}

static int64_t row_width(const SwarmHeads *heads) { return (heads->query_heads + 2 * heads->key_heads) * heads->size; }

static void turn_rows(const Job *job, int64_t first, int64_t count) {
  const SwarmOp *op = job->op;
  const SwarmStep *step = job->step;
  const SwarmHeads *heads = op->what;
  int64_t width = row_width(heads), skipped = first * step->table * (step->table_kind == SWARM_BFLOAT16 ? 2 : 4);
  job->kernels->turn(op->kind, at(step, op->to, first * width, op->kind), width, count,
                     heads->query_heads + heads->key_heads, heads->size, step->turned,
                     (const char *)step->cosines + skipped, (const char *)step->sines + skipped, step->table,
                     step->table_kind);
}

static void add_rows(const Job *job, int64_t first, int64_t count) {
  const SwarmOp *op = job->op;
  int64_t width = ((const SwarmWidth *)op->what)->elements;
  char *to = at(job->step, op->to, first * width, op->kind);
  job->kernels->add(op->kind, to, at(job->step, op->from, first * width, op->kind), to, count * width);
}

static void do_rows(const void *argument, int64_t index, int64_t next) {
  const Job *job = argument;
  int64_t first = index * FEW_ROWS, count = least(FEW_ROWS, job->step->num_rows - first);
  (void)next;
  if (job->op->code == SWARM_NORM)
    norm_rows(job, first, count);
  else if (job->op->code == SWARM_TURN)
    turn_rows(job, first, count);
  else
    add_rows(job, first, count);
}

static int multiply(const Job *job) {
  const SwarmOp *op = job->op;
  const SwarmProduct *product = op->what;
  SwarmRows rows = {at(job->step, op->from, 0, op->kind), product->matrix->inputs,
                    at(job->step, op->to, product->first, op->kind), product->stride, NULL};
  const SwarmAdapted *adapted = product->slot < 0 ? NULL : job->step->adapted;
  return swarm_adapt(product->matrix, rows, job->step->num_rows, adapted, product->slot, (int)job->step->threads);
}

static int mix(const Job *job) {
  const SwarmOp *op = job->op;
  const SwarmExperts *experts = op->what;
  int64_t size = experts->down->outputs;
  SwarmRows rows = {at(job->step, op->from, 0, op->kind), size, at(job->step, op->to, 0, op->kind), size, NULL};
  return swarm_mix(experts, &rows, job->step->num_rows, NULL, NULL, (int)job->step->threads);
}

static int attend(const Job *job) {
  const SwarmOp *op = job->op;
  const SwarmStep *step = job->step;
  const SwarmHeads *heads = op->what;
  int64_t size = heads->size, width = row_width(heads), keys = heads->query_heads * size;
  SwarmBatch batch = {at(step, op->from, 0, op->kind),
                      at(step, op->from, keys, op->kind),
                      at(step, op->from, keys + heads->key_heads * size, op->kind),
                      at(step, op->to, 0, op->kind),
                      width, size, width, size, width, size, heads->query_heads};
  for (int64_t i = 0; i < step->num_racks; i++) {
    const SwarmRack *rack = &step->racks[i];
    if (job->kernels->attend(rack->spans, rack->num_spans, &rack->caches[op->layer], &batch, &heads->how,
                             (int)step->threads) != 0)
      return -1;
  }
  return 0;
}

int swarm_run(const SwarmOp *ops, int64_t num_ops, const SwarmStep *step) {
  Job job = {.kernels = swarm_kernels(), .step = step};
  for (const SwarmOp *op = ops; op < ops + num_ops; op++) {
    int status = 0;
    job.op = op;
    if (op->code == SWARM_MULTIPLY)
      status = multiply(&job);
    else if (op->code == SWARM_MIX)
      status = mix(&job);
    else if (op->code == SWARM_ATTEND)
      status = attend(&job);
    else
      swarm_share(do_rows, &job, (step->num_rows + FEW_ROWS - 1) / FEW_ROWS, (int)step->threads);
    if (status != 0) return -1;
  }
  return 0;
}
