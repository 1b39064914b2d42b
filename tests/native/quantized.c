/* Cases of quantized matrices: how they are packed, single weights out of them, and their products with all rows. */
#include <math.h>

#include "layout.h"
#include "material.h"
#include "packing.h"

#define LENGTH(array) ((int64_t)(sizeof(array) / sizeof *(array)))

enum { NUM_CODES = 5, NUM_SCALES = 4, NUM_MINIMA = 4, MOST_PARTS = 2 };
static const char *const CODES[] = {"codes4", "codes5", "codes6", "codes8", "floats8"};
static const char *const SCALES[] = {"float16", "bfloat16", "float32", "nested"};
static const char *const MINIMA[] = {"none", "float16", "zero-points", "nested"};
static const int64_t OFFSETS_OF_CODES[] = {8, 16, 32, 128, 0};
static const float E2M1[] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
static const int THREADS[] = {1, 3};

/* `doubled`: codes of four bits are E2M1 numbers, as MXFP4 has them. */
static SwarmFormat format_of(int64_t codes, int64_t scales, int64_t minima, int64_t group, int doubled) {
  SwarmFormat format = {.codes = codes, .scales = scales, .minima = minima, .group = group};
  if (!doubled && (minima == SWARM_NO_MINIMA || minima == SWARM_ZERO_POINTS)) format.offset = OFFSETS_OF_CODES[codes];
  for (int code = 0; code < 16; code++) {
    float value = doubled ? (code < 8 ? E2M1[code] : -E2M1[code - 8]) : (float)(code - (int)format.offset);
    put(SWARM_BFLOAT16, format.table, code, value);
  }
  return format;
}

static void label(char *name, size_t size, const SwarmFormat *format) {
  snprintf(name, size, "%s %s %s group=%" PRId64 " offset=%" PRId64, CODES[format->codes], SCALES[format->scales],
           MINIMA[format->minima], format->group, format->offset);
}

/* float16 from 2^-7 to 1 of both signs; one of 32 is 0 or subnormal. */
static void put_halves(uint16_t *to, int64_t count, Chance *chance) {
  for (int64_t at = 0; at < count; at++) {
    uint64_t bits = next_of(chance);
    uint64_t exponent = (bits >> 16) % 32 == 0 ? 0 : 8 + (bits >> 24) % 7;
    to[at] = (uint16_t)((bits & 0x83ff) | exponent << 10);
  }
}

static void *random_bytes(int64_t count, uint64_t most, Chance *chance) {
  uint8_t *all = room(count);
  for (int64_t at = 0; at < count; at++) all[at] = (uint8_t)(next_of(chance) % (most + 1));
  return all;
}

static SwarmNumbers numbers_of(const SwarmFormat *format, int64_t outputs, int64_t inputs, Chance *chance) {
  static const uint64_t MOST[] = {15, 31, 63, 255, 255};
  int64_t groups = outputs * ((inputs + format->group - 1) / format->group);
  int64_t supers = outputs * ((inputs + SUPER_GROUP - 1) / SUPER_GROUP);
  int is_nested = format->scales == SWARM_SCALES_NESTED;
  uint8_t *codes = random_bytes(outputs * inputs, MOST[format->codes], chance);
  for (int64_t at = 1; at < outputs * inputs && format->codes == SWARM_FLOATS8; at++) /* the first may be a NaN */
    if ((codes[at] & 0x7f) == 0x7f) codes[at]--;
  if (format->codes == SWARM_FLOATS8) codes[0] = 0xff;
  void *scales = room(4 * groups), *minima = NULL;
  if (format->scales == SWARM_SCALES_BFLOAT16 || format->scales == SWARM_SCALES_FLOAT32)
    for (int64_t at = 0; at < groups; at++)
      put(format->scales == SWARM_SCALES_FLOAT32 ? SWARM_FLOAT32 : SWARM_BFLOAT16, scales, at, uneven(chance));
  else
    put_halves(scales, is_nested ? supers : groups, chance);
  if (format->minima == SWARM_ZERO_POINTS)
    minima = random_bytes(groups, MOST[format->codes], chance);
  else if (format->minima != SWARM_NO_MINIMA)
    put_halves(minima = room(2 * groups), format->minima == SWARM_MINIMA_NESTED ? supers : groups, chance);
  return (SwarmNumbers){codes, scales, minima, is_nested ? random_bytes(groups, 255, chance) : NULL,
                        format->minima == SWARM_MINIMA_NESTED ? random_bytes(groups, 63, chance) : NULL, outputs};
}

static void free_numbers(SwarmNumbers numbers) {
  free((void *)numbers.codes), free((void *)numbers.scales), free((void *)numbers.minima);
  free((void *)numbers.group_scales), free((void *)numbers.group_minima);
}

/* Of `outputs` that the product gives: one matrix, or two that become a gated one. */
static SwarmMatrix quantized_of(const SwarmFormat *format, int kind, int64_t function, int64_t outputs, int64_t inputs,
                                Chance *chance) {
  int64_t parts = is_gated(function) ? 2 : 1, width = 64 / parts, blocks = (outputs + width - 1) / width;
  SwarmNumbers numbers[MOST_PARTS];
  void *packed = room(blocks * swarm_layout(format, inputs).block);
  for (int64_t part = 0; part < parts; part++) numbers[part] = numbers_of(format, outputs, inputs, chance);
  swarm_pack(format, numbers, parts, inputs, packed, 3);
  for (int64_t part = 0; part < parts; part++) free_numbers(numbers[part]);
  return (SwarmMatrix){.packed = packed, .outputs = parts * outputs, .inputs = inputs, .function = function,
                       .kind = kind, .alpha = 1.7f, .limit = 7.0f, .format = format};
}

/* Rows of ordinary numbers and some that int8 hardly holds: zeros, ties, one great number, tiny ones, and a NaN. */
static void *rows_of(int kind, int64_t rows, int64_t inputs, Chance *chance) {
  void *all = numbers(kind, rows * inputs, 3.0f, chance);
  for (int64_t at = 0; at < inputs; at++) {
    const float unlike[] = {0.0f, at % 16 ? (float)(at % 254) - 126.5f : 127.0f, at == inputs / 3 ? 3e4f : 0.01f,
                            (float)(at % 190) * 1e-45f, at % 2 ? 1e30f : -1e30f, at == 17 ? NAN : 1.0f};
    for (int64_t row = 0; row < LENGTH(unlike); row++)
      if (2 * row + 1 < rows) put(kind, all, (2 * row + 1) * inputs + at, unlike[row]);
  }
  return all;
}

/* All rows, by one thread and by three; then fewer of them, whose bits must be the same. */
static void product(const SwarmMatrix *matrix, const char *name, const void *x, int64_t rows, const int64_t *counts,
                    int64_t num_counts) {
  int kind = (int)matrix->kind;
  int64_t given = is_gated(matrix->function) ? matrix->outputs / 2 : matrix->outputs, size = bytes_of(kind);
  void *all = room(rows * given * size), *some = room(rows * given * size);
  for (int64_t t = 0; t < LENGTH(THREADS); t++) {
    const int64_t offsets[] = {0, rows};
    const SwarmRows whole = {x, matrix->inputs, all, given, NULL};
    if (swarm_kernels()->multiply(matrix, offsets, 1, &whole, THREADS[t])) abort();
    printf("%s %s %s threads=%d %016" PRIx64 "\n", matrix->format->int8_rows ? "int8" : "quantized", KIND_NAMES[kind],
           name, THREADS[t], hash_numbers(HASH_START, kind, all, rows * given));
  }
  for (int64_t at = 0; at < num_counts; at++) {
    int64_t first = rows - counts[at], count = counts[at] * given;
    const int64_t offsets[] = {0, counts[at]};
    const SwarmRows few = {(const char *)x + first * matrix->inputs * size, matrix->inputs, some, given, NULL};
    if (swarm_kernels()->multiply(matrix, offsets, 1, &few, 1)) abort();
    if (hash_numbers(HASH_START, kind, some, count) !=
        hash_numbers(HASH_START, kind, (const char *)all + first * given * size, count)) {
      fprintf(stderr, "%s: the last %" PRId64 " rows have other bits alone\n", name, counts[at]);
      exit(1);
    }
  }
  free(all), free(some);
}

/* What is packed, and all weights out of it. */
static void packing(const SwarmMatrix *matrix, const char *name) {
  int64_t bytes = (matrix->outputs + 63) / 64 * swarm_layout(matrix->format, matrix->inputs).block;
  printf("packed %s %016" PRIx64 "\n", name, hash_bytes(HASH_START, matrix->packed, bytes));
  if (is_gated(matrix->function)) return;
  int64_t *ids = room(matrix->outputs * (int64_t)sizeof *ids), count = matrix->outputs * matrix->inputs;
  for (int64_t at = 0; at < matrix->outputs; at++) ids[at] = matrix->outputs - 1 - at;
  void *out = room(4 * count);
  for (int kind = SWARM_FLOAT32; kind <= SWARM_BFLOAT16; kind++) {
    swarm_lookup(matrix, ids, matrix->outputs, kind, out, 3);
    printf("lookup %s %s %016" PRIx64 "\n", KIND_NAMES[kind], name, hash_numbers(HASH_START, kind, out, count));
  }
  free(ids), free(out);
}

/* Both ways of multiplying; rows of E4M3 codes are never rounded to int8. */
static void both(SwarmFormat *format, int kind, int64_t function, int64_t outputs, int64_t inputs, int64_t rows,
                 const int64_t *counts, int64_t num_counts) {
  char name[160];
  size_t length = sizeof name;
  Chance chance = chance_of((uint64_t)(format->codes * 4 + format->scales) * 4 + (uint64_t)format->minima);
  SwarmMatrix matrix = quantized_of(format, kind, function, outputs, inputs, &chance);
  void *x = rows_of(kind, rows, inputs, &chance);
  float *bias = numbers(SWARM_FLOAT32, (matrix.outputs + 63) / 64 * 64, 1.0f, &chance);
  if (format->group != 16) matrix.bias = bias;
  label(name, length, format);
  snprintf(name + strlen(name), length - strlen(name), " %" PRId64 "x%" PRId64 " function=%" PRId64 " order=%d", outputs,
           inputs, function, format->order != NULL);
  if (kind == SWARM_FLOAT32) packing(&matrix, name);
  for (format->int8_rows = 0; format->int8_rows <= (format->codes != SWARM_FLOATS8); format->int8_rows++)
    product(&matrix, name, x, rows, counts, num_counts);
  free((void *)matrix.packed), free(x), free(bias);
}

/* Each kind of codes, scales and minima, with groups of all sizes among them. */
static void every_format(int kind) {
  static const int64_t GROUPS[] = {16, 32, 64, 128}, COUNTS[] = {1, 4};
  for (int64_t codes = 0; codes < NUM_CODES; codes++)
    for (int64_t scales = 0; scales < NUM_SCALES; scales++)
      for (int64_t minima = 0; minima < NUM_MINIMA; minima++) {
        SwarmFormat format = format_of(codes, scales, minima, GROUPS[(codes + scales + minima) % 4], 0);
        both(&format, kind, SWARM_LINEAR, 37, 300, 17, COUNTS, LENGTH(COUNTS));
      }
}

/* Formats of files, at many numbers of rows. */
static void many_rows(int kind) {
  static const int64_t COUNTS[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 15, 16, 17, 31, 32, 33};
  SwarmFormat formats[] = {format_of(SWARM_CODES4, SWARM_SCALES_FLOAT16, SWARM_MINIMA_FLOAT16, 32, 0),
                           format_of(SWARM_CODES4, SWARM_SCALES_FLOAT32, SWARM_NO_MINIMA, 32, 1),
                           format_of(SWARM_CODES5, SWARM_SCALES_NESTED, SWARM_MINIMA_NESTED, 32, 0),
                           format_of(SWARM_CODES6, SWARM_SCALES_NESTED, SWARM_NO_MINIMA, 16, 0),
                           format_of(SWARM_CODES8, SWARM_SCALES_FLOAT16, SWARM_NO_MINIMA, 32, 0),
                           format_of(SWARM_FLOATS8, SWARM_SCALES_BFLOAT16, SWARM_NO_MINIMA, 128, 0)};
  for (int64_t at = 0; at < LENGTH(formats); at++)
    both(&formats[at], kind, SWARM_LINEAR, 70, 144, 65, COUNTS, LENGTH(COUNTS));
}

/* Gates, functions, and inputs in an order of their own. */
static void functions(int kind) {
  enum { INPUTS = 150 };
  static const int64_t FUNCTIONS[] = {SWARM_SILU, SWARM_GELU_TANH, SWARM_CLAMPED, SWARM_ALONE + SWARM_SOFTCAP}, COUNTS[] = {1, 5};
  int32_t order[INPUTS];
  for (int32_t at = 0; at < INPUTS; at++) order[at] = (at * 7 + 3) % INPUTS;
  for (int64_t at = 0; at < LENGTH(FUNCTIONS); at++) {
    SwarmFormat format = format_of(at, SWARM_SCALES_FLOAT16, at % 2 ? SWARM_NO_MINIMA : SWARM_ZERO_POINTS, 16, 0);
    format.order = at == 1 ? NULL : order;
    both(&format, kind, FUNCTIONS[at], 45, INPUTS, 19, COUNTS, LENGTH(COUNTS));
  }
}

/* Experts, some of them with no rows. */
static void experts(int kind, int int8_rows) {
  enum { EXPERTS = 4, OUTPUTS = 40, INPUTS = 96 };
  static const int64_t OFFSETS[] = {0, 3, 3, 4, 29};
  SwarmFormat format = format_of(SWARM_CODES4, SWARM_SCALES_FLOAT16, SWARM_NO_MINIMA, 32, 1);
  Chance chance = chance_of(5);
  SwarmMatrix matrices[EXPERTS];
  format.int8_rows = int8_rows;
  for (int at = 0; at < EXPERTS; at++) matrices[at] = quantized_of(&format, kind, SWARM_SILU, OUTPUTS, INPUTS, &chance);
  void *x = numbers(kind, OFFSETS[EXPERTS] * INPUTS, 1.0f, &chance);
  void *out = room(OFFSETS[EXPERTS] * OUTPUTS * bytes_of(kind));
  for (int64_t t = 0; t < LENGTH(THREADS); t++) {
    const SwarmRows rows = {x, INPUTS, out, OUTPUTS, NULL};
    if (swarm_kernels()->multiply(matrices, OFFSETS, EXPERTS, &rows, THREADS[t])) abort();
    printf("%s %s experts threads=%d %016" PRIx64 "\n", int8_rows ? "int8" : "quantized", KIND_NAMES[kind], THREADS[t],
           hash_numbers(HASH_START, kind, out, OFFSETS[EXPERTS] * OUTPUTS));
  }
  for (int at = 0; at < EXPERTS; at++) free((void *)matrices[at].packed);
  free(x), free(out);
}

void quantized_cases(int kind) {
  every_format(kind);
  many_rows(kind);
  functions(kind);
  experts(kind, 0);
  experts(kind, 1);
}
