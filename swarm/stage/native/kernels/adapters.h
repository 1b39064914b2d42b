/* What adapters of low rank add to products. A row's sums are in one order, whatever other rows there are. */
#ifndef SWARM_ADAPTERS_KERNEL_H
#define SWARM_ADAPTERS_KERNEL_H

#include <stddef.h>

#include "numbers.h"
#include "tiles.h"

/* Sums that are computed at once, so that what is read serves several, and no sum waits for itself. */
#define RANKS_AT_ONCE 4
#define ADAPTED_ROWS 4
#define ADAPTED_GROUPS 2

INLINE void lower_some(int kind, const SwarmAdapter *adapter, const SwarmRows *rows, const int32_t *listed,
                       int num_listed, int64_t inputs, int64_t rank, int count) {
  const int64_t bytes = kind == SWARM_BFLOAT16 ? 2 : 4;
  const char *x[ADAPTED_ROWS] = {0};
  vec numbers[ADAPTED_ROWS], sums[ADAPTED_ROWS][RANKS_AT_ONCE];
  _Pragma("GCC unroll 4") for (int row = 0; row < ADAPTED_ROWS; row++) {
    numbers[row] = v_set(0.0f); /* gcc does not see that the rest is not read */
    _Pragma("GCC unroll 4") for (int i = 0; i < RANKS_AT_ONCE; i++) sums[row][i] = v_set(0.0f);
  }
  _Pragma("GCC unroll 4") for (int row = 0; row < num_listed; row++)
    x[row] = (const char *)rows->x + listed[row] * rows->stride * bytes;
  for (int64_t at = 0; at < inputs; at += 16) {
    _Pragma("GCC unroll 4") for (int row = 0; row < num_listed; row++)
      numbers[row] = load_number(kind, x[row], at, inputs - at);
    for (int i = 0; i < count && at % 32 == 0; i++) /* the next ranks' */
      fetch_far((const char *)adapter->down + ((rank + count + i) * inputs + at) * bytes);
    _Pragma("GCC unroll 4") for (int i = 0; i < count; i++) {
      vec down = load_number(kind, adapter->down, (rank + i) * inputs + at, inputs - at);
      _Pragma("GCC unroll 4") for (int row = 0; row < num_listed; row++)
        sums[row][i] = v_fma(numbers[row], down, sums[row][i]);
    }
  }
  _Pragma("GCC unroll 4") for (int row = 0; row < num_listed; row++) {
    float *lowered = rows->adapted->lowered + listed[row] * rows->adapted->stride + rank;
    _Pragma("GCC unroll 4") for (int i = 0; i < count; i++)
      lowered[i] = adapter->scales[rank + i] * sum_of(sums[row][i]);
  }
}

INLINE void lower_rows(int kind, const SwarmAdapter *adapter, const SwarmRows *rows, const int32_t *listed,
                       int num_listed, int64_t inputs, int64_t first, int64_t ranks) {
  int64_t stop = first + ranks;
  for (; first + RANKS_AT_ONCE <= stop; first += RANKS_AT_ONCE)
    lower_some(kind, adapter, rows, listed, num_listed, inputs, first, RANKS_AT_ONCE);
  for (; first < stop; first++) lower_some(kind, adapter, rows, listed, num_listed, inputs, first, 1);
}

INLINE void lower_of_kind(int kind, const SwarmAdapter *adapter, const SwarmRows *rows, const int32_t *listed,
                          int64_t num_listed, int64_t inputs, int64_t first, int64_t ranks) {
  for (; num_listed >= ADAPTED_ROWS; num_listed -= ADAPTED_ROWS, listed += ADAPTED_ROWS)
    lower_rows(kind, adapter, rows, listed, ADAPTED_ROWS, inputs, first, ranks);
  for (; num_listed >= 2; num_listed -= 2, listed += 2)
    lower_rows(kind, adapter, rows, listed, 2, inputs, first, ranks);
  if (num_listed > 0) lower_rows(kind, adapter, rows, listed, 1, inputs, first, ranks);
}

static void lower(int64_t kind, const SwarmAdapter *adapter, const SwarmRows *rows, const int32_t *listed,
                  int64_t num_listed, int64_t inputs, int64_t first, int64_t ranks) {
  if (kind == SWARM_BFLOAT16)
    lower_of_kind(SWARM_BFLOAT16, adapter, rows, listed, num_listed, inputs, first, ranks);
  else
    lower_of_kind(SWARM_FLOAT32, adapter, rows, listed, num_listed, inputs, first, ranks);
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

/* Add to groups of sixteen outputs of rows, 64 apart. The groups' ranks are the same, and follow each other. */
INLINE void raise_some(int kind, const SwarmAdapter *adapter, const float *lowered, int64_t stride, int64_t group,
                       int num_groups, float *sums, int num_rows) {
  const SwarmRanks ranks = adapter->groups[group];
  vec added[ADAPTED_ROWS][ADAPTED_GROUPS];
  _Pragma("GCC unroll 4") for (int row = 0; row < num_rows; row++)
    _Pragma("GCC unroll 2") for (int i = 0; i < num_groups; i++) added[row][i] = v_set(0.0f);
  for (int64_t rank = 0; rank < ranks.count; rank++)
    _Pragma("GCC unroll 2") for (int i = 0; i < num_groups; i++) {
      vec up = load_number(kind, adapter->up, (ranks.at + i * ranks.count + rank) * 16, 16);
      _Pragma("GCC unroll 4") for (int row = 0; row < num_rows; row++)
        added[row][i] = v_fma(up, v_set(lowered[row * stride + ranks.first + rank]), added[row][i]);
    }
  _Pragma("GCC unroll 4") for (int row = 0; row < num_rows; row++)
    _Pragma("GCC unroll 2") for (int i = 0; i < num_groups; i++) {
      float *sum = sums + row * WIDTH + i * 16;
      v_store(sum, v_add(v_load(sum), added[row][i]));
    }
}

INLINE void raise_groups(int kind, const SwarmAdapter *adapter, const float *lowered, int64_t stride, int64_t group,
                         int num_groups, float *sums, int64_t num_rows) {
  for (; num_rows >= ADAPTED_ROWS; num_rows -= ADAPTED_ROWS) {
    raise_some(kind, adapter, lowered, stride, group, num_groups, sums, ADAPTED_ROWS);
    lowered += ADAPTED_ROWS * stride, sums += ADAPTED_ROWS * WIDTH;
  }
  for (; num_rows > 0; num_rows--) {
    raise_some(kind, adapter, lowered, stride, group, num_groups, sums, 1);
    lowered += stride, sums += WIDTH;
  }
}

/* Add to `num_groups` groups of rows with the same adapter. */
INLINE void raise_rows(int kind, const SwarmAdapter *adapter, const float *lowered, int64_t stride, int64_t group,
                       int64_t num_groups, float *sums, int64_t num_rows) {
  for (int64_t taken; num_groups > 0; group += taken, num_groups -= taken, sums += taken * 16) {
    const SwarmRanks ranks = adapter->groups[group], next = num_groups > 1 ? adapter->groups[group + 1] : ranks;
    taken = next.first == ranks.first && next.count == ranks.count && next.at == ranks.at + ranks.count ? 2 : 1;
    if (ranks.count == 0 && next.count == 0) continue;
    if (taken == 2)
      raise_groups(kind, adapter, lowered, stride, group, 2, sums, num_rows);
    else
      raise_groups(kind, adapter, lowered, stride, group, 1, sums, num_rows);
  }
}

/* The groups of outputs that a block's columns stand for: `count` from `first` on, and of a gated block, whose second
 * half begins in the middle, from `second` on. */
typedef struct {
  int64_t first, second, count;
} BlockGroups;

/* Add what adapters make of a block's rows, from `first_row` on, to their sums. */
static void add_adapters(const SwarmAdapted *all, int64_t kind, BlockGroups block, int64_t first_row, int64_t num_rows,
                         float *sums) {
  for (int64_t row = 0, run; all != NULL && row < num_rows; row += run) {
    const SwarmAdapter *adapter = adapter_of(all, first_row + row);
    for (run = 1; row + run < num_rows && all->which[first_row + row + run] == all->which[first_row + row];) run++;
    if (adapter == NULL) continue;
    const float *lowered = all->lowered + (first_row + row) * all->stride;
    float *mine = sums + row * WIDTH;
    for (int half = 0; half < (block.second < 0 ? 1 : 2); half++, mine += WIDTH / 2) {
      const int64_t group = half == 0 ? block.first : block.second;
      if (kind == SWARM_BFLOAT16)
        raise_rows(SWARM_BFLOAT16, adapter, lowered, all->stride, group, block.count, mine, run);
      else
        raise_rows(SWARM_FLOAT32, adapter, lowered, all->stride, group, block.count, mine, run);
    }
  }
}

#endif
