/*
 * Rows times a block of a quantized matrix. For each output: the sum over a group of inputs, of the codes' values times
 * the row, by the same tiles as a plain matrix's; then that times the group's scale is added to what was before it, and
 * the minimum times the sum of the row's inputs is subtracted. One order whatever the number of rows, so a row's bits
 * depend on the row alone.
 *
 * Codes are decoded into a segment that stays in the first-level cache, which all rows of the piece multiply.
 */
#ifndef SWARM_QUANTIZED_H
#define SWARM_QUANTIZED_H

#include "../counting.h"
#include "codes.h"
#include "operands.h"
#include "scales.h"

#define SEGMENT_INPUTS 128 /* decoded at a time: 16 KiB */
#define SEGMENT_GROUPS 8   /* the most groups that these are */
#define CHUNK_ROWS 32
#ifndef BYTES_AHEAD
#define BYTES_AHEAD 8192   /* of what is decoded */
#endif

/* What all blocks of a product have in common. */
typedef struct {
  const SwarmFormat *format;
  SwarmLayout layout;
  Values values;
  const float *row_sums; /* [row][group]: of each row's inputs; NULL where there are no minima */
} Quantized;

/* Where one thread works. */
typedef struct {
  uint16_t weights[3 * SEGMENT_INPUTS / 2 * PAIR_OF_BLOCK]; /* a segment, or three groups */
  Factors factors[SEGMENT_GROUPS];
  float parts[2 * CHUNK_ROWS * WIDTH]; /* with many rows: two batches of groups, half as many outputs (chunks_amx.h) */
} Bench;

/* A block's way through memory: `after` is what the same thread reads next, or NULL. */
typedef struct {
  const char *block, *after;
} Stream;

static const char *codes_of_group(const Quantized *job, Stream stream, int64_t group) {
  return stream.block + job->layout.nested + group * job->layout.group;
}

/* What is fetched while what lies at `from` is decoded. */
static const char *ahead_of(const Quantized *job, Stream stream, const char *from) {
  const char *end = stream.block + job->layout.block, *ahead = from + BYTES_AHEAD;
  return ahead >= end && stream.after != NULL ? stream.after + (ahead - end) : ahead;
}

static void decode_group(const Quantized *job, Stream stream, int64_t group, uint16_t *to, Factors *factors) {
  const SwarmLayout *layout = &job->layout;
  const char *from = codes_of_group(job, stream, group), *ahead = ahead_of(job, stream, from);
  decode_codes((int)job->format->codes, &job->values, from, job->format->group, to, ahead);
  for (int64_t at = layout->codes; at < layout->group; at += LINE) fetch_far(ahead + at);
  load_factors(job->format, layout, stream.block, group, factors);
}

/* Add a group's parts to the sums. */
INLINE void add_parts(const float *parts, const Factors *factors, int64_t rows, float *sums, int first,
                      const float *row_sums, int64_t groups) {
  vec scale[4], minimum[4];
  for (int v = 0; v < 4; v++) {
    scale[v] = v_load(factors->scales + v * 16);
    minimum[v] = row_sums == NULL ? v_set(0.0f) : v_load(factors->minima + v * 16);
  }
  for (int64_t row = 0; row < rows; row++) {
    for (int v = 0; v < 4; v++) {
      vec sum = first ? v_set(0.0f) : v_load(sums + row * WIDTH + v * 16);
      sum = v_fma(v_load(parts + row * WIDTH + v * 16), scale[v], sum);
      if (row_sums != NULL) sum = v_fnma(minimum[v], v_set(row_sums[row * groups]), sum);
      v_store(sums + row * WIDTH + v * 16, sum);
    }
  }
}

/* Rows times a decoded group. */
INLINE void multiply_group(int kind, const Quantized *job, const uint16_t *weights, const Factors *factors, int64_t group,
                           Operand x, int64_t first, int64_t rows, float *parts, float *sums) {
  Piece piece = {(const char *)weights, PAIR_OF_BLOCK * 2, job->format->group / 2, WIDTH / 16, 1};
  const float *row_sums = job->row_sums == NULL ? NULL : job->row_sums + first * job->layout.groups + group;
  multiply_decoded(kind, piece, operand_at(x, first, group * job->format->group), rows, (Sums){parts, WIDTH, 1});
  add_parts(parts, factors, rows, sums, group == 0, row_sums, job->layout.groups);
}

#ifdef DECODE_LEAD
#include "stream_amx.h"
#include "chunks_amx.h"
#endif
#ifdef FUSED_ROWS
#include "fused.h"
#endif

/* Rows `first` and on times a block: `sums` are [rows][64]. 0, or -1 if there is no memory to work in. */
static int multiply_quantized(int kind, const Quantized *job, Stream stream, Operand x, int64_t first, int64_t rows,
                              float *sums) {
  Bench *bench = swarm_scratch(SWARM_DECODED, sizeof *bench);
  if (bench == NULL) return -1;
  int64_t size = job->format->group, groups = job->layout.groups, at_once = SEGMENT_INPUTS / size;
#ifdef DECODE_LEAD
  if (MULTIPLIES_PAIRS(kind) && rows <= TILE_PAIRS) {
    const float *row_sums = job->row_sums == NULL ? NULL : job->row_sums + first * groups;
    Streamed all = {job, stream, (const uint16_t *)x.at + first * x.stride, x.stride, rows, row_sums, sums};
    stream_tiles(&all, bench);
    return 0;
  }
#endif
#ifdef FUSED_ROWS
  if (rows <= FUSED_ROWS) {
    FUSED[job->format->codes][rows - 1](!MULTIPLIES_PAIRS(kind), job, stream, x, first, sums);
    return 0;
  }
#endif
  for (int64_t group = 0; group < groups; group += at_once) {
    int64_t count = least(at_once, groups - group);
    for (int64_t i = 0; i < count; i++)
      decode_group(job, stream, group + i, bench->weights + i * size / 2 * PAIR_OF_BLOCK, &bench->factors[i]);
#ifdef DECODE_LEAD
    if (MULTIPLIES_PAIRS(kind)) {
      Decoded all = {job, bench->weights, bench->factors, group, count,
                     (const uint16_t *)x.at + first * x.stride + group * size, x.stride,
                     job->row_sums == NULL ? NULL : job->row_sums + first * groups + group, sums};
      multiply_segment(&all, rows, bench->parts);
      continue;
    }
#endif
    for (int64_t row = 0; row < rows; row += CHUNK_ROWS) {
      for (int64_t i = 0; i < count; i++)
        multiply_group(kind, job, bench->weights + i * size / 2 * PAIR_OF_BLOCK, &bench->factors[i], group + i, x,
                       first + row, least(CHUNK_ROWS, rows - row), bench->parts, sums + row * WIDTH);
    }
  }
  return 0;
}

/* The sum of each row's inputs over each group: sixteen sums side by side, then halves onto each other. */
static void sum_groups(Operand x, int64_t rows, int64_t groups, int64_t size, float *to) {
  for (int64_t row = 0; row < rows; row++) {
    for (int64_t group = 0; group < groups; group++) {
      const void *from = operand_at(x, row, group * size).at;
      vec sum = v_set(0.0f);
      for (int64_t at = 0; at < size; at += 16)
        sum = v_add(sum, x.size == 2 ? v_load_bf16((const uint16_t *)from + at) : v_load((const float *)from + at));
      to[row * groups + group] = sum_of(sum);
    }
  }
}

/* The job's parts that all matrices of a call share. 0, or -1 if there is no memory to work in. */
static int prepare_quantized(const SwarmFormat *format, int64_t inputs, Operand x, int64_t rows, Quantized *job) {
  *job = (Quantized){format, swarm_layout(format, inputs), values_of(format), NULL};
  if (format->minima == SWARM_NO_MINIMA) return 0;
  float *sums = swarm_scratch(SWARM_ROW_SUMS, rows * job->layout.groups * (int64_t)sizeof(float));
  if (sums == NULL) return -1;
  sum_groups(x, rows, job->layout.groups, format->group, sums);
  job->row_sums = sums;
  return 0;
}

#endif
