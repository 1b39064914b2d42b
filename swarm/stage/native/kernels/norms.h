/* Norms of rows. Sums of squares are of sixteen lanes, then of the lanes, in one order on every processor. */
#ifndef SWARM_NORMS_H
#define SWARM_NORMS_H

#include <stddef.h>

#include "numbers.h"

static float sum_of_squares(int kind, const void *x, int64_t at, int64_t size, float mean) {
  vec sum = v_set(0.0f), middle = v_set(mean);
  for (int64_t done = 0; done < size; done += 16) {
    vec some = v_sub(load_number(kind, x, at + done, size - done), middle);
    if (size - done < 16 && mean != 0.0f) some = only_first(some, size - done);
    sum = v_fma(some, some, sum);
  }
  return sum_of(sum);
}

static void rms_norm(int64_t number, const SwarmRows *rows, int64_t num_rows, int64_t count, int64_t size,
                     const float *weight, float epsilon, int64_t rounded) {
  int kind = (int)number;
  for (int64_t index = 0; index < num_rows * count; index++) {
    int64_t from = index / count * rows->stride + index % count * size;
    int64_t to = index / count * rows->out_stride + index % count * size;
    float mean = sum_of_squares(kind, rows->x, from, size, 0.0f) / (float)size;
    vec inverse = v_set(1.0f / __builtin_sqrtf(mean + epsilon));
    for (int64_t at = 0; at < size; at += 16) {
      vec scaled = v_mul(load_number(kind, rows->x, from + at, size - at), inverse);
      if (rounded) scaled = rounded_to(kind, scaled);
      store_number(kind, rows->out, to + at, v_mul(scaled, v_load_some(weight + at, size - at)), size - at);
    }
  }
}

static void layer_norm(int64_t number, const SwarmRows *rows, int64_t num_rows, int64_t size, const float *weight,
                       const float *bias, float epsilon) {
  int kind = (int)number;
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t from = row * rows->stride, to = row * rows->out_stride;
    vec sum = v_set(0.0f);
    for (int64_t at = 0; at < size; at += 16) sum = v_add(sum, load_number(kind, rows->x, from + at, size - at));
    float mean = sum_of(sum) / (float)size;
    float variance = sum_of_squares(kind, rows->x, from, size, mean) / (float)size;
    vec inverse = v_set(1.0f / __builtin_sqrtf(variance + epsilon)), middle = v_set(mean);
    for (int64_t at = 0; at < size; at += 16) {
      vec scaled = v_mul(v_sub(load_number(kind, rows->x, from + at, size - at), middle), inverse);
      vec added = bias == NULL ? v_set(0.0f) : v_load_some(bias + at, size - at);
      store_number(kind, rows->out, to + at, v_fma(scaled, v_load_some(weight + at, size - at), added), size - at);
    }
  }
}

#endif
