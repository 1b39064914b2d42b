/* Rotary positions: the two halves of every head turned against each other, in place. */
#ifndef SWARM_ROPE_H
#define SWARM_ROPE_H

#include "numbers.h"

/* The tables' numbers for the first half begin at `table`, those for the second one at `other`. */
static void turn_head(int kind, void *head, int64_t half, int wide, const void *cosines, const void *sines,
                      int64_t table, int64_t other) {
  for (int64_t at = 0; at < half; at += 16) {
    int64_t left = half - at;
    vec first = load_number(kind, head, at, left), second = load_number(kind, head, half + at, left);
    vec low = v_mul(second, load_number(wide, sines, table + at, left));
    vec high = v_mul(first, load_number(wide, sines, other + at, left));
    low = v_fma(first, load_number(wide, cosines, table + at, left), v_sub(v_set(0.0f), low));
    high = v_fma(second, load_number(wide, cosines, other + at, left), high);
    store_number(kind, head, at, low, left);
    store_number(kind, head, half + at, high, left);
  }
}

static void turn(int64_t number, void *rows, int64_t stride, int64_t num_rows, int64_t heads, int64_t size,
                 int64_t turned, const void *cosines, const void *sines, int64_t table, int64_t wide) {
  int kind = (int)number;
  int64_t bytes = kind == SWARM_BFLOAT16 ? 2 : 4;
  for (int64_t row = 0; row < num_rows; row++) {
    int64_t from = row * table, other = table == turned ? from + turned / 2 : from;
    for (int64_t head = 0; head < heads; head++)
      turn_head(kind, (char *)rows + (row * stride + head * size) * bytes, turned / 2, (int)wide, cosines, sines, from,
                other);
  }
}

#endif
