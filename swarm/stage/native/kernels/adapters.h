/* What adapters of low rank add to products. A row's sums are in one order, whatever other rows there are. */
#ifndef SWARM_ADAPTERS_KERNEL_H
#define SWARM_ADAPTERS_KERNEL_H

#include <stddef.h>

#include "numbers.h"

#define RANKS_AT_ONCE 4 /* so that a row is read once for several, and no sum waits for itself */

INLINE void lower_some(int kind, const SwarmAdapter *adapter, const void *x, int64_t inputs, int64_t rank, int count,
                       float *lowered) {
  vec sums[RANKS_AT_ONCE];
  _Pragma("GCC unroll 4") for (int i = 0; i < count; i++) sums[i] = v_set(0.0f);
  for (int64_t at = 0; at < inputs; at += 16) {
    vec numbers = load_number(kind, x, at, inputs - at);
    for (int i = 0; i < count && at % 32 == 0; i++) /* the next ranks' */
      fetch_far((const char *)adapter->down + ((rank + count + i) * inputs + at) * (kind == SWARM_BFLOAT16 ? 2 : 4));
    _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)
      sums[i] = v_fma(numbers, load_number(kind, adapter->down, (rank + i) * inputs + at, inputs - at), sums[i]);
  }
  for (int i = 0; i < count; i++) lowered[rank + i] = adapter->scales[rank + i] * sum_of(sums[i]);
}

INLINE void lower_of_kind(int kind, const SwarmAdapter *adapter, const void *x, int64_t inputs, int64_t first,
                          int64_t ranks, float *lowered) {
  int64_t stop = first + ranks;
  for (; first + RANKS_AT_ONCE <= stop; first += RANKS_AT_ONCE)
    lower_some(kind, adapter, x, inputs, first, RANKS_AT_ONCE, lowered);
  for (; first < stop; first++) lower_some(kind, adapter, x, inputs, first, 1, lowered);
}

static void lower(int64_t kind, const SwarmAdapter *adapter, const void *x, int64_t inputs, int64_t first,
                  int64_t ranks, float *lowered) {
  if (kind == SWARM_BFLOAT16)
    lower_of_kind(SWARM_BFLOAT16, adapter, x, inputs, first, ranks, lowered);
  else
    lower_of_kind(SWARM_FLOAT32, adapter, x, inputs, first, ranks, lowered);
}

/* A row's adapter, as far as it adds to this product; NULL if it does not. */
INLINE const SwarmAdapter *adapter_of(const SwarmAdapted *all, int64_t row) {
  if (all == NULL || all->which[row] < 0) return NULL;
  const SwarmAdapter *adapter = &all->adapters[all->which[row]][all->slot];
  return adapter->rank > 0 ? adapter : NULL;
}

/* Fetch what adapters add to some groups of outputs, which no processor foresees. */
static void fetch_groups(const SwarmAdapted *all, int64_t first_row, int64_t rows, int64_t kind, int64_t first,
                         int64_t count) {
  const SwarmAdapter *before = NULL;
  const int64_t bytes = 16 * (kind == SWARM_BFLOAT16 ? 2 : 4);
  for (int64_t row = first_row; all != NULL && row < first_row + rows; row++) {
    const SwarmAdapter *adapter = adapter_of(all, row);
    if (adapter == NULL || adapter == before) continue;
    const SwarmRanks last = adapter->groups[first + count - 1];
    const char *stop = (const char *)adapter->up + (last.at + last.count) * bytes;
    for (const char *at = (const char *)adapter->up + adapter->groups[first].at * bytes; at < stop; at += 64)
      fetch_far(at);
    before = adapter;
  }
}

/* Sixteen outputs of a row with what its adapter adds to them. */
INLINE vec with_adapter(int kind, const SwarmAdapter *adapter, const float *lowered, int64_t group, vec sum) {
  const SwarmRanks ranks = adapter->groups[group];
  if (ranks.count == 0) return sum;
  vec added = v_set(0.0f);
  for (int64_t i = 0; i < ranks.count; i++)
    added = v_fma(load_number(kind, adapter->up, (ranks.at + i) * 16, 16), v_set(lowered[ranks.first + i]), added);
  return v_add(sum, added);
}

#endif
