/*
 * The weights of a row of logits, as whole numbers of units: e to the (score - largest) / temperature, between 0 and 1,
 * rounded to a multiple of 2^-36. So sums are exact, whatever their order, and what is selected by them is the same
 * whoever selects. A float32 holds each of these weights; block sums are of 64 bits.
 */
#ifndef SWARM_WEIGHTS_H
#define SWARM_WEIGHTS_H

#include <string.h>

#include "../counting.h"
#include "../pool.h"
#include "../simd/functions.h"
#include "numbers.h"

#define WORDS 1024 /* of a block: what its lanes sum stays exact in float32 */
#define BINS 1024

typedef uint32_t __attribute__((may_alias)) Bits; /* of a float32 that is not negative: in the order of the floats */

/* Where a row is worked on. */
typedef struct {
  int64_t words, blocks;
  float *weights;  /* [blocks][WORDS], 0 beyond the vocabulary */
  float *greatest; /* [blocks][16]: the greatest weights of a block's lanes */
  float *logits;   /* [blocks]: the largest of the model's logits in a block */
  float *scores;   /* [blocks]: the same of those that are drawn from */
  int64_t *sums;   /* [blocks]: the weights' sums, in units */
  uint64_t *bins;  /* [BINS][4] */
  float *some;     /* [blocks][WORDS], and sixteen more: weights that are looked at more closely */
} Desk;

typedef struct {
  vec coarse, fine;
} Exact;

INLINE float number_at(int kind, const void *from, int64_t at) {
  if (kind == SWARM_FLOAT32) return ((const float *)from)[at];
  Bits bits = (Bits)((const uint16_t *)from)[at] << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/* Sixteen numbers; `rest` for what there is not. */
INLINE vec numbers_or(int kind, const void *from, int64_t at, int64_t count, float rest) {
  float lanes[16];
  if (count >= 16) return load_number(kind, from, at, 16);
  v_store(lanes, v_set(rest));
  v_store_some(lanes, load_number(kind, from, at, count), count);
  return v_load(lanes);
}

/* The largest number of every block; returns whether all are finite. */
INLINE int survey_kind(int kind, const void *from, const Desk *desk, float *largest, float *copy) {
  vec none = v_set(0.0f), lost = none;
  for (int64_t block = 0; block < desk->blocks; block++) {
    int64_t begin = block * WORDS, count = least(WORDS, desk->words - begin);
    vec top = v_set(number_at(kind, from, begin));
    for (int64_t at = 0; at < count; at += 16) {
      vec x = numbers_or(kind, from, begin + at, count - at, number_at(kind, from, begin));
      if (copy != NULL) v_store(copy + begin + at, x);
      lost = v_fma(x, none, lost); /* 0, and NaN once anything wasn't finite */
      top = v_max(x, top);
    }
    largest[block] = greatest_of(top);
  }
  return m_bits(m_equal(lost, none)) == 0xffff;
}

static int survey(int kind, const void *from, const Desk *desk, float *largest, float *copy) {
  return kind == SWARM_BFLOAT16 ? survey_kind(SWARM_BFLOAT16, from, desk, largest, copy)
                                : survey_kind(SWARM_FLOAT32, from, desk, largest, copy);
}

static float largest_of(const float *numbers, int64_t count) {
  float largest = numbers[0];
  for (int64_t at = 1; at < count; at++) largest = numbers[at] > largest ? numbers[at] : largest;
  return largest;
}

/* e to the x, of x up to 0. Below -26 it is less than half a unit, so it doesn't matter how much. */
INLINE vec weight_of_word(vec x) {
  vec n, rest;
  x = v_max(x, v_set(-26.0f));
  n = v_round(v_mul(x, v_set(1.44269504f)));
  rest = v_fnma(n, v_set(0.693145752f), x);
  rest = v_fnma(n, v_set(1.42860677e-6f), rest);
  return v_mul(power_series(rest), v_power(n));
}

/*
 * Add sixteen weights and return them in whole units. Each has a coarse part, a multiple of 2^-17, and a fine one, of
 * 2^-36 and at most 2^-18. A lane adds 64 of either without rounding: that takes 24 bits each.
 */
INLINE vec add_units(Exact *sum, vec weight) {
  const vec to_coarse = v_set(0x1.8p6f), to_fine = v_set(0x1.8p-13f); /* 2^23 and half of it, times the multiple */
  vec coarse = v_sub(v_add(weight, to_coarse), to_coarse);
  vec fine = v_sub(v_add(v_sub(weight, coarse), to_fine), to_fine);
  sum->coarse = v_add(sum->coarse, coarse);
  sum->fine = v_add(sum->fine, fine);
  return v_add(coarse, fine);
}

static int64_t units_in(Exact sum) {
  float coarse[16], fine[16];
  double all = 0;
  v_to_array(sum.coarse, coarse);
  v_to_array(sum.fine, fine);
  for (int i = 0; i < 16; i++) all += (double)coarse[i] + (double)fine[i];
  return (int64_t)(all * 0x1p36);
}

static int64_t units_of(float weight) { return (int64_t)(weight * 0x1p36f); }

INLINE void weigh_kind(int kind, const void *from, const Desk *desk, float largest, float inverse, int keep) {
  const vec top = v_set(largest), scale = v_set(inverse);
  for (int64_t block = 0; block < desk->blocks; block++) {
    int64_t begin = block * WORDS, count = least(WORDS, desk->words - begin), at = 0;
    Exact sum = {v_set(0.0f), v_set(0.0f)};
    vec greatest = v_set(0.0f);
    for (; at < count; at += 16) {
      vec x = numbers_or(kind, from, begin + at, count - at, -INFINITY);
      vec weight = add_units(&sum, weight_of_word(v_mul(v_sub(x, top), scale)));
      if (keep) v_store(desk->weights + begin + at, weight);
      if (keep) greatest = v_max(weight, greatest);
    }
    desk->sums[block] = units_in(sum);
    if (!keep) continue;
    memset(desk->weights + begin + at, 0, (size_t)(WORDS - at) * sizeof(float));
    v_store(desk->greatest + block * 16, greatest);
  }
}

/* Weights of scores (which may lie where the weights will), of which this is the largest. */
static void weigh_words(int kind, const void *from, const Desk *desk, float largest, float inverse) {
  if (kind == SWARM_BFLOAT16)
    weigh_kind(SWARM_BFLOAT16, from, desk, largest, inverse, 1);
  else
    weigh_kind(SWARM_FLOAT32, from, desk, largest, inverse, 1);
}

/* The sums of the same weights alone, which is quicker. */
static void weigh_blocks(int kind, const void *from, const Desk *desk, float largest, float inverse) {
  if (kind == SWARM_BFLOAT16)
    weigh_kind(SWARM_BFLOAT16, from, desk, largest, inverse, 0);
  else
    weigh_kind(SWARM_FLOAT32, from, desk, largest, inverse, 0);
}

static int64_t sum_of_blocks(const Desk *desk) {
  int64_t sum = 0;
  for (int64_t block = 0; block < desk->blocks; block++) sum += desk->sums[block];
  return sum;
}

#endif
