/*
 * A small proof that stands between a variant and its users: no test can have run it on every processor there is.
 * Products of both kinds, plain, gated and with weights of four bits, must have the same bits for every row alone, among
 * some and among all, and those of a few rows must be near the portable variant's, which is slow. The shape leaves no
 * loop out: more than one block, a last block and a last step that aren't full, rows for every way to take them.
 */
#include "proof.h"

#include "layout.h"
#include "packing.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { ROWS = 53, COMPARED = 4, INPUTS = 83, HALF = 40, PAIRS = 42, OUTPUTS = 96, BLOCKS = 2, WIDTH = 64 };
#define NO_MEMORY "there was no memory to try it in"
#define NEAR 0.02f /* of the greatest number: bfloat16 keeps 8 bits */

/* Numbers of a kind, as they lie in memory. */
typedef union {
  float wide[ROWS * INPUTS];
  uint16_t narrow[ROWS * INPUTS];
} Rows;

typedef union {
  float wide[ROWS * OUTPUTS];
  uint16_t narrow[ROWS * OUTPUTS];
} Products;

typedef union {
  float wide[BLOCKS * PAIRS * 2 * WIDTH];
  uint16_t narrow[BLOCKS * PAIRS * WIDTH * 2];
} Packed;

enum { GROUP = 32, GROUPS = 3 };

/* Weights of four bits, and what their format is. */
typedef struct {
  SwarmFormat format;
  uint8_t codes[OUTPUTS * INPUTS];
  uint16_t scales[OUTPUTS * GROUPS], minima[OUTPUTS * GROUPS]; /* float16 */
} Quantized;

typedef struct {
  Rows rows;
  Packed packed; /* more than enough for four bits, too */
  Quantized quantized;
  const SwarmFormat *format; /* of what is packed; NULL: numbers of a kind */
  Products right, all, few;
} Proof;

/*
 * What a row or an output's weights are: numbers of eight bits and several sizes, exact in either kind, by a rule that
 * is the same everywhere. `mirror` other than 0: the second half is the first half times it, and the rest is tiny. Then
 * a row and weights of unlike mirrors cancel each other but for what was rounded on the way, and their product, however
 * coarsely written, shows in which order it was summed.
 */
static void some_numbers(float *to, uint32_t *state, float mirror) {
  for (int at = 0; at < INPUTS; at++) {
    *state = *state * 1664525u + 1013904223u;
    to[at] = (float)(int8_t)(*state >> 24) / (float)(128 << (*state >> 16 & 7));
    if (mirror != 0.0f && at >= HALF) to[at] = at < 2 * HALF ? to[at - HALF] * mirror : to[at] / 1048576.0f;
  }
}

static int64_t bytes_of(int64_t kind) { return kind == SWARM_BFLOAT16 ? 2 : 4; }

static void put(int64_t kind, void *to, int64_t at, float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  if (kind == SWARM_BFLOAT16)
    ((uint16_t *)to)[at] = (uint16_t)(bits >> 16);
  else
    ((float *)to)[at] = x;
}

static float number_at(int64_t kind, const void *from, int64_t at) {
  if (kind != SWARM_BFLOAT16) return ((const float *)from)[at];
  uint32_t bits = (uint32_t)((const uint16_t *)from)[at] << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* Rows and a packed matrix; what is missing of the last block and pair is 0. */
static void fill(Proof *proof, int64_t kind, int mirrored) {
  uint32_t state = 1;
  float numbers[INPUTS];
  memset(proof, 0, sizeof *proof);
  for (int64_t row = 0; row < ROWS; row++) {
    some_numbers(numbers, &state, mirrored ? 1.0f : 0.0f);
    for (int64_t input = 0; input < INPUTS; input++) put(kind, &proof->rows, row * INPUTS + input, numbers[input]);
  }
  for (int64_t output = 0; output < OUTPUTS; output++) {
    some_numbers(numbers, &state, mirrored ? -1.0f : 0.0f);
    for (int64_t input = 0; input < INPUTS; input++) {
      int64_t pair = (output / WIDTH * PAIRS + input / 2) * 2 * WIDTH, lane = output % WIDTH;
      int64_t at = kind == SWARM_BFLOAT16 ? 2 * lane + input % 2 : input % 2 * WIDTH + lane;
      put(kind, &proof->packed, pair + at, numbers[input]);
    }
  }
}

/*
 * Weights of four bits instead, whose groups have scales and minima of several sizes. `mirrored`: an output's codes are
 * the same in every pair of inputs, and 15 minus that in the next; the minimum is what is between them.
 */
static void quantize(Proof *proof, int mirrored) {
  Quantized *all = &proof->quantized;
  uint32_t state = 2;
  all->format = (SwarmFormat){.codes = SWARM_CODES4, .scales = SWARM_SCALES_FLOAT16, .minima = SWARM_MINIMA_FLOAT16,
                              .group = GROUP};
  for (int code = 0; code < 16; code++) put(SWARM_BFLOAT16, all->format.table, code, (float)code);
  for (int64_t at = 0; at < OUTPUTS * GROUPS; at++) {
    state = state * 1664525u + 1013904223u;
    all->scales[at] = (uint16_t)(0x2c00 + (state >> 20 & 0xfff));
    all->minima[at] = (uint16_t)((mirrored ? all->scales[at] : 0x2c00 + (state >> 8 & 0xfff)) + 0x0b80); /* about 7.5 */
  }
  for (int64_t at = 0; at < OUTPUTS * INPUTS; at++) {
    state = state * 1664525u + 1013904223u;
    uint8_t before = at > 0 ? (uint8_t)(15 - all->codes[at - 1]) : 0;
    all->codes[at] = mirrored && at % INPUTS % 2 ? before : (uint8_t)(state >> 28);
  }
  const SwarmNumbers numbers = {.codes = all->codes, .scales = all->scales, .minima = all->minima, .outputs = OUTPUTS};
  swarm_pack(&all->format, &numbers, 1, INPUTS, &proof->packed, 1);
  proof->format = &all->format;
}

static int multiply(const SwarmKernels *variant, const Proof *proof, int64_t kind, int64_t function, int64_t first,
                    int64_t count, Products *out) {
  const SwarmMatrix matrix = {
      .packed = &proof->packed, .outputs = OUTPUTS, .inputs = INPUTS, .function = function, .kind = kind,
      .format = proof->format};
  const int64_t offsets[] = {0, count};
  const char *x = (const char *)&proof->rows + first * INPUTS * bytes_of(kind);
  const SwarmRows rows = {x, INPUTS, out, OUTPUTS, NULL};
  return variant->multiply(&matrix, offsets, 1, &rows, 1);
}

static int is_near(const Proof *proof, int64_t kind, int64_t outputs) {
  float most = 0.0f, off = 0.0f;
  for (int64_t row = 0; row < COMPARED; row++) {
    for (int64_t output = 0; output < outputs; output++) {
      float right = number_at(kind, &proof->right, row * OUTPUTS + output);
      float difference = __builtin_fabsf(number_at(kind, &proof->all, row * OUTPUTS + output) - right);
      if (off == off && !(difference <= off)) off = difference; /* a NaN stays */
      if (__builtin_fabsf(right) > most) most = __builtin_fabsf(right);
    }
  }
  return most > 0.0f && off <= NEAR * most;
}

/* All rows, so many at a time: each must have the bits that it has among all. */
static const char *same_by_few(const SwarmKernels *variant, Proof *proof, int64_t kind, int64_t function,
                               int64_t count) {
  int64_t given = function == SWARM_LINEAR ? OUTPUTS : OUTPUTS / 2, bytes = bytes_of(kind);
  for (int64_t first = 0; first + count <= ROWS; first += count) {
    if (multiply(variant, proof, kind, function, first, count, &proof->few)) return NO_MEMORY;
    for (int64_t row = 0; row < count; row++) {
      const char *few = (const char *)&proof->few + row * OUTPUTS * bytes;
      const char *all = (const char *)&proof->all + (first + row) * OUTPUTS * bytes;
      if (memcmp(few, all, (size_t)(given * bytes)) != 0) return "a row has other bits among few rows than among many";
    }
  }
  return NULL;
}

static const char *prove_products(const SwarmKernels *variant, const SwarmKernels *portable, Proof *proof, int64_t kind,
                                  int64_t function, int quantized) {
  static const int64_t counts[] = {1, 7, 16, 21, 32};
  fill(proof, kind, 0);
  if (quantized) quantize(proof, 0);
  if (multiply(portable, proof, kind, function, 0, COMPARED, &proof->right)) return NO_MEMORY;
  if (multiply(variant, proof, kind, function, 0, ROWS, &proof->all)) return NO_MEMORY;
  if (!is_near(proof, kind, function == SWARM_LINEAR ? OUTPUTS : OUTPUTS / 2)) return "its products are wrong";
  fill(proof, kind, 1);
  if (quantized) quantize(proof, 1);
  if (multiply(variant, proof, kind, function, 0, ROWS, &proof->all)) return NO_MEMORY;
  const char *wrong = NULL;
  for (size_t i = 0; wrong == NULL && i < sizeof counts / sizeof *counts; i++)
    wrong = same_by_few(variant, proof, kind, function, counts[i]);
  return wrong;
}

/* Rows rounded to int8 have whole sums, in which no variant may differ from another by a bit. */
static const char *prove_int8_rows(const SwarmKernels *variant, const SwarmKernels *portable, Proof *proof) {
  size_t row = OUTPUTS * sizeof(float);
  fill(proof, SWARM_FLOAT32, 0);
  quantize(proof, 0);
  proof->quantized.format.int8_rows = 1;
  if (multiply(portable, proof, SWARM_FLOAT32, SWARM_LINEAR, 0, COMPARED, &proof->right)) return NO_MEMORY;
  if (multiply(variant, proof, SWARM_FLOAT32, SWARM_LINEAR, 0, ROWS, &proof->all)) return NO_MEMORY;
  if (memcmp(&proof->all, &proof->right, COMPARED * row) != 0) return "its products of whole numbers are wrong";
  return same_by_few(variant, proof, SWARM_FLOAT32, SWARM_LINEAR, 1);
}

const char *swarm_prove(const SwarmKernels *variant, const SwarmKernels *portable) {
  static const int64_t kinds[] = {SWARM_FLOAT32, SWARM_BFLOAT16}, functions[] = {SWARM_LINEAR, SWARM_SILU};
  if (variant == portable) return NULL; /* the others are held against it; tests hold it against torch */
  Proof *proof = malloc(sizeof *proof);
  const char *wrong = proof == NULL ? NO_MEMORY : NULL;
  for (int trial = 0; wrong == NULL && trial < 4; trial++)
    wrong = prove_products(variant, portable, proof, kinds[trial / 2], functions[trial % 2], 0);
  for (int trial = 0; wrong == NULL && trial < 2; trial++)
    wrong = prove_products(variant, portable, proof, kinds[trial], SWARM_LINEAR, 1);
  if (wrong == NULL) wrong = prove_int8_rows(variant, portable, proof);
  free(proof);
  return wrong;
}
