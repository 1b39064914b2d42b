/*
 * What rows mix of values, weight by weight: the softmax of attention, taken along the positions.
 *
 * Each row has a bound that its weights are relative to, the sum of the weights, and the values mixed by them. The
 * bound rises when a score lies above it by more than SLACK, and then what was summed so far shrinks. Scores are
 * logarithms to the base 2, since such powers are cheap.
 */
#ifndef SWARM_MIXTURES_H
#define SWARM_MIXTURES_H

#include <string.h>

#include "cache.h"

#define ROWS_AT_ONCE 48 /* rows of a piece of work: few enough that what they need stays in the nearest caches */
#define SLACK 10.0f     /* so weights are 1,024 at most: far from overflowing, and the bound seldom rises */
#define LOG2E 1.4426950408889634
#define NOTHING -1e30f  /* the bound before anything was seen; infinity minus itself would be no number */

/* What rows have summed up over some positions. */
typedef struct {
  float *bounds; /* [row] */
  float *sums;   /* [row][16]: of the weights, by position within sixteen */
  float *mixed;  /* [row][padded size of a value] */
} Mixture;

/*
 * 2 to the x, for x up to 127: of a whole number, times a polynomial of what is left, good to 2e-7; 1 for 0. From -127
 * on it is 0, whose bits are those of an exponent of 0. NaN, the second argument of v_max, stays.
 */
INLINE vec power_of_two(vec x) {
  vec in = v_max(v_set(-127.0f), x), n = v_round(in), rest = v_sub(in, n);
  vec sum = v_set(0.0013264728f);
  sum = v_fma(sum, rest, v_set(0.009671513f));
  sum = v_fma(sum, rest, v_set(0.055507336f));
  sum = v_fma(sum, rest, v_set(0.24022242f));
  sum = v_fma(sum, rest, v_set(0.693147f));
  sum = v_fma(sum, rest, v_set(1.0f));
  return v_mul(sum, v_power(n));
}

static int64_t floats_of_mixture(const SwarmCache *cache) { return ROWS_AT_ONCE * (1 + 16 + value_elements(cache)); }

static Mixture mixture_at(float *at) { return (Mixture){at, at + ROWS_AT_ONCE, at + 17 * ROWS_AT_ONCE}; }

static void begin(Mixture *mixture, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; row++) mixture->bounds[row] = NOTHING;
  memset(mixture->sums, 0, (size_t)(rows * 16) * sizeof(float));
  memset(mixture->mixed, 0, (size_t)(rows * size) * sizeof(float));
}

INLINE void shrink(float *numbers, int64_t count, vec factor) {
  for (int64_t at = 0; at < count; at += 16) v_store(numbers + at, v_mul(v_load(numbers + at), factor));
}

INLINE void shrink_and_add(float *numbers, vec factor, const float *others, vec others_factor, int64_t count) {
  for (int64_t at = 0; at < count; at += 16)
    v_store(numbers + at, v_fma(v_load(others + at), others_factor, v_mul(v_load(numbers + at), factor)));
}

/* Add what a later stretch has. */
static void merge(Mixture *whole, const Mixture *part, int64_t rows, int64_t size) {
  for (int64_t row = 0; row < rows; row++) {
    float mine = whole->bounds[row], other = part->bounds[row], bound = mine > other ? mine : other;
    vec factor = power_of_two(v_set(mine - bound)), others_factor = power_of_two(v_set(other - bound));
    whole->bounds[row] = bound;
    shrink_and_add(whole->sums + row * 16, factor, part->sums + row * 16, others_factor, 16);
    shrink_and_add(whole->mixed + row * size, factor, part->mixed + row * size, others_factor, size);
  }
}

/* The bound rises to the greatest score: what was summed so far shrinks. */
static void raise_bound(Mixture *mixture, int64_t row, int64_t size, vec top) {
  float bound = greatest_of(top);
  vec factor = power_of_two(v_set(mixture->bounds[row] - bound));
  mixture->bounds[row] = bound;
  shrink(mixture->sums + row * 16, 16, factor);
  shrink(mixture->mixed + row * size, size, factor);
}

#endif
