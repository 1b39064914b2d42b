/* What all of the library counts with. */
#ifndef SWARM_COUNTING_H
#define SWARM_COUNTING_H

#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Whose piece this is: the last of `count` that has no more pieces before its own. */
static inline int64_t owner_of(const int64_t *before, int64_t count, int64_t piece) {
  int64_t low = 0, high = count;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (before[middle] <= piece)
      low = middle;
    else
      high = middle;
  }
  return low;
}

/* Experts in the order of their numbers, and what goes with each. */
static inline void sort_by_number(int32_t *chosen, float *values, int64_t choices) {
  for (int64_t i = 1; i < choices; i++) {
    int32_t expert = chosen[i];
    float value = values[i];
    int64_t at = i;
    for (; at > 0 && chosen[at - 1] > expert; at--) chosen[at] = chosen[at - 1], values[at] = values[at - 1];
    chosen[at] = expert, values[at] = value;
  }
}

#endif
