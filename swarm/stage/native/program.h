/* A stage's step as one call: a list of operations over a few buffers, made once when the stage is loaded. */
#ifndef SWARM_PROGRAM_H
#define SWARM_PROGRAM_H

#include "kernels.h"

/* Operations. Each reads the buffer `from` and writes the buffer `to`; `what` points to its weights and shapes. */
enum {
  SWARM_NORM,     /* SwarmNorm */
  SWARM_MULTIPLY, /* SwarmProduct */
  SWARM_MIX,      /* SwarmExperts */
  SWARM_TURN,     /* SwarmHeads: turn queries and keys by position, in place */
  SWARM_ATTEND,   /* SwarmHeads: write keys and values, then attend */
  SWARM_ADD       /* SwarmWidth: to = to + from */
};

/* Norms of `count` pieces of `size` elements from column `first` on, in rows of `stride` elements. */
typedef struct {
  const float *weight;
  int64_t size, count, first, stride;
  int64_t rounded; /* see SwarmKernels.rms_norm */
  float epsilon;
} SwarmNorm;

/* A product that is written from column `first` on, into rows of `stride` elements. */
typedef struct {
  const SwarmMatrix *matrix;
  int64_t first, stride;
  int64_t slot; /* number of the product, by which adapters know it; -1: none does */
} SwarmProduct;

/* Queries, keys and values of a row side by side: the queries' heads first, then as many of keys as of values. */
typedef struct {
  SwarmHow how;
  int64_t size; /* of a head */
  int64_t query_heads, key_heads;
} SwarmHeads;

typedef struct {
  int64_t elements; /* of a row */
} SwarmWidth;

typedef struct {
  int64_t code, from, to;
  int64_t kind;  /* of the numbers in the buffers */
  int64_t layer; /* SWARM_ATTEND: index into SwarmRack.caches */
  const void *what;
} SwarmOp;

/* Rows of the step whose keys and values lie in one rack. */
typedef struct {
  const SwarmSpan *spans;
  int64_t num_spans;
  const SwarmCache *caches; /* one for each layer of the program */
} SwarmRack;

enum { SWARM_BUFFERS = 4 };

/* One step. Each buffer has room for `num_rows` rows of the widest operation that uses it. */
typedef struct {
  void *buffers[SWARM_BUFFERS];
  int64_t num_rows;
  const void *cosines, *sines; /* see SwarmKernels.turn */
  int64_t table, table_kind, turned;
  const SwarmRack *racks;
  int64_t num_racks;
  int64_t threads;
  const SwarmAdapted *adapted; /* NULL: no row has an adapter */
} SwarmStep;

/*
 * Carry out operations, one after the other, with the kernels that each of them names: the same bits as the same
 * kernels called one by one. 0, or -1 if there was no memory to work in: then no buffer holds anything of use.
 */
int swarm_run(const SwarmOp *ops, int64_t num_ops, const SwarmStep *step);

#endif
