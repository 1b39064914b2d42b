/* What the cases are made of: numbers that a seed determines, packed matrices, and hashes of what came out. */
#ifndef SWARM_TESTS_MATERIAL_H
#define SWARM_TESTS_MATERIAL_H

#include <inttypes.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

/* The library's own (module.c): from now on this variant computes. */
int swarm_choose(const char *name);
/* decoder.c: answers of a whole small model to prompts of these numbers, a line for each. */
void decode_prompts(int kind, int64_t first, int64_t count);
/* quantized.c: cases of quantized matrices with rows of a kind, a line for each. */
void quantized_cases(int kind);

static const char *const KIND_NAMES[] = {"float32", "bfloat16"};

static inline int64_t bytes_of(int kind) { return kind == SWARM_BFLOAT16 ? 2 : 4; }

/* Everything that a case asks for; a test that runs out of memory has failed. */
static inline void *room(int64_t bytes) {
  void *memory = aligned_alloc(64, (size_t)((bytes + 4159) / 64 * 64)); /* kernels may fetch ahead */
  if (bytes < 0 || memory == NULL) abort();
  return memset(memory, 0, (size_t)bytes);
}

typedef struct {
  uint64_t state;
} Chance;

static inline Chance chance_of(uint64_t seed) { return (Chance){seed * 0x9e3779b97f4a7c15ull + 0x2545f4914f6cdd1dull}; }

static inline uint64_t next_of(Chance *chance) {
  uint64_t z = (chance->state += 0x9e3779b97f4a7c15ull);
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ z >> 27) * 0x94d049bb133111ebull;
  return z ^ z >> 31;
}

/* From -1 to 1, in steps of 2^-23: no rounding on the way. */
static inline float fraction(Chance *chance) {
  return (float)((int64_t)(next_of(chance) >> 40) - (1 << 23)) * 0x1p-23f;
}

static inline uint32_t bits_of(float x) {
  uint32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

static inline float number_of(uint32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

static inline float get(int kind, const void *from, int64_t at) {
  return kind == SWARM_BFLOAT16 ? number_of((uint32_t)((const uint16_t *)from)[at] << 16) : ((const float *)from)[at];
}

/* bfloat16: the nearest, ties to even. */
static inline void put(int kind, void *to, int64_t at, float x) {
  uint32_t bits = bits_of(x);
  if (kind == SWARM_BFLOAT16)
    ((uint16_t *)to)[at] = (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
  else
    ((float *)to)[at] = x;
}

/* Up to 1, of magnitudes so unlike that sums of a few are rounded: else their order could not be seen. */
static inline float uneven(Chance *chance) {
  float x = fraction(chance);
  return x * number_of((uint32_t)(127 - next_of(chance) % 13) << 23);
}

static inline void *numbers(int kind, int64_t count, float scale, Chance *chance) {
  void *all = room(count * bytes_of(kind));
  for (int64_t at = 0; at < count; at++) put(kind, all, at, uneven(chance) * scale);
  return all;
}

static inline int is_gated(int64_t function) { return function != SWARM_LINEAR && function < SWARM_ALONE; }

/* A matrix of the seed's weights, packed as kernels.h says. With a function: the gate's outputs, then the others. */
static inline SwarmMatrix matrix_of(int kind, int64_t function, int64_t outputs, int64_t inputs, float scale,
                                    Chance *chance) {
  int64_t gated = is_gated(function), half = outputs / 2, width = gated ? 32 : 64;
  int64_t pairs = (inputs + 1) / 2, blocks = (outputs + 63) / 64;
  if (gated) blocks = (half + 31) / 32;
  void *packed = room(blocks * pairs * 128 * bytes_of(kind));
  for (int64_t output = 0; output < outputs; output++) {
    int64_t part = gated ? output / half : 0, number = gated ? output % half : output;
    int64_t block = number / width, column = number % width + part * width;
    for (int64_t input = 0; input < inputs; input++) {
      int64_t pair = block * pairs + input / 2;
      int64_t at = kind == SWARM_BFLOAT16 ? (pair * 64 + column) * 2 + input % 2 : (pair * 2 + input % 2) * 64 + column;
      put(kind, packed, at, uneven(chance) * scale);
    }
  }
  return (SwarmMatrix){.packed = packed, .outputs = gated ? 2 * half : outputs, .inputs = inputs, .function = function,
                       .kind = kind, .alpha = 1.7f, .limit = 7.0f};
}

static inline uint64_t hash_bytes(uint64_t hash, const void *data, int64_t count) {
  for (int64_t at = 0; at < count; at++) hash = (hash ^ ((const unsigned char *)data)[at]) * 0x100000001b3ull;
  return hash;
}

#define HASH_START 0xcbf29ce484222325ull

/* Of all numbers. Every NaN counts as the same: which one comes of an operation is the processor's choice. */
static inline uint64_t hash_numbers(uint64_t hash, int kind, const void *data, int64_t count) {
  for (int64_t at = 0; at < count; at++) {
    float x = get(kind, data, at);
    uint32_t bits = x != x ? 0x7fc00000 : bits_of(x);
    hash = hash_bytes(hash, &bits, sizeof bits);
  }
  return hash;
}

#endif
