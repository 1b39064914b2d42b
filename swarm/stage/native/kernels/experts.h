/* Which experts a row goes to, and the sum of what they answer: both of the row alone. */
#ifndef SWARM_EXPERTS_KERNELS_H
#define SWARM_EXPERTS_KERNELS_H

#include "../counting.h"
#include "numbers.h"

INLINE int among(const int32_t *chosen, int64_t count, int32_t number) {
  for (int64_t i = 0; i < count; i++)
    if (chosen[i] == number) return 1;
  return 0;
}

/* The best of the experts that are not chosen yet, the lowest number among equals. NaN is no better than anything. */
static void choose_next(int kind, const void *logits, int64_t from, int64_t experts, int64_t done, int32_t *chosen,
                        float *values) {
  int32_t best = -1;
  for (int64_t first = 0; first < experts; first += 16) {
    float lanes[16];
    v_to_array(load_number(kind, logits, from + first, experts - first), lanes);
    for (int64_t at = first; at < experts && at < first + 16; at++) {
      int better = best < 0 || lanes[at - first] > values[done];
      if (better && !among(chosen, done, (int32_t)at)) best = (int32_t)at, values[done] = lanes[at - first];
    }
  }
  chosen[done] = best;
}

INLINE float exponential_of(float x) {
  float lanes[16];
  v_to_array(exponential(v_set(x)), lanes);
  return lanes[0];
}

/* The sum of e to the power of every logit over the greatest one. */
static float sum_of_powers(int kind, const void *logits, int64_t from, int64_t experts, float greatest) {
  vec sum = v_set(0.0f);
  for (int64_t at = 0; at < experts; at += 16) {
    vec powers = exponential(v_sub(load_number(kind, logits, from + at, experts - at), v_set(greatest)));
    sum = v_add(sum, experts - at < 16 ? only_first(powers, experts - at) : powers);
  }
  return sum_of(sum);
}

static void route(int64_t number, const void *logits, int64_t stride, int64_t num_rows, int64_t experts,
                  int64_t choices, int64_t normed, int64_t rounded, int32_t *chosen, float *weights) {
  int kind = (int)number;
  for (int64_t row = 0; row < num_rows; row++, chosen += choices, weights += choices) {
    for (int64_t i = 0; i < choices; i++) choose_next(kind, logits, row * stride, experts, i, chosen, weights);
    float greatest = weights[0], sum = 0.0f;
    sort_by_number(chosen, weights, choices);
    for (int64_t i = 0; i < choices; i++) {
      weights[i] = exponential_of(weights[i] - greatest);
      sum += weights[i];
    }
    if (!normed) sum = sum_of_powers(kind, logits, row * stride, experts, greatest);
    for (int64_t i = 0; i < choices; i++) {
      float lanes[16];
      v_to_array(rounded_to(rounded ? kind : SWARM_FLOAT32, v_set(weights[i] / sum)), lanes);
      weights[i] = lanes[0];
    }
  }
}

static void combine(int64_t number, const SwarmRows *answers, const int64_t *slots, const float *weights,
                    int64_t choices, int64_t num_rows, int64_t size) {
  int kind = (int)number;
  for (int64_t row = 0; row < num_rows; row++, slots += choices, weights += choices) {
    for (int64_t at = 0; at < size; at += 16) {
      vec sum = v_set(0.0f);
      for (int64_t i = 0; i < choices; i++) {
        if (slots[i] < 0) continue;
        vec answer = load_number(kind, answers->x, slots[i] * answers->stride + at, size - at);
        sum = v_fma(answer, v_set(weights[i]), sum);
      }
      store_number(kind, answers->out, row * answers->out_stride + at, sum, size - at);
    }
  }
}

#endif
