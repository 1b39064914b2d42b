/*
 * Attention over keys and values that lie contiguously by sequence and head, bfloat16 in and out, float32 between.
 *
 * The query heads of a group and the tokens of a row are lanes: sixteen (head, token) pairs of one key head share every
 * reading of keys and values. All that is summed is summed lane by lane, over positions in their order from the first
 * on: what a lane gets has the same bits whoever is beside it, however the prompt was cut, whatever lies after it.
 * What a lane may not see gets weight exactly 0.
 */
#if defined(__x86_64__) && defined(__linux__)
#include "attention.h"

#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <string.h>

#include "pool.h"
#include "vectors.h"

#define LANES 16
#define KEYS_AT_ONCE 8 /* chains of additions side by side, so that none waits for its own last one */
#define MOST_ROWS 6
#define CHUNK 64 /* elements of a value that are summed at a time: 6 rows × 4 vectors fill the registers */

typedef struct {
  const SwarmSpan *spans;
  int64_t num_spans;
  const SwarmSlab *slab;
  const SwarmBatch *batch;
  const SwarmHow *how;
  atomic_int *failed;
} Job;

/* A piece of work: some lanes of one key head of one row. */
typedef struct {
  const SwarmSpan *span;
  int64_t head, first, lanes; /* lane i is query number first + i, counted token by token, head by head of the group */
  int64_t low, high;          /* positions that some lane sees */
  int64_t group;
} Tile;

static int64_t group_of(const Job *job) { return job->batch->query_heads / job->slab->heads; }

static int64_t pieces_of(int64_t count, int64_t query_heads, int64_t heads) {
  return (count * (query_heads / heads) + LANES - 1) / LANES * heads;
}

static const SwarmSpan *span_of(const Job *job, int64_t piece) {
  int64_t low = 0, high = job->num_spans;
  while (high - low > 1) {
    int64_t middle = (low + high) / 2;
    if (job->spans[middle].pieces <= piece)
      low = middle;
    else
      high = middle;
  }
  return &job->spans[low];
}

static int64_t position_of(const Tile *tile, int64_t lane) {
  return tile->span->start + (tile->first + lane) / tile->group;
}

static int64_t query_head_of(const Tile *tile, int64_t lane) {
  return tile->head * tile->group + (tile->first + lane) % tile->group;
}

static int64_t token_of(const Tile *tile, int64_t lane) {
  return tile->span->offset + (tile->first + lane) / tile->group;
}

static Tile tile_of(const Job *job, int64_t piece) {
  Tile tile = {.span = span_of(job, piece), .group = group_of(job)};
  int64_t queries = tile.span->count * tile.group, tiles = (queries + LANES - 1) / LANES;
  int64_t mine = piece - tile.span->pieces;
  tile.head = mine / tiles;
  tile.first = mine % tiles * LANES;
  tile.lanes = queries - tile.first < LANES ? queries - tile.first : LANES;
  int64_t oldest = job->how->window > 0 ? position_of(&tile, 0) - job->how->window + 1 : 0;
  tile.low = oldest > 0 ? oldest / 2 * 2 : 0; /* positions are summed in pairs, and always in the same ones */
  tile.high = position_of(&tile, tile.lanes - 1) + 1;
  return tile;
}

/* The lanes' queries, [pair of elements][lane][2]; lanes of nobody are 0. */
static void pack_queries(const Job *job, const Tile *tile, uint16_t *packed) {
  const SwarmBatch *batch = job->batch;
  int64_t size = job->slab->key_size;
  memset(packed, 0, (size_t)(size * LANES) * sizeof *packed);
  for (int64_t lane = 0; lane < tile->lanes; lane++) {
    const uint16_t *query =
        batch->query + token_of(tile, lane) * batch->query_token + query_head_of(tile, lane) * batch->query_head;
    for (int64_t at = 0; at < size; at += 2) memcpy(packed + at * LANES + 2 * lane, query + at, 2 * sizeof *packed);
  }
}

typedef struct {
  __m512i positions; /* of the lanes */
  __m512 scale, softcap;
  int64_t first, last; /* the lanes' first and last position */
  int64_t window;
  int capped;
} Rules;

TARGET static Rules rules_of(const Job *job, const Tile *tile) {
  int32_t positions[LANES];
  for (int64_t lane = 0; lane < LANES; lane++)
    positions[lane] = (int32_t)position_of(tile, lane < tile->lanes ? lane : tile->lanes - 1);
  return (Rules){_mm512_loadu_si512(positions), _mm512_set1_ps(job->how->scale), _mm512_set1_ps(job->how->softcap),
                 positions[0],                  positions[LANES - 1],            job->how->window,
                 job->how->softcap != 0.0f};
}

/* What a sum of products becomes before the exponential: scaled, capped, -inf for those that may not see it. */
VECTOR __m512 score(const Rules *rules, int64_t position, __m512 sum) {
  const __m512 never = _mm512_set1_ps(-INFINITY);
  sum = _mm512_mul_ps(sum, rules->scale);
  if (rules->capped) sum = _mm512_mul_ps(tangent(_mm512_div_ps(sum, rules->softcap)), rules->softcap);
  __m512i here = _mm512_set1_epi32((int32_t)position);
  if (position > rules->first) sum = _mm512_mask_mov_ps(sum, _mm512_cmpgt_epi32_mask(here, rules->positions), never);
  if (rules->window > 0 && position <= rules->last - rules->window) {
    __m512i oldest = _mm512_sub_epi32(rules->positions, _mm512_set1_epi32((int32_t)rules->window));
    sum = _mm512_mask_mov_ps(sum, _mm512_cmple_epi32_mask(here, oldest), never);
  }
  return sum;
}

/* Scores of every position from low to high, [position][lane], and the greatest of each lane. */
TARGET static __m512 scores_of(const Job *job, const Tile *tile, const uint16_t *packed, float *scores) {
  const SwarmSlab *slab = job->slab;
  const uint16_t *keys = slab->keys + tile->span->place * slab->key_place + tile->head * slab->key_head;
  int64_t pairs = slab->key_size / 2, size = slab->key_size;
  Rules rules = rules_of(job, tile);
  __m512 most = _mm512_set1_ps(-INFINITY);
  for (int64_t position = tile->low; position < tile->high; position += KEYS_AT_ONCE) {
    int64_t left = tile->high - position;
    const uint16_t *rows[KEYS_AT_ONCE];
    for (int i = 0; i < KEYS_AT_ONCE; i++) rows[i] = keys + (position + (i < left ? i : left - 1)) * size;
    __m512 sums[KEYS_AT_ONCE];
    for (int i = 0; i < KEYS_AT_ONCE; i++) sums[i] = _mm512_setzero_ps();
    for (int64_t pair = 0; pair < pairs; pair++) {
      __m512bh query = load_bf16(packed + pair * 2 * LANES);
      _Pragma("GCC unroll 8") for (int i = 0; i < KEYS_AT_ONCE; i++)
        sums[i] = _mm512_dpbf16_ps(sums[i], query, broadcast_pair(rows[i] + 2 * pair));
    }
    for (int i = 0; i < KEYS_AT_ONCE && i < left; i++) {
      __m512 scored = score(&rules, position + i, sums[i]);
      most = _mm512_max_ps(most, scored);
      _mm512_store_ps(scores + (position + i - tile->low) * LANES, scored);
    }
  }
  return most;
}

/* Weights in place of scores: for each pair of positions the two weights of a lane side by side. Returns their sums. */
TARGET static __m512 weights_of(const Job *job, const Tile *tile, __m512 most, float *scores) {
  __m512 sum = _mm512_setzero_ps();
  if (job->how->sinks != NULL) {
    float sinks[LANES];
    for (int64_t lane = 0; lane < LANES; lane++)
      sinks[lane] = job->how->sinks[query_head_of(tile, lane < tile->lanes ? lane : tile->lanes - 1)];
    __m512 sink = _mm512_loadu_ps(sinks);
    most = _mm512_max_ps(most, sink);
    sum = exponential(_mm512_sub_ps(sink, most));
  }
  for (int64_t at = 0; at < tile->high - tile->low; at += 2) {
    float *both = scores + at * LANES;
    __m512 even = exponential(_mm512_sub_ps(_mm512_load_ps(both), most));
    __m512 odd = _mm512_setzero_ps();
    if (at + 1 < tile->high - tile->low) odd = exponential(_mm512_sub_ps(_mm512_load_ps(both + LANES), most));
    sum = _mm512_add_ps(_mm512_add_ps(sum, even), odd);
    __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(even));
    __m512i high = _mm512_slli_epi32(_mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(odd)), 16);
    _mm512_store_si512(scores + at / 2 * LANES, _mm512_or_si512(low, high));
  }
  return sum;
}

/* Elements of values of two positions, pair by pair: the order that unpacking leaves them in. */
typedef struct {
  __m512 low, high;
} Pair;

VECTOR Pair in_order(Pair mixed) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
  return (Pair){_mm512_permutex2var_ps(mixed.low, first, mixed.high),
                _mm512_permutex2var_ps(mixed.low, second, mixed.high)};
}

VECTOR __mmask32 first_of_32(int64_t count) {
  return count >= 32 ? 0xffffffffu : count <= 0 ? 0 : (__mmask32)((1u << count) - 1);
}

/* Weighted sums of up to 64 elements, for ROWS lanes. `weights` points at the first lane's. */
#define DEFINE_MIX(ROWS)                                                                                            \
  TARGET static void mix_##ROWS(const uint16_t *values, int64_t size, int64_t elements, int64_t positions,          \
                                const uint16_t *weights, Pair (*sums)[2]) {                                         \
    __mmask32 here[2] = {first_of_32(elements), first_of_32(elements - 32)};                                        \
    __m512 sum[ROWS][4];                                                                                            \
    for (int row = 0; row < ROWS; row++)                                                                            \
      for (int part = 0; part < 4; part++) sum[row][part] = _mm512_setzero_ps();                                    \
    for (int64_t at = 0; at < positions; at += 2, weights += 2 * LANES, values += 2 * size) {                       \
      const uint16_t *other = at + 1 < positions ? values + size : values; /* its weight is 0 */                    \
      __m512i a0 = _mm512_maskz_loadu_epi16(here[0], values), b0 = _mm512_maskz_loadu_epi16(here[0], other);        \
      __m512i a1 = _mm512_maskz_loadu_epi16(here[1], values + 32);                                                  \
      __m512i b1 = _mm512_maskz_loadu_epi16(here[1], other + 32);                                                   \
      __m512bh v0 = (__m512bh)_mm512_unpacklo_epi16(a0, b0), v1 = (__m512bh)_mm512_unpackhi_epi16(a0, b0);          \
      __m512bh v2 = (__m512bh)_mm512_unpacklo_epi16(a1, b1), v3 = (__m512bh)_mm512_unpackhi_epi16(a1, b1);          \
      _Pragma("GCC unroll 6") for (int row = 0; row < ROWS; row++) {                                                \
        __m512bh weight = broadcast_pair(weights + 2 * row);                                                        \
        sum[row][0] = _mm512_dpbf16_ps(sum[row][0], v0, weight);                                                    \
        sum[row][1] = _mm512_dpbf16_ps(sum[row][1], v1, weight);                                                    \
        sum[row][2] = _mm512_dpbf16_ps(sum[row][2], v2, weight);                                                    \
        sum[row][3] = _mm512_dpbf16_ps(sum[row][3], v3, weight);                                                    \
      }                                                                                                             \
    }                                                                                                               \
    for (int row = 0; row < ROWS; row++) {                                                                          \
      sums[row][0] = in_order((Pair){sum[row][0], sum[row][1]});                                                    \
      sums[row][1] = in_order((Pair){sum[row][2], sum[row][3]});                                                    \
    }                                                                                                               \
  }

DEFINE_MIX(1)
DEFINE_MIX(2)
DEFINE_MIX(3)
DEFINE_MIX(4)
DEFINE_MIX(5)
DEFINE_MIX(6)

typedef void (*Mix)(const uint16_t *, int64_t, int64_t, int64_t, const uint16_t *, Pair (*)[2]);
static const Mix MIXES[] = {NULL, mix_1, mix_2, mix_3, mix_4, mix_5, mix_6};

TARGET static void store_mixed(uint16_t *to, int64_t elements, const Pair sums[2], __m512 divisor) {
  for (int64_t at = 0; at < elements; at += 16) {
    const Pair *pair = &sums[at / 32];
    __m512 some = at % 32 == 0 ? pair->low : pair->high;
    store_bf16(to + at, first_of_16(elements - at), _mm512_div_ps(some, divisor));
  }
}

TARGET static void mix_values(const Job *job, const Tile *tile, const uint16_t *weights, __m512 divisors) {
  const SwarmSlab *slab = job->slab;
  int64_t size = slab->value_size;
  const uint16_t *values =
      slab->values + tile->span->place * slab->value_place + tile->head * slab->value_head + tile->low * size;
  float each[LANES];
  _mm512_storeu_ps(each, divisors);
  int64_t rounds = (tile->lanes + MOST_ROWS - 1) / MOST_ROWS;
  for (int64_t lane = 0; rounds > 0; rounds--) {
    int64_t rows = (tile->lanes - lane) / rounds;
    for (int64_t at = 0; at < size; at += CHUNK) {
      Pair sums[MOST_ROWS][2];
      int64_t elements = size - at < CHUNK ? size - at : CHUNK;
      MIXES[rows](values + at, size, elements, tile->high - tile->low, weights + 2 * lane, sums);
      for (int64_t row = 0; row < rows; row++) {
        int64_t query = token_of(tile, lane + row) * job->batch->query_heads + query_head_of(tile, lane + row);
        store_mixed(job->batch->out + query * size + at, elements, sums[row], _mm512_set1_ps(each[lane + row]));
      }
    }
    lane += rows;
  }
}

TARGET static void attend_piece(const void *argument, int64_t piece, int64_t next) {
  (void)next;
  const Job *job = argument;
  Tile tile = tile_of(job, piece);
  int64_t query_bytes = (job->slab->key_size * LANES * 2 + 63) / 64 * 64;
  int64_t positions = (tile.high - tile.low + 1) / 2 * 2;
  char *scratch = swarm_scratch(query_bytes + positions * LANES * (int64_t)sizeof(float));
  if (scratch == NULL) {
    atomic_store(job->failed, 1);
    return;
  }
  uint16_t *queries = (uint16_t *)scratch;
  float *scores = (float *)(scratch + query_bytes);
  pack_queries(job, &tile, queries);
  __m512 most = scores_of(job, &tile, queries, scores);
  __m512 sums = weights_of(job, &tile, most, scores);
  mix_values(job, &tile, (const uint16_t *)scores, sums);
}

static void write_part(uint16_t *to, const uint16_t *from, int64_t count, int64_t stride, int64_t size) {
  for (int64_t token = 0; token < count; token++)
    memcpy(to + token * size, from + token * stride, (size_t)size * sizeof *to);
}

static void write_span(const SwarmSpan *span, const SwarmSlab *slab, const SwarmBatch *batch) {
  for (int64_t head = 0; head < slab->heads; head++) {
    uint16_t *keys = slab->keys + span->place * slab->key_place + head * slab->key_head;
    uint16_t *values = slab->values + span->place * slab->value_place + head * slab->value_head;
    write_part(keys + span->start * slab->key_size,
               batch->key + span->offset * batch->key_token + head * batch->key_head, span->count, batch->key_token,
               slab->key_size);
    write_part(values + span->start * slab->value_size,
               batch->value + span->offset * batch->value_token + head * batch->value_head, span->count,
               batch->value_token, slab->value_size);
  }
}

int swarm_attend(const SwarmSpan *spans, int64_t num_spans, const SwarmSlab *slab, const SwarmBatch *batch,
                 const SwarmHow *how, int threads) {
  atomic_int failed = 0;
  Job job = {spans, num_spans, slab, batch, how, &failed};
  for (int64_t i = 0; i < num_spans; i++) write_span(&spans[i], slab, batch);
  const SwarmSpan *last = &spans[num_spans - 1];
  int64_t pieces = last->pieces + pieces_of(last->count, batch->query_heads, slab->heads);
  swarm_share(attend_piece, &job, pieces, threads);
  return failed ? -1 : 0;
}
#endif
