/* Keys and values as they lie in memory, packed like the matrices of products; see SwarmCache. */
#ifndef SWARM_CACHE_H
#define SWARM_CACHE_H

#include <string.h>

#include "tiles.h"

INLINE int64_t in_whole(int64_t count, int64_t unit) { return (count + unit - 1) / unit * unit; }

INLINE int64_t bytes_of(int64_t kind) { return kind == SWARM_BFLOAT16 ? 2 : 4; }
INLINE int64_t key_elements(const SwarmCache *cache) { return in_whole(cache->key_size, 2); }
INLINE int64_t value_elements(const SwarmCache *cache) { return in_whole(cache->value_size, 16); }

/* Keys of one head, at `to` its first block. */
static void write_keys(const SwarmCache *cache, char *to, const char *from, int64_t stride, int64_t start,
                       int64_t count) {
  int64_t size = cache->key_size, padded = key_elements(cache), block = padded * WIDTH;
  for (int64_t token = 0; token < count; token++, from += stride * bytes_of(cache->kind)) {
    int64_t position = start + token, at = position / WIDTH * block;
    if (cache->kind == SWARM_BFLOAT16) {
      uint16_t *pairs = (uint16_t *)to + at + position % WIDTH * 2;
      for (int64_t i = 0; i + 1 < size; i += 2) memcpy(pairs + i * WIDTH, from + i * 2, 4);
      if (padded > size) memcpy(pairs + (size - 1) * WIDTH, from + (size - 1) * 2, 2); /* beside it is 0 ever since */
    } else {
      float *column = (float *)to + at + position % WIDTH;
      for (int64_t i = 0; i < size; i++) memcpy(column + i * WIDTH, from + i * 4, 4);
    }
  }
}

/* Values of one head. The position after the last one, in the same pair, becomes 0: it is multiplied with weight 0. */
static void write_values(const SwarmCache *cache, char *to, const char *from, int64_t stride, int64_t start,
                         int64_t count) {
  int64_t size = cache->value_size, padded = value_elements(cache), stop = start + count;
  for (int64_t position = start; position < in_whole(stop, 2); position++, from += stride * bytes_of(cache->kind)) {
    int there = position < stop;
    if (cache->kind == SWARM_FLOAT32) {
      float *row = (float *)to + position * padded;
      there ? memcpy(row, from, (size_t)size * 4) : memset(row, 0, (size_t)size * 4);
    } else {
      uint16_t *row = (uint16_t *)to + position / 2 * 2 * padded + position % 2;
      for (int64_t i = 0; i < size; i++) row[2 * i] = there ? ((const uint16_t *)from)[i] : 0;
    }
  }
}

/* Writes zeros for the value of one position. */
static void clear_value(const SwarmCache *cache, char *to, int64_t position) {
  int64_t size = cache->value_size, padded = value_elements(cache);
  if (cache->kind == SWARM_FLOAT32) {
    memset((float *)to + position * padded, 0, (size_t)size * 4);
  } else {
    uint16_t *row = (uint16_t *)to + position / 2 * 2 * padded + position % 2;
    for (int64_t i = 0; i < size; i++) row[2 * i] = 0;
  }
}

#endif
