/*
 * Latents: keys whose first numbers are the values, too, one after the other as rows of memory (SwarmCache). Scores are
 * the product of the positions' rows with the queries, packed as a matrix, and then turned round; weighted sums read
 * the same rows as a packed matrix of values. So each position is stored and read once.
 */
#ifndef SWARM_LATENTS_H
#define SWARM_LATENTS_H

#include "cache.h"
#include "operands.h"

INLINE int is_latent(const SwarmCache *cache) { return cache->values == NULL; }
INLINE int64_t latent_elements(const SwarmCache *cache) { return in_whole(cache->key_size, 16); }

/* The row of one position of a place and head. */
INLINE char *latent_at(const SwarmCache *cache, int64_t place, int64_t head, int64_t position) {
  int64_t at = place * cache->key_place + head * cache->key_head + position * latent_elements(cache);
  return (char *)cache->keys + at * bytes_of(cache->kind);
}

/* As write_values: the position after the last one, in the same pair, becomes 0. */
static void write_latents(const SwarmCache *cache, char *to, const char *from, int64_t stride, int64_t start,
                          int64_t count) {
  int64_t bytes = bytes_of(cache->kind), size = cache->key_size * bytes, row = latent_elements(cache) * bytes;
  for (int64_t i = 0; i < count; i++) memcpy(to + i * row, from + i * stride * bytes, (size_t)size);
  if ((start + count) % 2) memset(to + count * row, 0, (size_t)size);
}

/* Bytes for the rows of a step in another form: as values, or widened. */
INLINE int64_t bytes_of_latents(const SwarmCache *cache, int64_t positions) {
  return positions * latent_elements(cache) * 4;
}

/* Put a query into column `row` of a matrix [pair][WIDTH][2], or [pair][2][WIDTH] in float32. The rest of it is 0. */
static void pack_query(const SwarmCache *cache, char *matrix, int64_t row, const char *query) {
  for (int64_t i = 0; i < cache->key_size; i++) {
    if (cache->kind == SWARM_BFLOAT16)
      memcpy(matrix + ((i / 2 * WIDTH + row) * 2 + i % 2) * 2, query + i * 2, 2);
    else
      memcpy(matrix + (i * WIDTH + row) * 4, query + i * 4, 4);
  }
}

/* Rows of latents in the form that the variant multiplies; `copy` has room for them. */
static Operand latent_operand(const SwarmCache *cache, const char *latents, int64_t positions, float *copy) {
  int64_t elements = latent_elements(cache), bytes = bytes_of(cache->kind);
  if (bytes == 4 || MULTIPLIES_PAIRS(cache->kind)) return (Operand){latents, elements, bytes};
  for (int64_t i = 0; i < positions; i++)
    widen_row(copy + i * elements, (const uint16_t *)latents + i * elements, elements);
  return (Operand){copy, elements, 4};
}

/* Products of positions with packed queries, [position][WIDTH]. */
static void multiply_latents(const SwarmCache *cache, const char *latents, int64_t positions, const char *queries,
                             int64_t rows, float *copy, float *products) {
  int kind = (int)cache->kind;
  Piece piece = {queries, pair_bytes(kind), key_elements(cache) / 2, (int)((rows + 15) / 16), 1};
  Operand operand = latent_operand(cache, latents, positions, copy);
  multiply(kind, piece, operand, positions, (Sums){products, WIDTH, 1}, NULL);
}

/* Interleave the values of each two positions: [pair of positions][element][2]. */
static void interleave(const SwarmCache *cache, const uint16_t *latents, int64_t pairs, uint32_t *to) {
  int64_t elements = latent_elements(cache), size = value_elements(cache);
  for (int64_t pair = 0; pair < pairs; pair++, latents += 2 * elements, to += size)
    for (int64_t i = 0; i < size; i++) to[i] = latents[i] | (uint32_t)latents[elements + i] << 16;
}

/* Add the values of positions, by the rows' weights, to `sums`. */
static void mix_latents(const SwarmCache *cache, const char *latents, int64_t positions, Operand weights, int64_t rows,
                        float *copy, float *sums) {
  int kind = (int)cache->kind;
  int64_t size = value_elements(cache), pairs = (positions + 1) / 2, step = 2 * latent_elements(cache) * 4;
  if (kind == SWARM_BFLOAT16) {
    interleave(cache, (const uint16_t *)latents, pairs, (uint32_t *)copy);
    latents = (const char *)copy, step = size * 4;
  }
  for (int64_t element = 0; element < size; element += WIDTH) {
    Piece piece = {latents + element * 4, step, pairs, (int)(least(WIDTH, size - element) / 16), 1};
    multiply(kind, piece, weights, rows, (Sums){sums + element, size, 0}, NULL);
  }
}

#endif
