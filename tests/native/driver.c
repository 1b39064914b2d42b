/*
 * Computes many cases of every kernel with one variant and prints a line for each: its name and a hash of its bits.
 * Lines of variants that promise the same bits are the same, on whatever processor they ran.
 *
 * driver VARIANT cases
 * driver VARIANT decode float32|bfloat16 FIRST COUNT
 *
 * A new kernel gets a function here and a line in main.
 */
#include "material.h"

#define LENGTH(array) ((int64_t)(sizeof(array) / sizeof *(array)))

static const int THREADS[] = {1, 3};

static void tell(const char *name, int kind, const void *data, int64_t count) {
  printf("%s %016" PRIx64 "\n", name, hash_numbers(HASH_START, kind, data, count));
}

/* --- products --- */

static void dense(int kind, int64_t outputs, int64_t inputs, int biased) {
  static const int64_t ROWS[] = {1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 16, 17, 31, 33, 64};
  Chance chance = chance_of((uint64_t)(outputs * 7919 + inputs));
  SwarmMatrix matrix = matrix_of(kind, SWARM_LINEAR, outputs, inputs, 1.0f, &chance);
  void *x = numbers(kind, 64 * inputs, 3.0f, &chance), *out = room(64 * outputs * bytes_of(kind));
  float *bias = numbers(SWARM_FLOAT32, outputs, 1.0f, &chance);
  matrix.bias = biased ? bias : NULL;
  for (int64_t some = 0; some < LENGTH(ROWS); some++) {
    for (int64_t t = 0; t < LENGTH(THREADS); t++) {
      char name[128];
      const int64_t offsets[] = {0, ROWS[some]};
      const SwarmRows rows = {x, inputs, out, outputs, NULL};
      if (swarm_kernels()->multiply(&matrix, offsets, 1, &rows, THREADS[t])) abort();
      snprintf(name, sizeof name, "dense %s %" PRId64 "x%" PRId64 " bias=%d rows=%" PRId64 " threads=%d",
               KIND_NAMES[kind], outputs, inputs, biased, ROWS[some], THREADS[t]);
      tell(name, kind, out, ROWS[some] * outputs);
    }
  }
  free((void *)matrix.packed), free(x), free(out), free(bias);
}

/* Matrices by group, some of them with no rows. */
static void grouped(int kind, int64_t function, int64_t outputs, int64_t inputs) {
  enum { GROUPS = 5 };
  static const int64_t OFFSETS[] = {0, 3, 3, 10, 11, 29};
  Chance chance = chance_of((uint64_t)(outputs * 104729 + inputs + function));
  SwarmMatrix matrices[GROUPS];
  int64_t given = is_gated(function) ? outputs / 2 : outputs, all = OFFSETS[GROUPS];
  for (int group = 0; group < GROUPS; group++)
    matrices[group] = matrix_of(kind, function, outputs, inputs, 0.7f, &chance);
  void *x = numbers(kind, all * inputs, 2.0f, &chance), *out = room(all * given * bytes_of(kind));
  for (int64_t t = 0; t < LENGTH(THREADS); t++) {
    char name[128];
    const SwarmRows rows = {x, inputs, out, given, NULL};
    if (swarm_kernels()->multiply(matrices, OFFSETS, GROUPS, &rows, THREADS[t])) abort();
    snprintf(name, sizeof name, "grouped %s %" PRId64 "x%" PRId64 " function=%" PRId64 " threads=%d", KIND_NAMES[kind],
             outputs, inputs, function, THREADS[t]);
    tell(name, kind, out, all * given);
  }
  for (int group = 0; group < GROUPS; group++) free((void *)matrices[group].packed);
  free(x), free(out);
}

static void products(int kind) {
  static const int64_t SHAPES[][2] = {{1, 64}, {96, 64}, {251, 97}, {33, 320}, {130, 515}, {64, 1030}, {70, 1}};
  for (int64_t shape = 0; shape < LENGTH(SHAPES); shape++) dense(kind, SHAPES[shape][0], SHAPES[shape][1], shape % 2);
  static const int64_t FUNCTIONS[] = {SWARM_LINEAR, SWARM_SILU, SWARM_GELU_TANH, SWARM_GELU, SWARM_CLAMPED,
                                      SWARM_ALONE + SWARM_SILU, SWARM_ALONE + SWARM_SOFTCAP};
  for (int64_t function = 0; function < LENGTH(FUNCTIONS); function++) {
    grouped(kind, FUNCTIONS[function], 90, 71);
    grouped(kind, FUNCTIONS[function], 192, 530);
  }
}

/* --- functions --- */

/* One float32 of 509 is tried, and those at the edges; a line for every sixteenth of them. */
static void sweep(int64_t function) {
  enum { COUNT = 4096, STEP = 509 };
  static const uint32_t EDGES[] = {0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007fffff, 0x00800000, 0x80800000,
                                   0x7f7fffff, 0xff7fffff, 0x7f800000, 0xff800000, 0x7fc00000, 0x3f800000, 0xbf800000,
                                   0x42b0c0a5, 0xc2b0c0a5, 0x42ae0000, 0xc2ae0000, 0x42b00000, 0xc2b00000};
  float x[COUNT], out[COUNT];
  uint64_t at = 0;
  for (uint64_t part = 1; part <= 16; part++) {
    uint64_t hash = HASH_START;
    while (at < part << 28) {
      int64_t count = 0;
      for (; count < COUNT - LENGTH(EDGES) && at < part << 28; count++, at += STEP) x[count] = number_of((uint32_t)at);
      for (int64_t edge = 0; edge < LENGTH(EDGES); edge++) x[count++] = number_of(EDGES[edge]);
      swarm_kernels()->activate(SWARM_FLOAT32, function, x, out, count);
      hash = hash_numbers(hash, SWARM_FLOAT32, out, count);
    }
    printf("function=%" PRId64 " part=%" PRIu64 " %016" PRIx64 "\n", function, part, hash);
  }
}

/* Every bfloat16. */
static void sweep_short(int64_t function) {
  enum { COUNT = 1 << 16 };
  uint16_t *x = room(COUNT * 2), *out = room(COUNT * 2);
  char name[64];
  for (int at = 0; at < COUNT; at++) x[at] = (uint16_t)at;
  swarm_kernels()->activate(SWARM_BFLOAT16, function, x, out, COUNT);
  snprintf(name, sizeof name, "function=%" PRId64 " of bfloat16", function);
  tell(name, SWARM_BFLOAT16, out, COUNT);
  free(x), free(out);
}

/* --- layers with a state --- */

static void recurrences(int kind, int64_t keys) {
  enum { ROWS = 7, CHANNELS = 100, TAPS = 4, HEADS = 4 };
  const int64_t state = TAPS * CHANNELS + HEADS * keys * CHANNELS;
  Chance chance = chance_of(31);
  void *rows = numbers(kind, ROWS * CHANNELS, 2.0f, &chance), *out = room(ROWS * CHANNELS * 4 * HEADS);
  float *before = numbers(SWARM_FLOAT32, state, 1.0f, &chance), *after = room(state * 4);
  float *weight = numbers(SWARM_FLOAT32, keys * CHANNELS, 1.0f, &chance);
  float *wide = numbers(SWARM_FLOAT32, ROWS * HEADS * (keys + CHANNELS), 1.0f, &chance);
  float *decay = room(ROWS * HEADS * keys * 4), *narrow = wide + ROWS * HEADS * CHANNELS;
  for (int64_t at = 0; at < ROWS * HEADS * keys; at++) decay[at] = 1.0f / (float)(1 + at % 7);
  const SwarmSegment segments[] = {{1, 6, before, after}};
  char name[64];
  memset(after, 0, state * 4);
  for (int64_t function = 0; function < 2; function++) {
    const SwarmConvolution convolution = {segments, 1, 3, kind, rows, CHANNELS, out, CHANNELS, CHANNELS, TAPS,
                                          function, weight, function ? before : NULL};
    swarm_kernels()->convolve(&convolution, 2);
    snprintf(name, sizeof name, "convolve %s function=%" PRId64 " keys=%" PRId64, KIND_NAMES[kind], function, keys);
    tell(name, kind, (char *)out + CHANNELS * bytes_of(kind), 6 * CHANNELS);
    tell("  its state", SWARM_FLOAT32, after, state);
  }
  for (int way = 0; way < 4 && kind == SWARM_FLOAT32; way++) {
    const SwarmRecurrence recurrence = {
        segments, 1, 3, narrow, narrow + 2, wide, HEADS / 2 * keys, HEADS / 2 * keys, HEADS * CHANNELS, decay,
        way % 2 ? decay : NULL, out, HEADS, HEADS / 2, keys, CHANNELS, way / 2 ? keys : 1};
    swarm_kernels()->recur(&recurrence, 2);
    snprintf(name, sizeof name, "recur way=%d keys=%" PRId64, way, keys);
    tell(name, SWARM_FLOAT32, (float *)out + HEADS * CHANNELS, 6 * HEADS * CHANNELS);
    tell("  its state", SWARM_FLOAT32, after, state);
  }
  const SwarmScan scan = {segments, 1, 3, wide, decay, weight, narrow, narrow + 5, keys, out, CHANNELS / 4, keys};
  swarm_kernels()->scan(&scan, 2);
  tell("scan", SWARM_FLOAT32, (float *)out + CHANNELS / 4, 6 * (CHANNELS / 4));
  tell("  its state", SWARM_FLOAT32, after, state);
  free(rows), free(out), free(before), free(after), free(weight), free(wide), free(decay);
}

/* --- norms --- */

static void norms(int kind) {
  static const int64_t SIZES[] = {1, 16, 72, 96, 251, 1000};
  enum { ROWS = 5, COUNT = 2 };
  for (int64_t s = 0; s < LENGTH(SIZES); s++) {
    for (int scale = -2; scale <= 2; scale++) {
      int64_t size = SIZES[s], all = ROWS * COUNT * size;
      static const float SCALES[] = {1e-20f, 1e-3f, 1.0f, 300.0f, 1e15f};
      Chance chance = chance_of((uint64_t)(size * 10 + scale + 2));
      void *x = numbers(kind, all, SCALES[scale + 2], &chance), *out = room(all * bytes_of(kind));
      float *weight = numbers(SWARM_FLOAT32, size, 2.0f, &chance), *bias = numbers(SWARM_FLOAT32, size, 1.0f, &chance);
      const SwarmRows rows = {x, COUNT * size, out, COUNT * size, NULL};
      char name[128];
      for (int rounded = 0; rounded < 2; rounded++) {
        swarm_kernels()->rms_norm(kind, &rows, ROWS, COUNT, size, weight, 1e-6f, rounded);
        snprintf(name, sizeof name, "rms_norm %s size=%" PRId64 " scale=%d rounded=%d", KIND_NAMES[kind], size, scale,
                 rounded);
        tell(name, kind, out, all);
      }
      const SwarmRows single = {x, size, out, size, NULL};
      for (int biased = 0; biased < 2; biased++) {
        swarm_kernels()->layer_norm(kind, &single, ROWS * COUNT, size, weight, biased ? bias : NULL, 1e-5f);
        snprintf(name, sizeof name, "layer_norm %s size=%" PRId64 " scale=%d bias=%d", KIND_NAMES[kind], size, scale,
                 biased);
        tell(name, kind, out, all);
      }
      free(x), free(out), free(weight), free(bias);
    }
  }
}

/* --- rotary positions --- */

/* `table`: numbers that tables have for each row, as many as are turned or half of them; `wide`: of which kind. */
static void turn_rows(int kind, int64_t size, int64_t turned, int64_t table, int wide) {
  enum { ROWS = 7, HEADS = 3 };
  Chance chance = chance_of((uint64_t)(size * 1000 + turned));
  void *x = numbers(kind, ROWS * HEADS * size, 4.0f, &chance);
  void *cosines = numbers(wide, ROWS * table, 1.0f, &chance), *sines = numbers(wide, ROWS * table, 1.0f, &chance);
  char name[128];
  swarm_kernels()->turn(kind, x, HEADS * size, ROWS, HEADS - 1, size, turned, cosines, sines, table, wide);
  snprintf(name, sizeof name, "turn %s size=%" PRId64 " turned=%" PRId64 " table=%" PRId64 " of %s", KIND_NAMES[kind],
           size, turned, table, KIND_NAMES[wide]);
  tell(name, kind, x, ROWS * HEADS * size);
  free(x), free(cosines), free(sines);
}

static void rope(int kind) {
  static const int64_t SIZES[][2] = {{16, 16}, {64, 64}, {80, 20}, {128, 128}, {20, 20}, {96, 36}}; /* head, turned */
  for (int64_t s = 0; s < LENGTH(SIZES); s++) {
    turn_rows(kind, SIZES[s][0], SIZES[s][1], SIZES[s][1], kind);
    turn_rows(kind, SIZES[s][0], SIZES[s][1], SIZES[s][1] / 2, SWARM_FLOAT32);
  }
}

/* --- experts --- */

static void mixture(int kind, int64_t experts, int64_t choices, int64_t size) {
  enum { ROWS = 40, MOST = 8 };
  Chance chance = chance_of((uint64_t)(experts * 100 + choices));
  void *logits = numbers(kind, ROWS * experts, 6.0f, &chance), *out = room(ROWS * size * bytes_of(kind));
  void *answers = numbers(kind, ROWS * choices * size, 3.0f, &chance);
  int32_t chosen[ROWS * MOST];
  float weights[ROWS * MOST];
  int64_t slots[ROWS * MOST];
  char name[128];
  for (int ways = 0; ways < 4; ways++) {
    swarm_kernels()->route(kind, logits, experts, ROWS, experts, choices, ways % 2, ways / 2, chosen, weights);
    snprintf(name, sizeof name, "route %s %" PRId64 " of %" PRId64 " normed=%d rounded=%d", KIND_NAMES[kind], choices,
             experts, ways % 2, ways / 2);
    uint64_t hash = hash_bytes(HASH_START, chosen, ROWS * choices * 4);
    printf("%s %016" PRIx64 "\n", name, hash_numbers(hash, SWARM_FLOAT32, weights, ROWS * choices));
  }
  for (int64_t slot = 0; slot < ROWS * choices; slot++) slots[slot] = slot % 11 == 5 ? -1 : ROWS * choices - 1 - slot;
  const SwarmRows rows = {answers, size, out, size, NULL};
  swarm_kernels()->combine(kind, &rows, slots, weights, choices, ROWS, size);
  snprintf(name, sizeof name, "combine %s %" PRId64 " of %" PRId64, KIND_NAMES[kind], choices, experts);
  tell(name, kind, out, ROWS * size);
  free(logits), free(answers), free(out);
}

/* --- attention --- */

typedef struct {
  int64_t size, value_size, key_heads, group, window;
  float softcap;
  int sinks;
} Attended;

/* Two sequences side by side: chunks of the first beside single tokens of the second. */
static void attention_case(int kind, const Attended *how, const int64_t (*steps)[2], int64_t num_steps) {
  enum { CAPACITY = 1280, MOST = 1100 };
  int64_t heads = how->key_heads, queries = heads * how->group, bytes = bytes_of(kind);
  int64_t keys = CAPACITY * ((how->size + 1) / 2 * 2), values = CAPACITY * ((how->value_size + 15) / 16 * 16);
  Chance chance = chance_of((uint64_t)(how->size * 100 + how->value_size + how->window));
  SwarmCache cache = {room(2 * heads * keys * bytes), room(2 * heads * values * bytes),
                      heads * keys, keys, heads * values, values, how->size, how->value_size, heads, kind};
  float *sinks = numbers(SWARM_FLOAT32, queries, 2.0f, &chance);
  const SwarmHow rules = {.scale = 0.21f, .softcap = how->softcap, .window = how->window, .sinks = how->sinks ? sinks : NULL};
  void *query = numbers(kind, MOST * queries * how->size, 3.0f, &chance);
  void *key = numbers(kind, MOST * heads * how->size, 3.0f, &chance);
  void *value = numbers(kind, MOST * heads * how->value_size, 1.0f, &chance);
  void *out = room(MOST * queries * how->value_size * bytes);
  int64_t at[2] = {0, 0};
  for (int64_t step = 0; step < num_steps; step++) {
    SwarmSpan spans[2];
    int64_t num_spans = 0, tokens = 0;
    for (int64_t place = 0; place < 2; place++) {
      if (steps[step][place] == 0) continue;
      spans[num_spans++] = (SwarmSpan){tokens, steps[step][place], at[place], place, 0};
      tokens += steps[step][place];
      at[place] += steps[step][place];
    }
    const SwarmBatch batch = {query, key, value, out, queries * how->size, how->size, heads * how->size, how->size,
                              heads * how->value_size, how->value_size, queries};
    for (int64_t t = 0; t < LENGTH(THREADS); t++) {
      char name[192];
      if (swarm_kernels()->attend(spans, num_spans, &cache, &batch, &rules, THREADS[t])) abort();
      snprintf(name, sizeof name,
               "attend %s size=%" PRId64 ",%" PRId64 " heads=%" PRId64 "x%" PRId64 " window=%" PRId64
               " softcap=%g sinks=%d step=%" PRId64 " of %" PRId64 " threads=%d",
               KIND_NAMES[kind], how->size, how->value_size, heads, how->group, how->window, (double)how->softcap,
               how->sinks, step, num_steps, THREADS[t]);
      tell(name, kind, out, tokens * queries * how->value_size);
    }
  }
  free(cache.keys), free(cache.values), free(sinks), free(query), free(key), free(value), free(out);
}

static void attention(int kind) {
  static const int64_t STEPS[][2] = {{37, 1}, {0, 20}, {90, 1}, {1, 1}, {7, 0}, {1, 1}};
  static const int64_t LONG[][2] = {{1030, 0}, {3, 1}, {1, 0}};
  static const Attended HOW[] = {{16, 16, 2, 2, 0, 0.0f, 0},  {64, 64, 1, 3, 0, 0.0f, 1}, {20, 36, 2, 1, 40, 0.0f, 0},
                                 {33, 16, 1, 4, 0, 5.0f, 0}, {96, 80, 1, 1, 33, 9.0f, 1}};
  for (int64_t how = 0; how < LENGTH(HOW); how++) attention_case(kind, &HOW[how], STEPS, LENGTH(STEPS));
  attention_case(kind, &HOW[0], LONG, LENGTH(LONG));
}

/* --- attention to latents --- */

typedef struct {
  int64_t size, value_size, queries, window;
  float softcap;
  int sinks;
} Latent;

/* Two sequences side by side, whose keys are latents; the last token of the first one's long chunks is a guess. */
static void latent_case(int kind, const Latent *how, const int64_t (*steps)[2], int64_t num_steps) {
  enum { CAPACITY = 1280, MOST = 1100 };
  int64_t bytes = bytes_of(kind), row = (how->size + 15) / 16 * 16, place = CAPACITY * row;
  Chance chance = chance_of((uint64_t)(how->size * 1000 + how->value_size * 10 + how->queries));
  SwarmCache cache = {room(2 * place * bytes), NULL, place, place, 0, 0, how->size, how->value_size, 1, kind};
  float *sinks = numbers(SWARM_FLOAT32, how->queries, 2.0f, &chance);
  const SwarmHow rules = {.scale = 0.17f, .softcap = how->softcap, .window = how->window,
                          .sinks = how->sinks ? sinks : NULL};
  void *query = numbers(kind, MOST * how->queries * how->size, 3.0f, &chance);
  void *key = numbers(kind, MOST * how->size, 3.0f, &chance);
  void *out = room(MOST * how->queries * how->value_size * bytes);
  int64_t at[2] = {0, 0};
  for (int64_t step = 0; step < num_steps; step++) {
    SwarmSpan spans[2];
    int64_t num_spans = 0, tokens = 0;
    for (int64_t number = 0; number < 2; number++) {
      if (steps[step][number] == 0) continue;
      spans[num_spans++] = (SwarmSpan){tokens, steps[step][number], at[number], number, steps[step][number] > 30};
      tokens += steps[step][number];
      at[number] += steps[step][number];
    }
    const SwarmBatch batch = {query, key, key, out, how->queries * how->size, how->size, how->size, how->size,
                              how->size, how->size, how->queries};
    for (int64_t t = 0; t < LENGTH(THREADS); t++) {
      char name[192];
      if (swarm_kernels()->attend(spans, num_spans, &cache, &batch, &rules, THREADS[t])) abort();
      snprintf(name, sizeof name,
               "attend %s latents size=%" PRId64 ",%" PRId64 " heads=%" PRId64 " window=%" PRId64
               " softcap=%g sinks=%d step=%" PRId64 " of %" PRId64 " threads=%d",
               KIND_NAMES[kind], how->size, how->value_size, how->queries, how->window, (double)how->softcap, how->sinks,
               step, num_steps, THREADS[t]);
      tell(name, kind, out, tokens * how->queries * how->value_size);
    }
  }
  free(cache.keys), free(sinks), free(query), free(key), free(out);
}

static void latents(int kind) {
  static const int64_t STEPS[][2] = {{37, 1}, {0, 20}, {90, 1}, {1, 1}, {7, 0}, {1, 1}};
  static const int64_t LONG[][2] = {{1030, 0}, {3, 1}, {1, 0}};
  static const Latent HOW[] = {{48, 32, 4, 0, 0.0f, 0}, {80, 64, 16, 0, 0.0f, 1}, {37, 20, 5, 40, 0.0f, 0},
                               {33, 16, 1, 0, 5.0f, 0}, {300, 256, 3, 0, 0.0f, 0}};
  for (int64_t how = 0; how < LENGTH(HOW); how++) latent_case(kind, &HOW[how], STEPS, LENGTH(STEPS));
  latent_case(kind, &HOW[0], LONG, LENGTH(LONG));
}

/* --- draws --- */

/* Rows of one vocabulary, each with other parameters: tokens, and log probabilities to the last bit. */
static void draws(int kind, int64_t words) {
  enum { ROWS = 24, BEST = 4, PAST = 40 };
  Chance chance = chance_of((uint64_t)words);
  void *logits = numbers(kind, ROWS * words, 14.0f, &chance);
  int64_t history[PAST], biased[] = {1, words / 2, words + 5}, forbidden[] = {0, 2}, ids[ROWS][1 + BEST];
  double biases[] = {2.5, -4.0, 1.0}, logs[ROWS][1 + BEST];
  SwarmDraw rows[ROWS];
  uint32_t *allowed = calloc((size_t)words / 32 + 1, sizeof *allowed); /* about a quarter of the words */
  for (int64_t at = 0; at <= words / 32; at++) allowed[at] = (uint32_t)(next_of(&chance) & next_of(&chance));
  allowed[0] |= 8;
  for (int at = 0; at < PAST; at++) history[at] = (int64_t)(next_of(&chance) % (uint64_t)words);
  for (int row = 0; row < ROWS; row++) {
    rows[row] = (SwarmDraw){.logits = (char *)logits + row * words * bytes_of(kind), .history = history,
                            .num_history = row % 3 ? PAST : 0, .num_prompt = row % 3 ? 11 : 0, .biased = biased,
                            .biases = biases, .num_biased = row % 4 == 1 ? 3 : 0, .forbidden = forbidden,
                            .num_forbidden = row % 5 == 2 ? 2 : 0, .allowed = row % 7 > 4 ? allowed : NULL, .seed = (uint64_t)row * 77, .position = 5 + row % 7,
                            .greedy = row % 8 == 0, .top_k = row % 4 == 2 ? 7 : 0, .temperature = 0.3 + 0.2 * row,
                            .top_p = row % 2 ? 0.9 : 1.0, .min_p = row % 6 == 3 ? 0.03 : 0.0,
                            .repetition = row % 3 ? 1.2 : 1.0, .presence = row % 3 == 1 ? 0.6 : 0.0,
                            .frequency = row % 3 == 2 ? 0.3 : 0.0, .num_best = BEST, .ids = ids[row],
                            .logs = logs[row]};
  }
  for (int64_t t = 0; t < LENGTH(THREADS); t++) {
    memset(ids, 0, sizeof ids);
    memset(logs, 0, sizeof logs);
    if (swarm_kernels()->draw(kind, words, rows, ROWS, THREADS[t])) abort();
    for (int row = 0; row < ROWS; row++) {
      uint64_t hash = hash_bytes(HASH_START, &rows[row].token, sizeof rows[row].token);
      hash = hash_bytes(hash_bytes(hash, ids[row], sizeof ids[row]), logs[row], sizeof logs[row]);
      printf("draw %s words=%" PRId64 " row=%d threads=%d %016" PRIx64 "\n", KIND_NAMES[kind], words, row, THREADS[t],
             hash);
    }
  }
  free(logits), free(allowed);
}

static void cases(void) {
  for (int kind = SWARM_FLOAT32; kind <= SWARM_BFLOAT16; kind++) {
    products(kind);
    quantized_cases(kind);
    norms(kind);
    recurrences(kind, 19);
    recurrences(kind, 300);
    rope(kind);
    mixture(kind, 5, 2, 33);
    mixture(kind, 128, 8, 96);
    attention(kind);
    latents(kind);
    draws(kind, 50);
    draws(kind, 5003);
  }
  for (int64_t function = SWARM_SILU; function <= SWARM_SOFTPLUS; function++) {
    if (function == SWARM_SOFTCAP || function == SWARM_CLAMPED) continue; /* not of a number alone */
    sweep(function);
    sweep_short(function);
  }
}

int main(int count, char **arguments) {
  if (count >= 2 && swarm_choose(arguments[1])) {
    fprintf(stderr, "no variant %s runs here\n", arguments[1]);
    return 2;
  }
  if (count == 3 && strcmp(arguments[2], "cases") == 0) {
    cases();
  } else if (count == 6 && strcmp(arguments[2], "decode") == 0) {
    int kind = strcmp(arguments[3], KIND_NAMES[SWARM_BFLOAT16]) == 0 ? SWARM_BFLOAT16 : SWARM_FLOAT32;
    decode_prompts(kind, atoll(arguments[4]), atoll(arguments[5]));
  } else {
    fprintf(stderr, "usage: driver VARIANT cases | driver VARIANT decode KIND FIRST COUNT\n");
    return 64;
  }
  return 0;
}
