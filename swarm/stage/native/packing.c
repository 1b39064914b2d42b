/* Quantized matrices into the memory that kernels read, and single rows out of it. */
#include "packing.h"

#include <math.h>
#include <string.h>

#include "counting.h"
#include "halves.h"
#include "layout.h"
#include "pool.h"

enum { WIDTH = 64, QUAD = 4, EIGHT = 8, LINE = 64, MOST_GROUP = 128 };
static const int PLACES[QUAD] = {0, 2, 1, 3}; /* where an input of a quad is among four bytes; also what is there */

typedef struct {
  const SwarmFormat *format;
  SwarmLayout layout;
  const SwarmNumbers *numbers;
  int64_t count, inputs;
  uint8_t *packed;
} Packing;

/* Where an output of a block comes from; `numbers` is NULL if there is none. */
typedef struct {
  const SwarmNumbers *numbers;
  int64_t output;
} Source;

static Source source_of(const Packing *job, int64_t block, int64_t lane) {
  int64_t width = WIDTH / job->count, output = block * width + lane % width;
  const SwarmNumbers *numbers = &job->numbers[lane / width];
  return (Source){output < numbers->outputs ? numbers : NULL, output};
}

/* Codes of a block and group, `[output][input]`. */
typedef uint8_t Codes[WIDTH][MOST_GROUP];

static void collect_codes(const Packing *job, int64_t block, int64_t group, Codes codes) {
  int64_t size = job->format->group, first = group * size, count = least(size, job->inputs - first);
  memset(codes, (int)job->format->offset, sizeof(Codes));
  for (int64_t lane = 0; lane < WIDTH; lane++) {
    Source from = source_of(job, block, lane);
    if (from.numbers != NULL)
      memcpy(codes[lane], from.numbers->codes + from.output * job->inputs + first, (size_t)count);
  }
}

/* One byte for each of sixteen outputs and four inputs. */
static void put_bytes(Codes codes, int64_t input, int vector, uint8_t *line) {
  for (int lane = 0; lane < 16; lane++)
    for (int i = 0; i < QUAD; i++) line[lane * QUAD + PLACES[i]] = codes[vector * 16 + lane][input + i];
}

/* Bits `from` and on of the bytes of four lines, side by side. */
static void put_bits(uint8_t lines[4][LINE], int from, int mask, int width, int at, uint8_t *to) {
  for (int vector = 0; vector < 4; vector++)
    for (int i = 0; i < LINE; i++) to[i] |= (uint8_t)((lines[vector][i] >> from & mask) << (at + width * vector));
}

static uint8_t *put_eight(int64_t kind, Codes codes, int64_t input, uint8_t *to) {
  uint8_t lines[2][4][LINE];
  for (int quad = 0; quad < 2; quad++)
    for (int vector = 0; vector < 4; vector++) put_bytes(codes, input + quad * QUAD, vector, lines[quad][vector]);
  if (kind == SWARM_CODES8 || kind == SWARM_FLOATS8) {
    memcpy(to, lines, sizeof lines);
    return to + sizeof lines;
  }
  for (int quad = 0; quad < 2; quad++)
    for (int half = 0; half < 2; half++, to += LINE)
      for (int i = 0; i < LINE; i++)
        to[i] = (uint8_t)((lines[quad][2 * half][i] & 15) | lines[quad][2 * half + 1][i] << 4);
  if (kind == SWARM_CODES4) return to;
  int num_lines = kind == SWARM_CODES5 ? 1 : 2;
  memset(to, 0, (size_t)num_lines * LINE);
  for (int quad = 0; quad < 2; quad++) {
    if (kind == SWARM_CODES5)
      put_bits(lines[quad], 4, 1, 1, 4 * quad, to);
    else
      put_bits(lines[quad], 4, 3, 2, 0, to + quad * LINE);
  }
  return to + num_lines * LINE;
}

static int has_nan(const Packing *job, const uint8_t *codes) {
  if (job->format->codes != SWARM_FLOATS8) return 0;
  for (int64_t i = 0; i < job->format->group; i++)
    if ((codes[i] & 0x7f) == 0x7f) return 1;
  return 0;
}

/* A number of `size` bytes of an output, or 0. */
static void put_number(uint8_t *to, int64_t lane, int64_t size, Source from, const void *numbers, int64_t columns,
                       int64_t column) {
  if (from.numbers == NULL)
    memset(to + lane * size, 0, (size_t)size);
  else
    memcpy(to + lane * size, (const uint8_t *)numbers + (from.output * columns + column) * size, (size_t)size);
}

static void put_factors(const Packing *job, int64_t block, int64_t group, Codes codes, uint8_t *to) {
  static const uint32_t nans[] = {0x7e00, 0x7fc0, 0x7fc00000};
  const SwarmFormat *format = job->format;
  int64_t groups = job->layout.groups, scale = job->layout.scales / WIDTH;
  int64_t minimum = (job->layout.group - job->layout.codes - job->layout.scales) / WIDTH;
  for (int64_t lane = 0; lane < WIDTH; lane++) {
    Source from = source_of(job, block, lane);
    const SwarmNumbers *numbers = from.numbers;
    const void *scales = numbers == NULL                          ? NULL
                         : format->scales == SWARM_SCALES_NESTED ? (const void *)numbers->group_scales
                                                                  : numbers->scales;
    put_number(to, lane, scale, from, scales, groups, group);
    if (format->scales != SWARM_SCALES_NESTED && has_nan(job, codes[lane]))
      memcpy(to + lane * scale, &nans[format->scales], (size_t)scale);
    if (minimum == 0) continue;
    const void *minima = numbers == NULL                          ? NULL
                         : format->minima == SWARM_MINIMA_NESTED ? (const void *)numbers->group_minima
                                                                  : numbers->minima;
    put_number(to + job->layout.scales, lane, minimum, from, minima, groups, group);
    if (numbers == NULL && format->minima == SWARM_ZERO_POINTS)
      to[job->layout.scales + lane] = (uint8_t)format->offset;
  }
}

static void put_nested(const Packing *job, int64_t block, uint8_t *to) {
  int64_t supers = (job->inputs + SUPER_GROUP - 1) / SUPER_GROUP;
  for (int64_t super = 0; super < supers; super++) {
    for (int part = 0; part < 2; part++) {
      if (part == 0 ? job->format->scales != SWARM_SCALES_NESTED : job->format->minima != SWARM_MINIMA_NESTED) continue;
      for (int64_t lane = 0; lane < WIDTH; lane++) {
        Source from = source_of(job, block, lane);
        const void *numbers = from.numbers == NULL ? NULL : part == 0 ? from.numbers->scales : from.numbers->minima;
        put_number(to, lane, 2, from, numbers, supers, super);
      }
      to += 2 * WIDTH;
    }
  }
}

static void pack_block(const void *argument, int64_t block, int64_t next) {
  const Packing *job = argument;
  uint8_t *to = job->packed + block * job->layout.block;
  Codes codes;
  (void)next;
  put_nested(job, block, to);
  to += job->layout.nested;
  for (int64_t group = 0; group < job->layout.groups; group++, to += job->layout.group) {
    uint8_t *line = to;
    collect_codes(job, block, group, codes);
    for (int64_t input = 0; input < job->format->group; input += EIGHT)
      line = put_eight(job->format->codes, codes, input, line);
    put_factors(job, block, group, codes, to + job->layout.codes);
  }
}

void swarm_pack(const SwarmFormat *format, const SwarmNumbers *numbers, int64_t count, int64_t inputs, void *packed,
                int threads) {
  Packing job = {format, swarm_layout(format, inputs), numbers, count, inputs, packed};
  int64_t width = WIDTH / count;
  swarm_share(pack_block, &job, (numbers->outputs + width - 1) / width, threads);
}

/* The code of an output of a block, of an input of a group. */
static int code_at(int64_t kind, const uint8_t *group, int64_t lane, int64_t input) {
  int64_t quad = input % EIGHT / QUAD, vector = lane / 16, at = lane % 16 * QUAD + PLACES[input % QUAD];
  if (kind == SWARM_CODES8 || kind == SWARM_FLOATS8) return group[(input / QUAD * 4 + vector) * LINE + at];
  int64_t lines = kind == SWARM_CODES4 ? 4 : kind == SWARM_CODES5 ? 5 : 6;
  const uint8_t *eight = group + input / EIGHT * lines * LINE;
  int code = eight[(quad * 2 + vector / 2) * LINE + at] >> (vector % 2 * 4) & 15;
  if (kind == SWARM_CODES5) code |= (eight[4 * LINE + at] >> (4 * quad + vector) & 1) << 4;
  if (kind == SWARM_CODES6) code |= (eight[(4 + quad) * LINE + at] >> (2 * vector) & 3) << 4;
  return code;
}

static float value_of(const SwarmFormat *format, int code) {
  if (format->codes == SWARM_CODES4) return swarm_widen_bf16(format->table[code]);
  if (format->codes != SWARM_FLOATS8) return (float)(code - (int)format->offset);
  int size = code & 0x7f;
  float value = size < 8 ? (float)size * 0x1p-9f : swarm_widen_bf16((uint16_t)((size << 4) + 0x3c00));
  return code & 0x80 ? -value : value;
}

static float half_at(const void *from, int64_t at) { return swarm_widen_f16(((const uint16_t *)from)[at]); }

static float scale_at(const SwarmFormat *format, const uint8_t *from, const uint8_t *nested, int64_t lane) {
  if (format->scales == SWARM_SCALES_FLOAT16) return half_at(from, lane);
  if (format->scales == SWARM_SCALES_BFLOAT16) return swarm_widen_bf16(((const uint16_t *)(const void *)from)[lane]);
  if (format->scales == SWARM_SCALES_FLOAT32) return ((const float *)(const void *)from)[lane];
  return half_at(nested, lane) * (float)((const int8_t *)from)[lane];
}

static float minimum_at(const SwarmFormat *format, const uint8_t *from, const uint8_t *nested, int64_t lane,
                        float scale) {
  if (format->minima == SWARM_NO_MINIMA) return 0.0f;
  if (format->minima == SWARM_MINIMA_FLOAT16) return half_at(from, lane);
  if (format->minima == SWARM_ZERO_POINTS) return scale * ((float)from[lane] - (float)format->offset);
  return half_at(nested, lane) * (float)from[lane];
}

typedef struct {
  const SwarmMatrix *matrix;
  SwarmLayout layout;
  const int64_t *ids;
  int64_t kind;
  void *out;
} Lookup;

static void look_up(const void *argument, int64_t index, int64_t next) {
  const Lookup *job = argument;
  const SwarmFormat *format = job->matrix->format;
  const SwarmLayout *layout = &job->layout;
  int64_t id = job->ids[index], lane = id % WIDTH, inputs = job->matrix->inputs;
  const uint8_t *block = (const uint8_t *)job->matrix->packed + id / WIDTH * layout->block;
  (void)next;
  for (int64_t group = 0; group < layout->groups; group++) {
    const uint8_t *codes = block + layout->nested + group * layout->group, *factors = codes + layout->codes;
    const uint8_t *nested = block + group * format->group / SUPER_GROUP * layout->super;
    float scale = scale_at(format, factors, nested, lane);
    const uint8_t *nested_minima = nested + (format->scales == SWARM_SCALES_NESTED ? 2 * WIDTH : 0);
    float minimum = minimum_at(format, factors + layout->scales, nested_minima, lane, scale);
    for (int64_t i = 0; i < least(format->group, inputs - group * format->group); i++) {
      int64_t input = group * format->group + i, to = index * inputs + (format->order ? format->order[input] : input);
      float weight = fmaf(value_of(format, code_at(format->codes, codes, lane, i)), scale, -minimum);
      if (job->kind == SWARM_BFLOAT16)
        ((uint16_t *)job->out)[to] = swarm_narrow_bf16(weight);
      else
        ((float *)job->out)[to] = weight;
    }
  }
}

void swarm_lookup(const SwarmMatrix *matrix, const int64_t *ids, int64_t count, int64_t kind, void *out, int threads) {
  Lookup job = {matrix, swarm_layout(matrix->format, matrix->inputs), ids, kind, out};
  swarm_share(look_up, &job, count, threads);
}
