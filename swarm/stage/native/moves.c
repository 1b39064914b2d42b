/*
 * Keys and values of one sequence between the packed form, in which kernels read them (SwarmCache), and the dense one,
 * in which they move between machines: layer after layer, first the keys, then the values, [head][position][element].
 *
 * Only bit patterns are moved, so it makes no difference which variant of the kernels computes.
 */
#include <string.h>

#include "counting.h"
#include "kernels.h"

enum { WIDTH = 64 }; /* positions of a block of keys */

#define ALWAYS static inline __attribute__((always_inline))

/* Positions of one head, and the direction, which every caller knows at compile time. */
typedef struct {
  int64_t start, count;
  int is_write;
} Move;

ALWAYS void move_bytes(int is_write, char *packed, char *dense, size_t bytes) {
  is_write ? memcpy(packed, dense, bytes) : memcpy(dense, packed, bytes);
}

/*
 * Columns of the blocks of keys: what one column has for a position is `bytes` bytes, at the beginning of a slot of 4.
 * Blocks have `in_block` columns. In `dense`, positions are `stride` bytes apart, and columns 4.
 */
ALWAYS void move_columns(Move move, char *packed, char *dense, int64_t columns, int64_t in_block, size_t bytes,
                         int64_t stride) {
  for (int64_t done = 0, count; done < move.count; done += count) {
    int64_t position = move.start + done, place = position % WIDTH;
    count = least(WIDTH - place, move.count - done);
    char *from = packed + (position / WIDTH * in_block * WIDTH + place) * 4, *to = dense + done * stride;
    for (int64_t column = 0; column < columns; column++)
      for (int64_t i = 0; i < count; i++)
        move_bytes(move.is_write, from + (column * WIDTH + i) * 4, to + i * stride + column * 4, bytes);
  }
}

/* Keys of one head. A column is an element in float32 and a pair of them in bfloat16, the last one perhaps a half. */
ALWAYS void move_keys(Move move, const SwarmCache *cache, char *packed, char *dense) {
  int64_t size = cache->key_size, padded = (size + 1) / 2 * 2;
  if (cache->kind == SWARM_FLOAT32) {
    move_columns(move, packed, dense, size, padded, 4, size * 4);
    return;
  }
  move_columns(move, packed, dense, size / 2, padded / 2, 4, size * 2);
  if (padded > size)
    move_columns(move, packed + size / 2 * WIDTH * 4, dense + (size - 1) * 2, 1, padded / 2, 2, size * 2);
}

/* Values of one head. In bfloat16, the elements of two positions are interleaved. */
ALWAYS void move_values(Move move, const SwarmCache *cache, char *packed, char *dense) {
  int64_t size = cache->value_size, padded = (size + 15) / 16 * 16;
  for (int64_t i = 0; i < move.count; i++) {
    int64_t position = move.start + i;
    if (cache->kind == SWARM_FLOAT32) {
      move_bytes(move.is_write, packed + position * padded * 4, dense + i * size * 4, (size_t)size * 4);
      continue;
    }
    char *row = packed + (position / 2 * 2 * padded + position % 2) * 2, *to = dense + i * size * 2;
    for (int64_t element = 0; element < size; element++)
      move_bytes(move.is_write, row + element * 4, to + element * 2, 2);
  }
}

ALWAYS void move_layers(Move move, const SwarmCache *caches, int64_t num_layers, int64_t place, char *dense) {
  for (const SwarmCache *cache = caches; cache < caches + num_layers; cache++) {
    int64_t bytes = cache->kind == SWARM_FLOAT32 ? 4 : 2;
    char *keys = (char *)cache->keys + place * cache->key_place * bytes;
    char *values = (char *)cache->values + place * cache->value_place * bytes;
    for (int64_t head = 0; head < cache->heads; head++, dense += move.count * cache->key_size * bytes)
      move_keys(move, cache, keys + head * cache->key_head * bytes, dense);
    for (int64_t head = 0; head < cache->heads; head++, dense += move.count * cache->value_size * bytes)
      move_values(move, cache, values + head * cache->value_head * bytes, dense);
  }
}

/* Copy the positions from `start` on, at a place of all these layers' caches, to `dense`. */
void swarm_read_kv(const SwarmCache *caches, int64_t num_layers, int64_t place, int64_t start, int64_t count,
                   void *dense) {
  move_layers((Move){start, count, 0}, caches, num_layers, place, dense);
}

/* The same from `dense`. */
void swarm_write_kv(const SwarmCache *caches, int64_t num_layers, int64_t place, int64_t start, int64_t count,
                    const void *dense) {
  move_layers((Move){start, count, 1}, caches, num_layers, place, (char *)dense);
}
