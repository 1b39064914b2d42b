#ifndef SWARM_PRODUCTS_H
#define SWARM_PRODUCTS_H

#include <stdint.h>

enum { SWARM_LINEAR, SWARM_SILU, SWARM_GELU_TANH };

/* A packed matrix. With a function: outputs of gate and gated side by side, 32 of each in turn. */
typedef struct {
  const uint16_t *packed;
  const float *bias; /* NULL: none. Only for SWARM_LINEAR. */
  int64_t outputs;   /* a gated matrix has two for each one that it gives */
  int64_t inputs;    /* an even number */
  int64_t function;
} SwarmMatrix;

/*
 * out[row] = matrix × x[row], or function(gate × x[row]) * (up × x[row]). Strides count elements.
 * 0, or -1 if there was no memory for the sums: then `out` holds nothing of use.
 */
int swarm_linear(const SwarmMatrix *matrix, const uint16_t *x, int64_t stride, int64_t rows, uint16_t *out,
                  int64_t out_stride, int threads);

#endif
