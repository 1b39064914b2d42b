/*
 * A whole small decoder of Llama's kind, made of the kernels: embedding, then in each layer a norm, one product for
 * queries, keys and values, rotary positions, attention, a product, a norm, a gated product and one more; a norm and
 * the head at the end. Weights are of a seed; so are prompts. It answers greedily.
 */
#include "material.h"

enum {
  LAYERS = 2,
  HIDDEN = 32,
  INNER = 48,
  SIZE = 16, /* of a head */
  HEADS = 2,
  KEY_HEADS = 1,
  WORDS = 96,
  MOST = 48, /* tokens of prompt and answer */
  ANSWER = 8,
  CAPACITY = 128, /* positions of the cache: one step of attention's grid */
  QKV = (HEADS + 2 * KEY_HEADS) * SIZE
};

typedef struct {
  SwarmMatrix qkv, out, gated, down;
  float *before, *between; /* norms' weights */
  SwarmCache cache;
} Layer;

typedef struct {
  int kind;
  Layer layers[LAYERS];
  SwarmMatrix head;
  float *last;             /* norm's weights */
  void *words;             /* [word][HIDDEN] */
  void *cosines, *sines;   /* [position][SIZE] */
} Decoder;

/* What a pass writes into: [token][...] of the kind. */
typedef struct {
  void *hidden, *normed, *qkv, *attended, *more, *inner, *logits;
} Workspace;

static float *weights_of_norm(Chance *chance) {
  float *weights = numbers(SWARM_FLOAT32, HIDDEN, 0.5f, chance);
  for (int at = 0; at < HIDDEN; at++) weights[at] += 1.0f;
  return weights;
}

static Decoder make_decoder(int kind) {
  Chance chance = chance_of(20);
  Decoder decoder = {.kind = kind};
  for (int number = 0; number < LAYERS; number++) {
    Layer *layer = &decoder.layers[number];
    layer->qkv = matrix_of(kind, SWARM_LINEAR, QKV, HIDDEN, 1.2f, &chance);
    layer->out = matrix_of(kind, SWARM_LINEAR, HIDDEN, HEADS * SIZE, 1.2f, &chance);
    layer->gated = matrix_of(kind, SWARM_SILU, 2 * INNER, HIDDEN, 1.2f, &chance);
    layer->down = matrix_of(kind, SWARM_LINEAR, HIDDEN, INNER, 1.2f, &chance);
    layer->before = weights_of_norm(&chance);
    layer->between = weights_of_norm(&chance);
    int64_t of_head = CAPACITY * SIZE, of_place = KEY_HEADS * of_head, bytes = of_place * bytes_of(kind);
    layer->cache = (SwarmCache){room(bytes), room(bytes), of_place, of_head, of_place, of_head, SIZE, SIZE, KEY_HEADS,
                                kind};
  }
  decoder.head = matrix_of(kind, SWARM_LINEAR, WORDS, HIDDEN, 1.5f, &chance);
  decoder.last = weights_of_norm(&chance);
  decoder.words = numbers(kind, WORDS * HIDDEN, 1.0f, &chance);
  decoder.cosines = numbers(kind, MOST * SIZE, 1.0f, &chance);
  decoder.sines = numbers(kind, MOST * SIZE, 1.0f, &chance);
  return decoder;
}

static void multiply(const SwarmMatrix *matrix, int64_t given, const void *x, int64_t tokens, void *out) {
  const int64_t offsets[] = {0, tokens};
  const SwarmRows rows = {x, matrix->inputs, out, given, NULL};
  if (swarm_kernels()->multiply(matrix, offsets, 1, &rows, 1)) abort();
}

static void norm(const Decoder *decoder, const float *weights, const void *x, int64_t tokens, void *out) {
  const SwarmRows rows = {x, HIDDEN, out, HIDDEN, NULL};
  swarm_kernels()->rms_norm(decoder->kind, &rows, tokens, 1, HIDDEN, weights, 1e-6f, 1);
}

static void add(int kind, void *to, const void *more, int64_t count) {
  for (int64_t at = 0; at < count; at++) put(kind, to, at, get(kind, to, at) + get(kind, more, at));
}

static void attend(const Decoder *decoder, const Layer *layer, Workspace *at, int64_t start, int64_t tokens) {
  int64_t bytes = bytes_of(decoder->kind), table = start * SIZE * bytes;
  char *qkv = at->qkv;
  swarm_kernels()->turn(decoder->kind, qkv, QKV, tokens, HEADS + KEY_HEADS, SIZE, SIZE,
                        (char *)decoder->cosines + table,
             (char *)decoder->sines + table, SIZE, decoder->kind);
  const SwarmSpan span = {0, tokens, start, 0, 0};
  const SwarmBatch batch = {qkv, qkv + HEADS * SIZE * bytes, qkv + (HEADS + KEY_HEADS) * SIZE * bytes, at->attended,
                            QKV, SIZE, QKV, SIZE, QKV, SIZE, HEADS};
  const SwarmHow how = {.scale = 0.25f};
  if (swarm_kernels()->attend(&span, 1, &layer->cache, &batch, &how, 1)) abort();
}

/* Logits of the last of these tokens, whose positions begin at `start`. */
static void pass(const Decoder *decoder, Workspace *at, const int *tokens, int64_t start, int64_t count) {
  int64_t line = HIDDEN * bytes_of(decoder->kind);
  for (int64_t token = 0; token < count; token++)
    memcpy((char *)at->hidden + token * line, (char *)decoder->words + tokens[token] * line, (size_t)line);
  for (int number = 0; number < LAYERS; number++) {
    const Layer *layer = &decoder->layers[number];
    norm(decoder, layer->before, at->hidden, count, at->normed);
    multiply(&layer->qkv, QKV, at->normed, count, at->qkv);
    attend(decoder, layer, at, start, count);
    multiply(&layer->out, HIDDEN, at->attended, count, at->more);
    add(decoder->kind, at->hidden, at->more, count * HIDDEN);
    norm(decoder, layer->between, at->hidden, count, at->normed);
    multiply(&layer->gated, INNER, at->normed, count, at->inner);
    multiply(&layer->down, HIDDEN, at->inner, count, at->more);
    add(decoder->kind, at->hidden, at->more, count * HIDDEN);
  }
  norm(decoder, decoder->last, (char *)at->hidden + (count - 1) * line, 1, at->normed);
  multiply(&decoder->head, WORDS, at->normed, 1, at->logits);
}

static int likeliest(int kind, const void *logits) {
  int best = 0;
  for (int word = 1; word < WORDS; word++)
    if (get(kind, logits, word) > get(kind, logits, best)) best = word;
  return best;
}

static void answer(const Decoder *decoder, Workspace *at, int64_t number) {
  Chance chance = chance_of((uint64_t)number + 1000);
  int tokens[MOST];
  int64_t length = 8 + (int64_t)(next_of(&chance) % 33), start = 0;
  for (int64_t token = 0; token < length; token++) tokens[token] = (int)(next_of(&chance) % WORDS);
  uint64_t logits = HASH_START;
  printf("prompt %s %" PRId64 " tokens", KIND_NAMES[decoder->kind], number);
  for (int drawn = 0; drawn < ANSWER; drawn++) {
    pass(decoder, at, tokens + start, start, length - start);
    logits = hash_numbers(logits, decoder->kind, at->logits, WORDS);
    start = length;
    tokens[length++] = likeliest(decoder->kind, at->logits);
    printf(" %d", tokens[length - 1]);
  }
  printf(" logits %016" PRIx64 "\n", logits);
}

void decode_prompts(int kind, int64_t first, int64_t count) {
  Decoder decoder = make_decoder(kind);
  Workspace at = {room(MOST * HIDDEN * 4), room(MOST * HIDDEN * 4), room(MOST * QKV * 4),
                  room(MOST * HEADS * SIZE * 4),
                  room(MOST * HIDDEN * 4), room(MOST * INNER * 4),  room(MOST * WORDS * 4)};
  for (int64_t number = first; number < first + count; number++) answer(&decoder, &at, number);
}
