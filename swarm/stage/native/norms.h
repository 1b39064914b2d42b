#ifndef SWARM_NORMS_H
#define SWARM_NORMS_H

#include <stdint.h>

/* out[row] = x[row] / rms(x[row]) * weight, for rows that lie one after the other. */
void swarm_rms_norm(const uint16_t *x, const uint16_t *weight, float epsilon, int64_t rows, int64_t size,
                    uint16_t *out);

#endif
