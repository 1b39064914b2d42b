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

/* The rows that multiply a block, and where the sums go: [row][64]. */
typedef struct {
  Operand x;             /* the first row's inputs */
  const float *row_sums; /* the first row's, or NULL */
  int64_t rows;
  float *sums;
} BlockRows;

/* Where one thread works. Few rows (stream_amx.h) use it in their own way. */
typedef struct {
  uint16_t weights[SEGMENT_INPUTS / 2 * PAIR_OF_BLOCK];
  Factors factors[SEGMENT_GROUPS];
  float parts[2 * CHUNK_ROWS * WIDTH]; /* with many rows: two batches of groups, half as many outputs (chunks_amx.h) */
  uint16_t lines[3 * 16 * 32]; /* rows of some steps (stream_amx.h) */
} Bench;

/* Some decoded groups, one after the other. */
typedef struct {
  const Quantized *job;
  const uint16_t *weights;
  const Factors *factors;
  int64_t group, count; /* number of the first; how many there are */
} Segment;

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
INLINE void add_parts(const float *parts, const FactorVectors *factors, int64_t rows, float *sums, int first,
                      const float *row_sums, int64_t groups) {
  for (int64_t row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {
      vec sum = first ? v_set(0.0f) : v_load(sums + row * WIDTH + v * 16);
      sum = v_fma(v_load(parts + row * WIDTH + v * 16), factors->scale[v], sum);
      if (row_sums != NULL) sum = v_fnma(factors->minimum[v], v_set(row_sums[row * groups]), sum);
      v_store(sums + row * WIDTH + v * 16, sum);
    }
  }
}

/* Rows times decoded groups, some rows at a time. */
static void multiply_groups(int kind, const Segment *from, const BlockRows *to, float *parts) {
  const Quantized *job = from->job;
  const int64_t size = job->format->group, groups = job->layout.groups, has_minima = to->row_sums != NULL;
  for (int64_t row = 0; row < to->rows; row += CHUNK_ROWS) {
    int64_t rows = least(CHUNK_ROWS, to->rows - row);
    for (int64_t i = 0; i < from->count; i++) {
      int64_t group = from->group + i;
      Piece piece = {(const char *)(from->weights + i * size / 2 * PAIR_OF_BLOCK), PAIR_OF_BLOCK * 2, size / 2,
                     WIDTH / 16, 1};
      FactorVectors factors = loaded_factors(&from->factors[i], (int)has_minima);
      multiply_decoded(kind, piece, operand_at(to->x, row, group * size), rows, (Sums){parts, WIDTH, 1});
      add_parts(parts, &factors, rows, to->sums + row * WIDTH, group == 0,
                has_minima ? to->row_sums + row * groups + group : NULL, groups);
    }
  }
}

#ifdef TILES_FOR_QUANTIZED
#include "stream_amx.h"
#include "chunks_amx.h"
#endif
#ifdef FUSED_ROWS
#include "fused.h"
#endif

/* Few rows times a block, in a way of their own; 0 if the variant has none for them. */
static int multiply_few(int kind, const Quantized *job, Stream stream, const BlockRows *to, Bench *bench) {
  (void)kind, (void)job, (void)stream, (void)to, (void)bench;
#ifdef TILES_FOR_QUANTIZED
  if (MULTIPLIES_PAIRS(kind)) return stream_tiles(job, stream, to, bench);
#endif
#ifdef FUSED_ROWS
  return multiply_fused(kind, job, stream, to);
#else
  return 0;
#endif
}

static void multiply_segment(int kind, const Segment *from, const BlockRows *to, float *parts) {
#ifdef TILES_FOR_QUANTIZED
  if (MULTIPLIES_PAIRS(kind)) {
    multiply_batches(from, to, parts);
    return;
  }
#endif
  multiply_groups(kind, from, to, parts);
}

/* Rows `first` and on times a block: `sums` are [rows][64]. 0, or -1 if there is no memory to work in. */
static int multiply_quantized(int kind, const Quantized *job, Stream stream, Operand x, int64_t first, int64_t rows,
                              float *sums) {
  Bench *bench = swarm_scratch(SWARM_DECODED, sizeof *bench);
  if (bench == NULL) return -1;
  const int64_t size = job->format->group, groups = job->layout.groups, at_once = SEGMENT_INPUTS / size;
  const float *row_sums = job->row_sums == NULL ? NULL : job->row_sums + first * groups;
  BlockRows to = {operand_at(x, first, 0), row_sums, rows, sums};
  if (multiply_few(kind, job, stream, &to, bench)) return 0;
  for (int64_t group = 0; group < groups; group += at_once) {
    Segment segment = {job, bench->weights, bench->factors, group, least(at_once, groups - group)};
    for (int64_t i = 0; i < segment.count; i++)
      decode_group(job, stream, group + i, bench->weights + i * size / 2 * PAIR_OF_BLOCK, &bench->factors[i]);
    multiply_segment(kind, &segment, &to, bench->parts);
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
