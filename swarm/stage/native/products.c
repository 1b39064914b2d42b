/*
 * Rows times a matrix, bfloat16 in and out, float32 between.
 *
 * Every output is one chain of additions over the inputs in their order, whatever the number of rows, of threads, the
 * cut into pieces. So a row's bits depend on nothing but the row.
 *
 * The matrix lies in blocks of 64 outputs; within a block, pair of inputs by pair of inputs, the two weights of one
 * output side by side (what VDPBF16PS multiplies): [block][pair][64][2]. A piece of work is a block: it streams from
 * memory once, and stays in the second-level cache for the rows that follow. While one segment is multiplied, the next
 * one is fetched, so that memory and arithmetic work at the same time.
 */
#if defined(__x86_64__) && defined(__linux__)
#include "products.h"

#include <immintrin.h>
#include <stdatomic.h>
#include <stddef.h>

#include "pool.h"
#include "vectors.h"

#define WIDTH 64       /* outputs of a block */
#define SEGMENT 512    /* pairs of inputs that are multiplied at a time: 128 KiB of the matrix */
#define PANEL 240      /* rows of a piece: what they are multiplied from stays in the second-level cache, too */
#define MOST_ROWS 6    /* rows × 4 vectors of sums, and what is multiplied, fill the 32 registers */
#define PAIR_BYTES (WIDTH * 4)
#define NONE -1
#define NEAR 1024      /* bytes ahead that a single tile fetches */

/* The weights of one pair, into the first-level cache. */
VECTOR void fetch_near(const char *from) {
  for (int line = 0; line < PAIR_BYTES; line += 64) _mm_prefetch(from + line, _MM_HINT_T0);
}

/*
 * Sums of so many rows over `pairs` pairs. On the way, `lines` cache lines per pair are fetched from `ahead` on, into
 * the second-level cache; with none, what this very tile reads next, as fast as memory gives it.
 */
#define DEFINE_TILE(ROWS)                                                                                       \
  TARGET static void tile_##ROWS(const uint16_t *weights, const uint16_t *x, int64_t stride, int64_t pairs,     \
                                 float *sums, int first, const char *ahead, int lines) {                        \
    __m512 sum[ROWS][4];                                                                                        \
    for (int row = 0; row < ROWS; row++)                                                                        \
      for (int part = 0; part < 4; part++)                                                                      \
        sum[row][part] = first ? _mm512_setzero_ps() : _mm512_load_ps(sums + row * WIDTH + part * 16);          \
    for (int64_t pair = 0; pair < pairs; pair++) {                                                              \
      if (lines == 0) fetch_near((const char *)weights + NEAR);                                                 \
      for (int line = 0; line < lines; line++, ahead += 64) _mm_prefetch(ahead, _MM_HINT_T1);                   \
      __m512bh w0 = load_bf16(weights), w1 = load_bf16(weights + 32);                                           \
      __m512bh w2 = load_bf16(weights + 64), w3 = load_bf16(weights + 96);                                      \
      weights += 2 * WIDTH;                                                                                     \
      _Pragma("GCC unroll 6") for (int row = 0; row < ROWS; row++) {                                            \
        __m512bh both = broadcast_pair(x + row * stride + 2 * pair);                                            \
        sum[row][0] = _mm512_dpbf16_ps(sum[row][0], w0, both);                                                  \
        sum[row][1] = _mm512_dpbf16_ps(sum[row][1], w1, both);                                                  \
        sum[row][2] = _mm512_dpbf16_ps(sum[row][2], w2, both);                                                  \
        sum[row][3] = _mm512_dpbf16_ps(sum[row][3], w3, both);                                                  \
      }                                                                                                         \
    }                                                                                                           \
    for (int row = 0; row < ROWS; row++)                                                                        \
      for (int part = 0; part < 4; part++) _mm512_store_ps(sums + row * WIDTH + part * 16, sum[row][part]);     \
  }

DEFINE_TILE(1)
DEFINE_TILE(2)
DEFINE_TILE(3)
DEFINE_TILE(4)
DEFINE_TILE(5)
DEFINE_TILE(6)

typedef void (*Tile)(const uint16_t *, const uint16_t *, int64_t, int64_t, float *, int, const char *, int);
static const Tile TILES[] = {NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6};

typedef struct {
  const SwarmMatrix *matrix;
  const uint16_t *x;
  int64_t stride, rows;
  uint16_t *out;
  int64_t out_stride;
  int64_t blocks;
  atomic_int *failed;
} Product;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* One segment times all rows; `ahead` is the segment that this thread multiplies next, or NULL. */
static void segment(const Product *job, const uint16_t *weights, int64_t first_pair, int64_t pairs, float *sums,
                    const char *ahead) {
  int64_t tiles = (job->rows + MOST_ROWS - 1) / MOST_ROWS;
  int lines = tiles == 1 || ahead == NULL ? 0 : tiles < 4 ? 2 : 1;
  for (int64_t row = 0, tile = 0; tile < tiles; tile++) {
    int64_t rows = (job->rows - row) / (tiles - tile);
    int some = tile * lines < 4 ? lines : NONE;
    TILES[rows](weights, job->x + row * job->stride + 2 * first_pair, job->stride, pairs, sums + row * WIDTH,
                first_pair == 0, ahead, some);
    if (some > 0) ahead += some * pairs * 64;
    row += rows;
  }
}

/* A piece of work: one block times some of the rows. */
static Product panel_of(const Product *all, int64_t piece) {
  Product mine = *all;
  int64_t first = piece / all->blocks * PANEL;
  mine.x += first * all->stride;
  mine.out += first * all->out_stride;
  mine.rows = least(PANEL, all->rows - first);
  return mine;
}

/* The sums of a block, [rows][64]; NULL if there is no memory for them. */
static float *multiply(const Product *job, int64_t block, int64_t next) {
  const SwarmMatrix *matrix = job->matrix;
  float *sums = swarm_scratch(job->rows * WIDTH * (int64_t)sizeof(float));
  if (sums == NULL) {
    atomic_store(job->failed, 1);
    return NULL;
  }
  int64_t pairs = matrix->inputs / 2;
  const uint16_t *weights = matrix->packed + block * pairs * 2 * WIDTH;
  for (int64_t pair = 0; pair < pairs; pair += SEGMENT) {
    int64_t count = least(SEGMENT, pairs - pair);
    const uint16_t *here = weights + pair * 2 * WIDTH;
    const uint16_t *after = pair + count < pairs ? here + count * 2 * WIDTH
                            : next >= 0          ? matrix->packed + next * pairs * 2 * WIDTH
                                                 : NULL;
    segment(job, here, pair, count, sums, (const char *)after);
  }
  return sums;
}

TARGET static __m512 with_bias(const SwarmMatrix *matrix, int64_t output, __mmask16 which, __m512 sum) {
  return matrix->bias == NULL ? sum : _mm512_add_ps(sum, _mm512_maskz_loadu_ps(which, matrix->bias + output));
}

TARGET static void linear_block(const void *argument, int64_t piece, int64_t next) {
  const Product panel = panel_of(argument, piece), *job = &panel;
  int64_t block = piece % job->blocks;
  const float *sums = multiply(job, block, next < 0 ? -1 : next % job->blocks);
  if (sums == NULL) return;
  int64_t outputs = least(WIDTH, job->matrix->outputs - block * WIDTH);
  for (int64_t row = 0; row < job->rows; row++) {
    uint16_t *out = job->out + row * job->out_stride + block * WIDTH;
    for (int64_t at = 0; at < outputs; at += 16) {
      __mmask16 which = first_of_16(outputs - at);
      __m512 sum = _mm512_load_ps(sums + row * WIDTH + at);
      store_bf16(out + at, which, with_bias(job->matrix, block * WIDTH + at, which, sum));
    }
  }
}

/* A block holds 32 outputs of the gate and the same 32 of what it gates. */
TARGET static void gated_block(const void *argument, int64_t piece, int64_t next) {
  const Product panel = panel_of(argument, piece), *job = &panel;
  int64_t block = piece % job->blocks;
  const SwarmMatrix *matrix = job->matrix;
  const float *sums = multiply(job, block, next < 0 ? -1 : next % job->blocks);
  if (sums == NULL) return;
  int64_t outputs = least(WIDTH / 2, matrix->outputs / 2 - block * (WIDTH / 2));
  for (int64_t row = 0; row < job->rows; row++) {
    uint16_t *out = job->out + row * job->out_stride + block * (WIDTH / 2);
    for (int64_t at = 0; at < outputs; at += 16) {
      __mmask16 which = first_of_16(outputs - at);
      __m512 gate = _mm512_load_ps(sums + row * WIDTH + at);
      __m512 up = _mm512_load_ps(sums + row * WIDTH + WIDTH / 2 + at);
      gate = matrix->function == SWARM_SILU ? silu(gate) : gelu_tanh(gate);
      store_bf16(out + at, which, _mm512_mul_ps(gate, up));
    }
  }
}

int swarm_linear(const SwarmMatrix *matrix, const uint16_t *x, int64_t stride, int64_t rows, uint16_t *out,
                 int64_t out_stride, int threads) {
  atomic_int failed = 0;
  int64_t blocks = (matrix->outputs + WIDTH - 1) / WIDTH, panels = (rows + PANEL - 1) / PANEL;
  Product job = {matrix, x, stride, rows, out, out_stride, blocks, &failed};
  swarm_share(matrix->function == SWARM_LINEAR ? linear_block : gated_block, &job, blocks * panels, threads);
  return failed ? -1 : 0;
}
#endif
