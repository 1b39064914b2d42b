#ifndef SWARM_PROOF_H
#define SWARM_PROOF_H

#include "kernels.h"

/* Does the variant compute? NULL, or what is wrong with it. */
const char *swarm_prove(const SwarmKernels *variant, const SwarmKernels *portable);

#endif
