#ifndef SWARM_PACKING_H
#define SWARM_PACKING_H

#include "kernels.h"

/* A quantized matrix that is not packed: one after the other, the numbers of each output. */
typedef struct {
  const uint8_t *codes;        /* [output][input] */
  const void *scales;          /* [output][group], of the format's kind; nested: float16 [output][super-group] */
  const void *minima;          /* the same of minima: float16, or uint8 */
  const int8_t *group_scales;  /* [output][group], if scales are nested */
  const uint8_t *group_minima; /* [output][group], if minima are nested */
  int64_t outputs;
} SwarmNumbers;

/*
 * Pack a matrix as kernels.h describes. Two of them, of the same shape, become one that is gated: half of each block's
 * outputs are of the first. A group with an E4M3 code that is not a number gets a scale that isn't one either.
 */
void swarm_pack(const SwarmFormat *format, const SwarmNumbers *numbers, int64_t count, int64_t inputs, void *packed,
                int threads);

/* Rows of a packed matrix, not gated: out = weights of each of these outputs, [id][input], rounded once to `kind`. */
void swarm_lookup(const SwarmMatrix *matrix, const int64_t *ids, int64_t count, int64_t kind, void *out, int threads);

#endif
