/* Functions of products, and of numbers that lie anywhere. */
#ifndef SWARM_ACTIVATIONS_H
#define SWARM_ACTIVATIONS_H

#include "numbers.h"

INLINE vec activated(int64_t function, float limit, vec x) {
  switch (function) {
    case SWARM_SILU: return silu(x);
    case SWARM_GELU_TANH: return gelu_tanh(x);
    case SWARM_GELU: return gelu(x);
    case SWARM_RELU: return relu(x);
    case SWARM_RELU_SQUARED: return v_mul(relu(x), relu(x));
    case SWARM_SIGMOID: return sigmoid(x);
    case SWARM_TANH: return tangent(x);
    case SWARM_QUICK_GELU: return quick_gelu(x);
    case SWARM_SOFTCAP: return v_mul(v_set(limit), tangent(v_div(x, v_set(limit))));
    case SWARM_EXP: return exponential(x);
    case SWARM_SOFTPLUS: return softplus(x);
    default: return x;
  }
}

/* A bound comes first in min and max, so that a NaN, the second one, stays. */
INLINE vec gated(const SwarmMatrix *matrix, vec gate, vec up) {
  if (matrix->function != SWARM_CLAMPED) return v_mul(activated(matrix->function, matrix->limit, gate), up);
  gate = v_min(v_set(matrix->limit), gate);
  up = v_min(v_set(matrix->limit), v_max(v_set(-matrix->limit), up));
  vec glu = v_mul(gate, sigmoid(v_mul(v_set(matrix->alpha), gate)));
  return v_mul(v_add(up, v_set(1.0f)), glu);
}

static void activate(int64_t number, int64_t function, const void *x, void *out, int64_t count) {
  int kind = (int)number;
  for (int64_t at = 0; at < count; at += 16)
    store_number(kind, out, at, activated(function, 1.0f, load_number(kind, x, at, count - at)), count - at);
}

static void add_numbers(int64_t number, const void *a, const void *b, void *out, int64_t count) {
  int kind = (int)number;
  for (int64_t at = 0; at < count; at += 16) {
    vec sum = v_add(load_number(kind, a, at, count - at), load_number(kind, b, at, count - at));
    store_number(kind, out, at, sum, count - at);
  }
}

#endif
