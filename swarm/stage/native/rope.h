#ifndef SWARM_ROPE_H
#define SWARM_ROPE_H

#include <stdint.h>

/*
 * Turn the first `heads` heads of every token by its position. Tokens are `stride` elements apart, heads lie one after
 * the other, and `cosines` and `sines` hold `size` numbers for each token.
 */
void swarm_turn(uint16_t *rows, int64_t stride, int64_t tokens, int64_t heads, int64_t size, const uint16_t *cosines,
                const uint16_t *sines);

#endif
