/* A few threads that share one piece of work after another. */
#ifndef SWARM_POOL_H
#define SWARM_POOL_H

#include <stdint.h>

/* Does piece number `index` of a job. `next` is the piece that the same thread does afterwards, or -1. */
typedef void (*swarm_piece)(const void *job, int64_t index, int64_t next);

/*
 * Do pieces 0 … count-1 of a job by up to `threads` threads, the caller among them, and return when all are done.
 * Which thread does which piece is left to chance, so a piece's result must not depend on it. A caller who finds the
 * helpers busy with another one's job works alone.
 */
void swarm_share(swarm_piece piece, const void *job, int64_t count, int threads);

/* What scratch memory is for. Pieces may use what a job's caller doesn't hold: the caller does pieces, too. */
enum {
  SWARM_SUMS,
  SWARM_OPERANDS,
  SWARM_COUNTS,
  SWARM_SCORES,
  SWARM_PARTS,
  SWARM_MIXED,
  SWARM_DECODED,
  SWARM_ROW_SUMS,
  SWARM_ORDERED,
  SWARM_INT8_ROWS,
  SWARM_LOWERED,
  SWARM_USES
};

/*
 * This thread's scratch memory of at least `bytes` for a use, aligned to a page; NULL if there is none to be had. What
 * it held is lost when it is asked for more.
 */
void *swarm_scratch(int use, int64_t bytes);

#endif
