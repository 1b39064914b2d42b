/*
 * Attention over keys and values that lie by sequence and head, packed as products read matrices: keys with positions
 * for outputs and elements for inputs, values with elements for outputs and positions for inputs. So scores are one
 * small product and weighted sums of values another, and between them stands a softmax that goes along the positions.
 *
 * Positions come in steps of KEYS on an absolute grid, and steps in stretches of STRETCH, whose mixtures (mixtures.h)
 * are merged in their order. What a row (a query of one head) may not see gets weight exactly 0, and a step of which it
 * sees nothing leaves its numbers as they are. So a row's bits depend on nothing but its query and what it sees: not on
 * who is beside it, on how the prompt was cut, on what lies after it, nor on the threads. But for one thing: weight 0
 * times a value that is no finite number is none either, and such a value reaches the rows of its own sequence that are
 * computed together with it. Its request fails for that value in any case.
 */
#ifndef SWARM_ATTENTION_H
#define SWARM_ATTENTION_H

#include <math.h>
#include <stdatomic.h>

#include "../counting.h"
#include "cache.h"
#include "latents.h"
#include "mixtures.h"
#include "numbers.h"
#include "operands.h"

#define KEYS 128            /* positions of a step, whole blocks of keys */
#define STRETCH 1024        /* positions that one thread takes at least: their sums are the unit that is merged */
#define WORTH_SHARING 64    /* tokens of a step, from which on threads share the writing of keys and values */
#define MOST_PARTS 16777216 /* bytes for stretches that are kept until they are merged */

typedef struct {
  const SwarmSpan *spans;
  const int64_t *before; /* tiles before each span's */
  int64_t num_spans;
  const SwarmCache *cache;
  const SwarmBatch *batch;
  const SwarmHow *how;
  int64_t group;     /* query heads of a key head */
  int64_t stretches; /* pieces that a tile is cut into, whose mixtures are kept in `parts`; 0: none is cut */
  float *parts;
  atomic_int *failed;
} Attention;

/* Some rows of one key head of one span. Row i is query number first + i, token by token, head by head of the group. */
typedef struct {
  const SwarmSpan *span;
  int64_t head, first, rows;
  int64_t low, high; /* positions of which some row sees some; `low` lies on the grid */
} Tile;

/* Where a tile is computed. */
typedef struct {
  float *scores;   /* [row][KEYS], then weights */
  char *queries;   /* [row][elements], in the form that is multiplied */
  char *weights;   /* the same of weights, where that is another form than scores have */
  int64_t *places; /* positions of the rows */
  float *latents, *products; /* a step's latents in another form, and their products [position][WIDTH] */
  Mixture stretch, whole;
} Room;

INLINE int64_t operand_bytes(int64_t kind) { return MULTIPLIES_PAIRS(kind) ? 2 : 4; }

/* --- who computes what --- */

static int64_t tiles_of_head(const SwarmSpan *span, int64_t group) {
  return (span->count * group + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
}

static int64_t token_of(const Attention *job, const Tile *tile, int64_t row) {
  return (tile->first + row) / job->group;
}

static int64_t query_head_of(const Attention *job, const Tile *tile, int64_t row) {
  return tile->head * job->group + (tile->first + row) % job->group;
}

/* The first position that a query at `place` sees; it may be negative. */
static int64_t first_seen(const SwarmHow *how, int64_t place) {
  if (how->window > 0) return place - how->window + 1;
  return how->chunk > 0 ? place / how->chunk * how->chunk : 0;
}

static Tile tile_of(const Attention *job, int64_t index) {
  int64_t found = owner_of(job->before, job->num_spans, index);
  const SwarmSpan *span = &job->spans[found];
  int64_t tiles = tiles_of_head(span, job->group), mine = index - job->before[found];
  Tile tile = {.span = span, .head = mine / tiles, .first = mine % tiles * ROWS_AT_ONCE};
  tile.rows = least(ROWS_AT_ONCE, span->count * job->group - tile.first);
  tile.low = most(first_seen(job->how, span->start + token_of(job, &tile, 0)), 0) / KEYS * KEYS;
  tile.high = span->start + token_of(job, &tile, tile.rows - 1) + 1;
  return tile;
}

/* A sink is a score with nothing to mix. */
static void begin_with_sinks(const Attention *job, const Tile *tile, Mixture *mixture) {
  begin(mixture, tile->rows, value_elements(job->cache));
  if (job->how->sinks == NULL) return;
  for (int64_t row = 0; row < tile->rows; row++) {
    float sink = (float)(job->how->sinks[query_head_of(job, tile, row)] * LOG2E);
    if (sink < NOTHING) continue; /* it takes no weight */
    mixture->bounds[row] = sink;
    mixture->sums[row * 16] = 1.0f;
  }
}

/* --- one step --- */

static const float NUMBERS[KEYS] = {
#define TEN(n) n##0, n##1, n##2, n##3, n##4, n##5, n##6, n##7, n##8, n##9
    0, 1, 2, 3, 4, 5, 6, 7, 8, 9, TEN(1), TEN(2), TEN(3), TEN(4), TEN(5), TEN(6), TEN(7), TEN(8), TEN(9),
    TEN(10), TEN(11), 120, 121, 122, 123, 124, 125, 126, 127
#undef TEN
};

static const char *latents_of(const Attention *job, const Tile *tile, int64_t at) {
  return latent_at(job->cache, tile->span->place, tile->head, at);
}

static void score_latents(const Attention *job, const Tile *tile, const Room *room, int64_t at) {
  int64_t positions = least(KEYS, tile->high - at);
  multiply_latents(job->cache, latents_of(job, tile, at), positions, room->queries, tile->rows, room->latents,
                   room->products);
  for (int64_t row = 0; row < tile->rows; row++)
    for (int64_t i = 0; i < positions; i++) room->scores[row * KEYS + i] = room->products[i * WIDTH + row];
}

/* Scores of the step's positions, [row][KEYS]. Those at and after `high` are what lay there before. */
static void multiply_keys(const Attention *job, const Tile *tile, const Room *room, int64_t at) {
  const SwarmCache *cache = job->cache;
  if (is_latent(cache)) {
    score_latents(job, tile, room, at);
    return;
  }
  int kind = (int)cache->kind;
  int64_t elements = key_elements(cache), step = pair_bytes(kind);
  const char *keys = (const char *)cache->keys +
                     (tile->span->place * cache->key_place + tile->head * cache->key_head) * bytes_of(kind);
  Operand queries = {room->queries, elements, operand_bytes(kind)};
  for (int64_t block = at; block < least(at + KEYS, tile->high); block += WIDTH) {
    int64_t vectors = least(WIDTH, tile->high - block + 15) / 16;
    Piece piece = {keys + block / WIDTH * (elements / 2) * step, step, elements / 2, (int)vectors, 0};
    const char *ahead = piece.weights + KEYS / WIDTH * piece.pairs * step;
    multiply(kind, piece, queries, tile->rows, (Sums){room->scores + block - at, KEYS, 1}, ahead);
  }
}

/* The mixtures' values, and those of the step's positions by their weights. */
static void multiply_values(const Attention *job, const Tile *tile, const Room *room, int64_t at) {
  const SwarmCache *cache = job->cache;
  int kind = (int)cache->kind;
  int64_t size = value_elements(cache), step = size * 2 * bytes_of(kind);
  int64_t pairs = (least(KEYS, tile->high - at) + 1) / 2;
  Operand weights = {room->weights, KEYS, operand_bytes(kind)};
  if (is_latent(cache)) {
    mix_latents(cache, latents_of(job, tile, at), least(KEYS, tile->high - at), weights, tile->rows, room->latents,
                room->stretch.mixed);
    return;
  }
  const char *values = (const char *)cache->values +
                       (tile->span->place * cache->value_place + tile->head * cache->value_head) * bytes_of(kind) +
                       at / 2 * step;
  for (int64_t element = 0; element < size; element += WIDTH) {
    Piece piece = {values + element * 4, step, pairs, (int)(least(WIDTH, size - element) / 16), 0};
    const char *ahead = piece.weights + KEYS / 2 * step;
    multiply(kind, piece, weights, tile->rows, (Sums){room->stretch.mixed + element, size, 0}, ahead);
  }
}

/* What products go through: a factor, or one, the tangent and another one. */
typedef struct {
  vec factor, capped_factor;
  int capped;
} Rules;

static Rules rules_of(const SwarmHow *how) {
  int capped = how->softcap != 0.0f;
  double factor = capped ? (double)how->scale / how->softcap : how->scale * LOG2E;
  return (Rules){v_set((float)factor), v_set((float)(how->softcap * LOG2E)), capped};
}

INLINE vec scored(const Rules *rules, vec product) {
  vec score = v_mul(product, rules->factor);
  return rules->capped ? v_mul(tangent(score), rules->capped_factor) : score;
}

/* -infinity for positions that lie after `last` or before `first`, both counted from this step on. */
INLINE vec masked(vec score, int vector, int64_t first, int64_t last) {
  vec here = v_load(NUMBERS + vector * 16), never = v_set(-INFINITY);
  score = v_select(m_less(v_set((float)last), here), never, score);
  return first > 0 ? v_select(m_less(here, v_set((float)first)), never, score) : score;
}

INLINE void store_weights(int kind, char *weights, int vector, vec weight) {
  if (MULTIPLIES_PAIRS(kind))
    STORE_PAIRS((uint16_t *)weights + vector * 16, weight);
  else
    v_store((float *)weights + vector * 16, weight);
}

/* How a row's scores change by the keys' positions. */
typedef struct {
  int biased, rounded;
  vec slope, factor;
  float first; /* number of the step's first key: from the query on, or its position if `rounded` */
} Bias;

static Bias bias_of(const SwarmHow *how, int64_t head, int64_t place, int64_t at) {
  if (how->slopes == NULL) return (Bias){0, 0, v_set(0.0f), v_set(0.0f), 0.0f};
  float slope = how->slopes[head];
  if (how->rounded != 0.0f)
    return (Bias){1, 1, v_set(slope), v_set((float)(how->rounded * LOG2E)), (float)at};
  return (Bias){1, 0, v_set((float)(slope * LOG2E)), v_set(0.0f), (float)(at - place)};
}

INLINE vec biased(const Bias *bias, int vector, vec score) {
  vec number = v_add(v_load(NUMBERS + vector * 16), v_set(bias->first));
  if (!bias->rounded) return v_fma(number, bias->slope, score);
  number = rounded_to(SWARM_BFLOAT16, v_mul(rounded_to(SWARM_BFLOAT16, number), bias->slope));
  return v_fma(number, bias->factor, score);
}

/* A row's scores become weights. It sees the step's positions from `first` to `last`. */
INLINE void weigh(int kind, const Rules *rules, const Bias *bias, const Room *room, int64_t row, int64_t size,
                  int64_t first, int64_t last) {
  enum { VECTORS = KEYS / 16 };
  const float *products = room->scores + row * KEYS;
  char *weights = room->weights + row * KEYS * operand_bytes(kind);
  vec score[VECTORS], top = v_set(-INFINITY);
  if (last < 0 || first >= KEYS) {
    memset(weights, 0, (size_t)(KEYS * operand_bytes(kind)));
    return;
  }
  for (int v = 0; v < VECTORS; v++) score[v] = scored(rules, v_load(products + v * 16));
  if (bias->biased)
    for (int v = 0; v < VECTORS; v++) score[v] = biased(bias, v, score[v]);
  if (first > 0 || last < KEYS - 1)
    for (int v = 0; v < VECTORS; v++) score[v] = masked(score[v], v, first, last);
  for (int v = 0; v < VECTORS; v++) top = v_max(top, score[v]);
  if (m_bits(m_less(v_set(room->stretch.bounds[row] + SLACK), top))) {
    Mixture mixture = room->stretch;
    raise_bound(&mixture, row, size, top);
  }
  vec bound = v_set(room->stretch.bounds[row]), sum = v_load(room->stretch.sums + row * 16);
  for (int v = 0; v < VECTORS; v++) {
    vec weight = power_of_two(v_sub(score[v], bound));
    store_weights(kind, weights, v, weight);
    sum = v_add(sum, weight);
  }
  v_store(room->stretch.sums + row * 16, sum);
}

static void weigh_rows(const Attention *job, const Tile *tile, const Room *room, int64_t at) {
  const SwarmHow *how = job->how;
  Rules rules = rules_of(how);
  int64_t size = value_elements(job->cache);
  for (int64_t row = 0; row < tile->rows; row++) {
    int64_t place = room->places[row], last = place - at, first = first_seen(how, place) - at;
    Bias bias = bias_of(how, query_head_of(job, tile, row), place, at);
    if (job->cache->kind == SWARM_BFLOAT16)
      weigh(SWARM_BFLOAT16, &rules, &bias, room, row, size, first, last);
    else
      weigh(SWARM_FLOAT32, &rules, &bias, room, row, size, first, last);
  }
}

/* --- a tile --- */

static int make_room(const Attention *job, Room *room) {
  const SwarmCache *cache = job->cache;
  int64_t scores = ROWS_AT_ONCE * KEYS * 4, places = ROWS_AT_ONCE * 8, mixture = floats_of_mixture(cache) * 4;
  int64_t weights = MULTIPLIES_PAIRS(cache->kind) ? scores / 2 : 0;
  int64_t queries = in_whole(ROWS_AT_ONCE * key_elements(cache) * operand_bytes(cache->kind), 64), latents = 0;
  if (is_latent(cache)) {
    queries = key_elements(cache) / 2 * pair_bytes((int)cache->kind);
    latents = bytes_of_latents(cache, KEYS);
  }
  int64_t products = latents ? KEYS * WIDTH * 4 : 0;
  char *at = swarm_scratch(SWARM_SCORES, scores + weights + queries + latents + products + places + 2 * mixture);
  if (at == NULL) {
    atomic_store(job->failed, 1);
    return 0;
  }
  *room = (Room){.scores = (float *)at, .weights = weights ? at + scores : at};
  at += scores + weights;
  room->queries = at;
  at += queries;
  room->latents = (float *)at, room->products = (float *)(at + latents);
  at += latents + products;
  room->places = (int64_t *)at;
  room->stretch = mixture_at((float *)(at + places));
  room->whole = mixture_at((float *)(at + places + mixture));
  return 1;
}

static void take_rows(const Attention *job, const Tile *tile, Room *room) {
  const SwarmBatch *batch = job->batch;
  int64_t size = job->cache->key_size, kind = job->cache->kind, bytes = operand_bytes(kind);
  int64_t padded = key_elements(job->cache);
  if (is_latent(job->cache)) memset(room->queries, 0, (size_t)(padded / 2 * pair_bytes((int)kind)));
  for (int64_t row = 0; row < tile->rows; row++) {
    int64_t token = token_of(job, tile, row);
    int64_t head = query_head_of(job, tile, row);
    int64_t from = (tile->span->offset + token) * batch->query_token + head * batch->query_head;
    const char *query = (const char *)batch->query + from * bytes_of(kind);
    char *to = room->queries + row * padded * bytes;
    room->places[row] = tile->span->start + token;
    if (is_latent(job->cache)) {
      pack_query(job->cache, room->queries, row, query);
      continue;
    }
    if (bytes == bytes_of(kind))
      memcpy(to, query, (size_t)(size * bytes));
    else
      widen_row((float *)to, (const uint16_t *)query, size);
    if (padded > size) memset(to + size * bytes, 0, (size_t)bytes);
  }
}

static void attend_stretch(const Attention *job, const Tile *tile, const Room *room, int64_t stretch) {
  int64_t high = least(tile->high, (stretch + 1) * STRETCH);
  Mixture mixture = room->stretch;
  begin(&mixture, tile->rows, value_elements(job->cache));
  for (int64_t at = most(tile->low, stretch * STRETCH); at < high; at += KEYS) {
    multiply_keys(job, tile, room, at);
    weigh_rows(job, tile, room, at);
    multiply_values(job, tile, room, at);
  }
  multiplied();
}

/* The first guess of a span from which a head gets values that are not finite; the span's end without any. */
static int64_t first_spoiled(const Attention *job, const SwarmSpan *span, int64_t head, int64_t token) {
  const SwarmCache *cache = job->cache;
  const SwarmBatch *batch = job->batch;
  for (token = most(token, span->count - span->guessed); token < span->count; token++) {
    int64_t from = (span->offset + token) * batch->value_token + head * batch->value_head;
    for (int64_t i = 0; i < cache->value_size; i++) {
      uint32_t bits;
      if (cache->kind == SWARM_FLOAT32)
        memcpy(&bits, (const float *)batch->value + from + i, 4);
      else
        bits = (uint32_t)((const uint16_t *)batch->value)[from + i] << 16;
      if ((bits & 0x7f800000) == 0x7f800000) return token;
    }
  }
  return token;
}

/* Rows from a spoiled guess on get no number: its values are not stored, since the rows before it mix them, too. */
static void store_rows(const Attention *job, const Tile *tile, const Mixture *whole) {
  int64_t size = job->cache->value_size, padded = value_elements(job->cache);
  int64_t spoiled = tile->span->guessed ? first_spoiled(job, tile->span, tile->head, 0) : tile->span->count;
  for (int64_t row = 0; row < tile->rows; row++) {
    int64_t token = tile->span->offset + token_of(job, tile, row);
    int64_t to = (token * job->batch->query_heads + query_head_of(job, tile, row)) * size;
    vec sum = token_of(job, tile, row) < spoiled ? v_set(sum_of(v_load(whole->sums + row * 16))) : v_set(NAN);
    for (int64_t at = 0; at < size; at += 16) {
      vec mean = v_div(v_load(whole->mixed + row * padded + at), sum);
      mean = v_add(mean, v_set(0.0f)); /* no -0: its sign would be that of products with weight 0 */
      store_number((int)job->cache->kind, job->batch->out, to + at, mean, size - at);
    }
  }
}

static void attend_tile(const void *argument, int64_t index, int64_t next) {
  (void)next;
  const Attention *job = argument;
  Tile tile = tile_of(job, index);
  Room room;
  if (!make_room(job, &room)) return;
  take_rows(job, &tile, &room);
  begin_with_sinks(job, &tile, &room.whole);
  for (int64_t stretch = tile.low / STRETCH; stretch * STRETCH < tile.high; stretch++) {
    attend_stretch(job, &tile, &room, stretch);
    merge(&room.whole, &room.stretch, tile.rows, value_elements(job->cache));
  }
  store_rows(job, &tile, &room.whole);
}

/* --- tiles cut into stretches, where there are fewer of them than threads --- */

static Mixture part_of(const Attention *job, int64_t piece) {
  return mixture_at(job->parts + piece * floats_of_mixture(job->cache));
}

static void attend_part(const void *argument, int64_t piece, int64_t next) {
  (void)next;
  const Attention *job = argument;
  int64_t stretch = piece % job->stretches;
  Tile tile = tile_of(job, piece / job->stretches);
  Room room;
  if (stretch < tile.low / STRETCH || stretch * STRETCH >= tile.high || !make_room(job, &room)) return;
  take_rows(job, &tile, &room);
  room.stretch = part_of(job, piece);
  attend_stretch(job, &tile, &room, stretch);
}

static void merge_parts(const void *argument, int64_t index, int64_t next) {
  (void)next;
  const Attention *job = argument;
  Tile tile = tile_of(job, index);
  Room room;
  if (!make_room(job, &room)) return;
  begin_with_sinks(job, &tile, &room.whole);
  for (int64_t stretch = tile.low / STRETCH; stretch * STRETCH < tile.high; stretch++) {
    Mixture part = part_of(job, index * job->stretches + stretch);
    merge(&room.whole, &part, tile.rows, value_elements(job->cache));
  }
  store_rows(job, &tile, &room.whole);
}

/* Into how many stretches tiles are cut: 0 unless one has so much to do that other threads would wait for it. */
static int64_t stretches_of(const Attention *job, int64_t tiles, int threads) {
  int64_t longest = 0, all = 0;
  for (int64_t i = 0; i < job->num_spans; i++) {
    const SwarmSpan *span = &job->spans[i];
    int64_t stretches = (span->start + span->count + STRETCH - 1) / STRETCH;
    longest = most(longest, stretches);
    all += stretches * tiles_of_head(span, job->group) * job->cache->heads;
  }
  int waits = threads > 1 && longest > 1 && longest * 4 * threads > all;
  return waits && tiles * longest * floats_of_mixture(job->cache) * 4 <= MOST_PARTS ? longest : 0;
}

/* --- all of it --- */

static void write_latent_head(const Attention *job, const SwarmSpan *span, int64_t head) {
  const SwarmCache *cache = job->cache;
  const SwarmBatch *batch = job->batch;
  int64_t from = span->offset * batch->key_token + head * batch->key_head, bytes = bytes_of(cache->kind);
  write_latents(cache, latent_at(cache, span->place, head, span->start), (const char *)batch->key + from * bytes,
                batch->key_token, span->start, span->count);
  for (int64_t token = 0; span->guessed && (token = first_spoiled(job, span, head, token)) < span->count; token++)
    memset(latent_at(cache, span->place, head, span->start + token), 0, (size_t)(cache->key_size * bytes));
}

static void write_head(const void *argument, int64_t index, int64_t next) {
  (void)next;
  const Attention *job = argument;
  const SwarmCache *cache = job->cache;
  const SwarmBatch *batch = job->batch;
  const SwarmSpan *span = &job->spans[index / cache->heads];
  int64_t head = index % cache->heads, bytes = bytes_of(cache->kind);
  if (is_latent(cache)) {
    write_latent_head(job, span, head);
    return;
  }
  write_keys(cache, (char *)cache->keys + (span->place * cache->key_place + head * cache->key_head) * bytes,
             (const char *)batch->key + (span->offset * batch->key_token + head * batch->key_head) * bytes,
             batch->key_token, span->start, span->count);
  write_values(cache, (char *)cache->values + (span->place * cache->value_place + head * cache->value_head) * bytes,
               (const char *)batch->value + (span->offset * batch->value_token + head * batch->value_head) * bytes,
               batch->value_token, span->start, span->count);
  for (int64_t token = 0; span->guessed && (token = first_spoiled(job, span, head, token)) < span->count; token++)
    clear_value(cache, (char *)cache->values + (span->place * cache->value_place + head * cache->value_head) * bytes,
                span->start + token);
}

static int attend(const SwarmSpan *spans, int64_t num_spans, const SwarmCache *cache, const SwarmBatch *batch,
                  const SwarmHow *how, int threads) {
  if (num_spans == 0) return 0; /* what nobody asks for needs no memory */
  atomic_int failed = 0;
  int64_t tiles = 0, tokens = 0, *before = swarm_scratch(SWARM_COUNTS, num_spans * (int64_t)sizeof *before);
  if (before == NULL) return -1;
  Attention job = {spans, before, num_spans, cache, batch, how, batch->query_heads / cache->heads, 0, NULL, &failed};
  for (int64_t i = 0; i < num_spans; i++) {
    before[i] = tiles;
    tokens += spans[i].count;
    tiles += tiles_of_head(&spans[i], job.group) * cache->heads;
  }
  swarm_share(write_head, &job, num_spans * cache->heads, tokens < WORTH_SHARING ? 1 : threads);
  job.stretches = stretches_of(&job, tiles, threads);
  if (job.stretches > 0)
    job.parts = swarm_scratch(SWARM_PARTS, tiles * job.stretches * floats_of_mixture(cache) * (int64_t)sizeof(float));
  if (job.parts != NULL) {
    swarm_share(attend_part, &job, tiles * job.stretches, threads);
    if (!failed) swarm_share(merge_parts, &job, tiles, threads);
  } else {
    swarm_share(attend_tile, &job, tiles, threads);
  }
  return failed ? -1 : 0;
}

#endif
