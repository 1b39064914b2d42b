/*
 * Rows in the form that the variant multiplies: widened to float32, or bfloat16 as they are where there are
 * instructions for it. Pairs are whole: a last input without a second one gets 0.
 */
#ifndef SWARM_OPERANDS_H
#define SWARM_OPERANDS_H

#include <stddef.h>
#include <string.h>

#include "../pool.h"
#include "tiles.h"

/* Does the variant multiply this kind's own pairs, without widening? Its header says so before this one. */
#ifndef MULTIPLIES_PAIRS
#define MULTIPLIES_PAIRS(kind) ((void)(kind), 0)
#endif

typedef struct {
  const void *at;
  int64_t stride; /* elements */
  int64_t size;   /* bytes of one */
} Operand;

INLINE int64_t pair_bytes(int64_t kind) { return WIDTH * 2 * (kind == SWARM_BFLOAT16 ? 2 : 4); }

INLINE Operand operand_at(Operand all, int64_t row, int64_t input) {
  all.at = (const char *)all.at + (row * all.stride + input) * all.size;
  return all;
}

static void widen_row(float *to, const uint16_t *from, int64_t count) {
  int64_t at = 0;
  for (; at + 16 <= count; at += 16) v_store(to + at, v_load_bf16(from + at));
  for (; at < count; at++) {
    uint32_t bits = (uint32_t)from[at] << 16;
    memcpy(to + at, &bits, sizeof bits);
  }
}

static void gather_row(char *to, const char *from, const int32_t *order, int64_t count, int64_t size) {
  for (int64_t at = 0; at < count; at++) memcpy(to + at * size, from + order[at] * size, (size_t)size);
}

/*
 * The rows as they are, or a copy of them: their inputs, in an order of their own if one is given, up to a multiple of
 * `whole` with zeros. `at` is NULL if there is no memory for it.
 */
static Operand operand_of(int kind, const SwarmRows *all, int64_t rows, int64_t inputs, int64_t whole,
                          const int32_t *order) {
  int64_t given = kind == SWARM_BFLOAT16 ? 2 : 4, size = MULTIPLIES_PAIRS(kind) ? given : 4;
  int64_t padded = (inputs + whole - 1) / whole * whole;
  if (size == given && padded == inputs && order == NULL) return (Operand){all->x, all->stride, size};
  char *ordered = order == NULL || size == given ? NULL : swarm_scratch(SWARM_ORDERED, inputs * given);
  char *copy = swarm_scratch(SWARM_OPERANDS, rows * padded * size + 64);
  if (copy == NULL || (ordered == NULL && order != NULL && size != given)) return (Operand){NULL, 0, 0};
  for (int64_t row = 0; row < rows; row++) {
    char *to = copy + row * padded * size;
    const char *from = (const char *)all->x + row * all->stride * given;
    if (order != NULL) {
      gather_row(ordered == NULL ? to : ordered, from, order, inputs, given);
      from = ordered;
    }
    if (size == given && order == NULL)
      memcpy(to, from, (size_t)(inputs * size));
    else if (size != given)
      widen_row((float *)to, (const uint16_t *)from, inputs);
    memset(to + inputs * size, 0, (size_t)((padded - inputs) * size));
  }
  return (Operand){copy, padded, size};
}

#ifndef MULTIPLY_PAIRS
#define MULTIPLY_PAIRS(...) ((void)0)
#endif
#ifndef STORE_PAIRS
#define STORE_PAIRS v_store_bf16
#endif

/* What the variant holds of the thread since it multiplied, it gives back here: at the end of every piece of work. */
#ifndef MULTIPLIED
#define MULTIPLIED() ((void)0)
#endif
INLINE void multiplied(void) { MULTIPLIED(); }

/* Rows of an operand times a piece of a matrix. */
INLINE void multiply(int kind, Piece piece, Operand x, int64_t rows, Sums sums, const char *ahead) {
  if (MULTIPLIES_PAIRS(kind))
    MULTIPLY_PAIRS(piece, (const uint16_t *)x.at, x.stride, rows, sums, ahead);
  else
    multiply_wide(kind, piece, x.at, x.stride, rows, sums, ahead);
}

/* Rows of a kind times a piece of bfloat16 in the cache. */
INLINE void multiply_decoded(int kind, Piece piece, Operand x, int64_t rows, Sums sums) {
  if (MULTIPLIES_PAIRS(kind))
    MULTIPLY_PAIRS(piece, (const uint16_t *)x.at, x.stride, rows, sums, NULL);
  else
    multiply_wide(SWARM_BFLOAT16, piece, x.at, x.stride, rows, sums, NULL);
}

#endif
