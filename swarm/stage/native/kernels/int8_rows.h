/*
 * Rows rounded to int8, for quantized matrices: each group of a row's inputs gets one scale, its greatest magnitude
 * divided by 127, and whole numbers between -127 and 127, rounded half to even. Sums of products with codes are then
 * whole numbers, which have no order, so every processor gets the same bits.
 *
 * A group with a number that is not finite has the scale NaN, which reaches all outputs of the row.
 */
#ifndef SWARM_INT8_ROWS_H
#define SWARM_INT8_ROWS_H

#include <limits.h>
#include <math.h>
#include <string.h>

#include "../counting.h"
#include "../halves.h"
#include "../pool.h"
#include "../simd/functions.h"
#include "numbers.h"

#define MOST_IN_GROUP 128
#define ROWS_OF_A_PIECE 16 /* that a thread prepares at a time */

/*
 * How the codes of a format are multiplied: as bytes between 0 and `largest`, less `subtracted` if the variant multiplies
 * signed codes; `offset` times the sum of a row's group is then taken off. A table's values are doubled and moved up, so
 * that they are whole numbers from 0 on.
 */
typedef struct {
  int64_t kind; /* SWARM_CODES4 … SWARM_CODES8 */
  int largest, subtracted, offset, has_table;
  uint8_t table[16];
} Int8Codes;

/* Prepared rows. `values` are padded by zeros to whole groups, in the order of the packed codes. */
typedef struct {
  Int8Codes codes;
  int8_t *values;  /* [row][stride]; NULL: there was no memory */
  float *scales;   /* [row][groups]; half of a group's scale if the table's values are doubled */
  float *sums;     /* [row][groups]: scale times the sum of the group's whole numbers */
  int32_t *wholes; /* [row][groups]: `offset` of the codes times that sum */
  int64_t stride, groups, group, inputs, has_minima;
} Int8Rows;

/* The values of a table of whole numbers and halves. Where they simply count up, codes are multiplied as they are. */
static void double_table(const uint16_t *table, Int8Codes *codes) {
  int doubled[16], low = INT_MAX, high = INT_MIN, counts = 1;
  for (int i = 0; i < 16; i++) {
    doubled[i] = (int)(swarm_widen_bf16(table[i]) * 2.0f);
    low = doubled[i] < low ? doubled[i] : low;
    high = doubled[i] > high ? doubled[i] : high;
    if (doubled[i] != doubled[0] + 2 * i) counts = 0;
  }
  if (counts && low % 2 == 0) {
    codes->offset = -low / 2;
    return;
  }
  codes->has_table = 1, codes->largest = high - low, codes->offset = -low;
  for (int i = 0; i < 16; i++) codes->table[i] = (uint8_t)(doubled[i] - low);
}

static Int8Codes int8_codes_of(const SwarmFormat *format) {
  static const int largest[] = {[SWARM_CODES4] = 15, [SWARM_CODES5] = 31, [SWARM_CODES6] = 63, [SWARM_CODES8] = 255};
  Int8Codes codes = {.kind = format->codes, .largest = largest[format->codes], .offset = (int)format->offset};
  if (format->codes == SWARM_CODES4) double_table(format->table, &codes);
  codes.subtracted = SIGNED_CODES(codes.largest) ? 128 : 0;
  codes.offset -= codes.subtracted;
  return codes;
}

INLINE float wide_number(int kind, const void *from, int64_t at) {
  return kind == SWARM_FLOAT32 ? ((const float *)from)[at] : swarm_widen_bf16(((const uint16_t *)from)[at]);
}

/* A group of a row as float32, 0 beyond its last number; the greatest magnitude, or NaN if one is not finite. */
INLINE float load_group(int kind, const void *x, const int32_t *order, int64_t begin, int64_t count, int64_t vectors,
                        vec *values) {
  vec none = v_set(0.0f), top = none, lost = none;
  float gathered[MOST_IN_GROUP];
  if (order != NULL)
    for (int64_t i = 0; i < count; i++) gathered[i] = wide_number(kind, x, order[begin + i]);
  for (int64_t v = 0; v < vectors; v++) {
    values[v] = order != NULL ? load_number(SWARM_FLOAT32, gathered, 16 * v, count - 16 * v)
                              : load_number(kind, x, begin + 16 * v, count - 16 * v);
    lost = v_fma(values[v], none, lost); /* 0, and NaN once anything wasn't finite */
    top = v_max(v_max(values[v], v_sub(none, values[v])), top);
  }
  return m_bits(m_equal(lost, none)) == 0xffff ? greatest_of(top) : NAN;
}

INLINE float total_of(vec x) {
  float lanes[16], total = 0.0f;
  v_to_array(x, lanes);
  for (int i = 0; i < 16; i++) total += lanes[i]; /* whole numbers: exact */
  return total;
}

INLINE void round_row(const Int8Rows *to, int64_t row, int kind, const void *x, const int32_t *order) {
  int64_t vectors = to->group / 16;
  for (int64_t group = 0; group < to->groups; group++) {
    int64_t begin = group * to->group, at = row * to->groups + group;
    vec values[MOST_IN_GROUP / 16], sum = v_set(0.0f);
    float top = load_group(kind, x, order, begin, least(to->group, to->inputs - begin), vectors, values);
    float scale = top / 127.0f; /* 0 also where the greatest magnitude is the smallest of all numbers */
    for (int64_t v = 0; v < vectors; v++) {
      vec whole = v_set(0.0f);
      if (scale > 0.0f) /* the bounds matter where the scale is denormal, and so coarse */
        whole = v_max(v_min(v_round(v_div(values[v], v_set(scale))), v_set(127.0f)), v_set(-127.0f));
      v_store_quads(to->values + row * to->stride + begin + 16 * v, whole);
      sum = v_add(sum, whole);
    }
    float total = total_of(sum);
    to->scales[at] = to->codes.has_table ? scale * 0.5f : scale;
    to->sums[at] = scale * total;
    to->wholes[at] = (int32_t)total * to->codes.offset;
  }
}

typedef struct {
  const Int8Rows *to;
  const SwarmMatrix *matrices;
  const int64_t *offsets;
  int64_t groups, stride;
  const char *x;
} Rounding;

static void round_rows(const void *argument, int64_t index, int64_t next) {
  const Rounding *job = argument;
  int kind = (int)job->matrices->kind;
  int64_t bytes = kind == SWARM_BFLOAT16 ? 2 : 4, last = least((index + 1) * ROWS_OF_A_PIECE, job->offsets[job->groups]);
  (void)next;
  for (int64_t row = index * ROWS_OF_A_PIECE; row < last; row++) {
    const SwarmMatrix *matrix = &job->matrices[owner_of(job->offsets, job->groups, row)];
    const char *x = job->x + row * job->stride * bytes;
    if (kind == SWARM_BFLOAT16)
      round_row(job->to, row, SWARM_BFLOAT16, x, matrix->format->order);
    else
      round_row(job->to, row, SWARM_FLOAT32, x, matrix->format->order);
  }
}

/* The rows of all matrices, offsets[g] up to offsets[g + 1] for matrix g. Its `values` are NULL if there is no memory. */
static Int8Rows int8_rows_of(const SwarmMatrix *matrices, const int64_t *offsets, int64_t groups, const SwarmRows *rows,
                             int threads) {
  const SwarmFormat *format = matrices->format;
  Int8Rows to = {.codes = int8_codes_of(format), .group = format->group, .inputs = matrices->inputs};
  to.has_minima = format->minima != SWARM_NO_MINIMA;
  int64_t count = offsets[groups];
  to.groups = (to.inputs + to.group - 1) / to.group;
  to.stride = (to.groups * to.group + 63) / 64 * 64;
  if (to.stride / 64 % 2 == 0) to.stride += 64; /* rows side by side shall not share the places of a cache */
  int64_t bytes = (to.stride + to.groups * 12) * count;
  char *memory = swarm_scratch(SWARM_INT8_ROWS, bytes + 64);
  if (memory == NULL) return to;
  to.values = (int8_t *)memory;
  to.scales = (float *)(memory + to.stride * count);
  to.sums = to.scales + to.groups * count;
  to.wholes = (int32_t *)(to.sums + to.groups * count);
  Rounding job = {&to, matrices, offsets, groups, rows->stride, rows->x};
  swarm_share(round_rows, &job, (count + ROWS_OF_A_PIECE - 1) / ROWS_OF_A_PIECE, threads);
  return to;
}

#endif
