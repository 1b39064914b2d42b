#ifndef SWARM_EXPERTS_H
#define SWARM_EXPERTS_H

#include "kernels.h"

/* A layer's experts: `inner` and `down` are one matrix for each. */
typedef struct {
  const SwarmMatrix *router; /* NULL: the caller chooses */
  const SwarmMatrix *inner, *down;
  int64_t experts, choices;
  int64_t normed, rounded; /* how a router's choices are weighed: see SwarmKernels.route */
} SwarmExperts;

/*
 * Rows through the experts that each goes to, weighed and added. `chosen` and `weights`: the choices of each row; not
 * read where there is a router. A number that no expert has is left out. `out` may be `x`. 0, or -1 if there was no memory to work in.
 */
int swarm_mix(const SwarmExperts *all, const SwarmRows *rows, int64_t num_rows, const int32_t *chosen,
              const float *weights, int threads);

#endif
