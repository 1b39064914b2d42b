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

/* The rows as they are, or a copy of them; `at` is NULL if there is no memory for it. */
static Operand operand_of(int kind, const void *x, int64_t stride, int64_t rows, int64_t inputs) {
  int64_t given = kind == SWARM_BFLOAT16 ? 2 : 4, size = MULTIPLIES_PAIRS(kind) ? given : 4;
  if (size == given && inputs % 2 == 0) return (Operand){x, stride, size};
  int64_t padded = (inputs + 1) / 2 * 2;
  char *copy = swarm_scratch(SWARM_OPERANDS, rows * padded * size + 64);
  if (copy == NULL) return (Operand){NULL, 0, 0};
  for (int64_t row = 0; row < rows; row++) {
    char *to = copy + row * padded * size;
    const char *from = (const char *)x + row * stride * given;
    if (size == given)
      memcpy(to, from, (size_t)(inputs * size));
    else
      widen_row((float *)to, (const uint16_t *)from, inputs);
    if (padded > inputs) memset(to + inputs * size, 0, (size_t)size);
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

#endif
