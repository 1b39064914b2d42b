/* Products of rows that have adapters. */
#ifndef SWARM_ADAPTERS_H
#define SWARM_ADAPTERS_H

#include "kernels.h"

/*
 * Rows times one matrix, with what the adapters of the rows add to it: product number `slot` of theirs. NULL: no row has
 * one. 0, or -1 if there was no memory to work in.
 */
int swarm_adapt(const SwarmMatrix *matrix, SwarmRows rows, int64_t num_rows, const SwarmAdapted *adapted, int64_t slot,
                int threads);

#endif
