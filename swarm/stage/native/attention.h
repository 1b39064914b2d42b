#ifndef SWARM_ATTENTION_H
#define SWARM_ATTENTION_H

#include <stdint.h>

/* One row of a step: its new tokens' place in the batch, their positions, and where its keys and values lie. */
typedef struct {
  int64_t offset; /* of its first token in the batch */
  int64_t count;  /* tokens */
  int64_t start;  /* position of the first */
  int64_t place;  /* of its keys and values in the slab */
  int64_t pieces; /* of work before this row's */
} SwarmSpan;

/* One layer's keys and values: [place][head][position][size]. Strides count elements. */
typedef struct {
  uint16_t *keys, *values;
  int64_t key_place, key_head, value_place, value_head;
  int64_t key_size, value_size; /* the first is an even number */
  int64_t heads;
} SwarmSlab;

/* The batch: [token][head][size], with strides for tokens and heads. `out` lies without gaps. */
typedef struct {
  const uint16_t *query, *key, *value;
  uint16_t *out;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  int64_t query_heads;
} SwarmBatch;

typedef struct {
  float scale;
  float softcap;       /* 0: none */
  int64_t window;      /* 0: none */
  const float *sinks;  /* one per query head, or NULL */
} SwarmHow;

/*
 * Write the batch's keys and values where they belong, then attend. A row makes one
 * piece of work for each key head and sixteen queries; each span knows how many come before its own.
 * 0, or -1 if there was no memory for the scores: then `out` holds nothing of use.
 */
int swarm_attend(const SwarmSpan *spans, int64_t num_spans, const SwarmSlab *slab, const SwarmBatch *batch,
                  const SwarmHow *how, int threads);

#endif
