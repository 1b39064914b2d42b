/*
 * Quantization of plain weights: the same numbers, operations and order as quantization/quantize.py, which explains them.
 * The groups of a tile lie side by side, so that each operation is one on whole vectors; the compiler makes them.
 */
#include <math.h>

#include "../counting.h"
#include "../halves.h"
#include "../pool.h"

enum { Q_LANES = 16, Q_MOST = 128, Q_TILES = 32 /* a thread does at a time */, Q_MIDDLE = 256 };

typedef float QuantizedGroups[Q_MOST][Q_LANES];

static float reciprocal(float x) {
  float result = 1.0f / x;
  return fabsf(result) <= 0x1.fffffep127f ? result : 0.0f;
}

/* Where a group of the matrix begins, and how many weights it has; 0 behind the last group. */
static int64_t find_group(const SwarmQuantization *job, int64_t number, int64_t *at) {
  int64_t groups = (job->inputs + job->group - 1) / job->group, row = number / groups;
  int64_t first = number % groups * job->group;
  *at = row * job->inputs + first;
  return row < job->rows ? least(job->group, job->inputs - first) : 0;
}

static void load_weights_of(const SwarmQuantization *job, int64_t number, int64_t lane, QuantizedGroups to) {
  int64_t at, count = find_group(job, number, &at);
  if (job->kind == SWARM_BFLOAT16)
    for (int64_t i = 0; i < count; i++) to[i][lane] = swarm_widen_bf16(((const uint16_t *)job->weights)[at + i]);
  else
    for (int64_t i = 0; i < count; i++) to[i][lane] = ((const float *)job->weights)[at + i];
  for (int64_t i = count; i < job->group; i++) to[i][lane] = 0.0f;
}

static inline int32_t nearest_index(float weight, float factor) {
  float number = weight * factor + (Q_MIDDLE + 0.5f);
  number = number > 0.0f ? number : 0.0f;
  return (int32_t)(number < 2 * Q_MIDDLE - 1 ? number : 2 * Q_MIDDLE - 1);
}

/* The weight of the largest magnitude of each group. A group that is not finite becomes zeros. */
static void find_largest(int64_t group, QuantizedGroups weights, float largest[Q_LANES], int32_t finite[Q_LANES]) {
  float high[Q_LANES], low[Q_LANES];
  for (int l = 0; l < Q_LANES; l++) high[l] = low[l] = weights[0][l], finite[l] = 1;
  for (int64_t i = 0; i < group; i++)
    for (int l = 0; l < Q_LANES; l++) {
      float weight = weights[i][l];
      high[l] = weight > high[l] ? weight : high[l];
      low[l] = weight < low[l] ? weight : low[l];
      finite[l] &= fabsf(weight) <= 0x1.fffffep127f;
    }
  for (int l = 0; l < Q_LANES; l++) {
    float most = high[l] >= -low[l] ? high[l] : low[l];
    largest[l] = finite[l] && fabsf(most) >= SWARM_LEAST_QUANTIZED ? most : 0.0f;
    if (!finite[l])
      for (int64_t i = 0; i < group; i++) weights[i][l] = 0.0f;
  }
}

/* One trial: keep its scale where it leaves less error than those before it. */
static void try_scale(const SwarmQuantization *job, QuantizedGroups weights, const float factors[Q_LANES],
                      float scales[Q_LANES], float best[Q_LANES]) {
  QuantizedGroups products;
  float length[Q_LANES] = {0};
  const float *values = job->values;
  for (int64_t i = 0; i < job->group; i++)
    for (int l = 0; l < Q_LANES; l++) {
      float value = values[nearest_index(weights[i][l], factors[l])];
      products[i][l] = value * weights[i][l];
      length[l] += value * value; /* whole numbers below 2^24: exact in any order */
    }
  for (int64_t half = job->group / 2; half > 0; half /= 2)
    for (int64_t i = 0; i < half; i++)
      for (int l = 0; l < Q_LANES; l++) products[i][l] += products[i + half][l];
  for (int l = 0; l < Q_LANES; l++) {
    float along = products[0][l], scale = along * reciprocal(length[l]), gain = along * scale;
    scales[l] = gain > best[l] ? scale : scales[l];
    best[l] = gain > best[l] ? gain : best[l];
  }
}

static void quantize_tile(const SwarmQuantization *job, int64_t first) {
  QuantizedGroups weights;
  int32_t indices[Q_MOST][Q_LANES], finite[Q_LANES];
  float largest[Q_LANES], factors[Q_LANES], scales[Q_LANES] = {0}, best[Q_LANES] = {0};
  uint16_t stored[Q_LANES];
  for (int lane = 0; lane < Q_LANES; lane++) load_weights_of(job, first + lane, lane, weights);
  find_largest(job->group, weights, largest, finite);
  for (int64_t trial = 0; trial < job->num_trials; trial++) {
    for (int l = 0; l < Q_LANES; l++) factors[l] = reciprocal(largest[l]) * job->trials[trial];
    try_scale(job, weights, factors, scales, best);
  }
  for (int l = 0; l < Q_LANES; l++) {
    stored[l] = finite[l] ? swarm_narrow_f16(scales[l] / job->step) : 0x7e00;
    factors[l] = reciprocal(swarm_widen_f16(stored[l]) * job->step);
  }
  for (int64_t i = 0; i < job->group; i++)
    for (int l = 0; l < Q_LANES; l++) indices[i][l] = nearest_index(weights[i][l], factors[l]);
  for (int lane = 0; lane < Q_LANES; lane++) {
    int64_t at, count = find_group(job, first + lane, &at);
    if (count == 0) break;
    for (int64_t i = 0; i < count; i++) job->codes[at + i] = job->grid[indices[i][lane]];
    job->scales[first + lane] = stored[lane];
  }
}

static void quantize_tiles(const void *argument, int64_t index, int64_t next) {
  const SwarmQuantization *job = argument;
  int64_t total = job->rows * ((job->inputs + job->group - 1) / job->group), first = index * Q_TILES * Q_LANES;
  (void)next;
  for (int64_t at = first; at < least(total, first + Q_TILES * Q_LANES); at += Q_LANES) quantize_tile(job, at);
}

static void quantize(const SwarmQuantization *job, int threads) {
  int64_t total = job->rows * ((job->inputs + job->group - 1) / job->group), size = Q_TILES * Q_LANES;
  swarm_share(quantize_tiles, job, (total + size - 1) / size, threads);
}
