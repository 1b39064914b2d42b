/*
 * Tiles of bfloat16 rows, by the instruction that multiplies matrices (TDPBF16PS, AMX): up to 16 rows × 16 pairs of
 * inputs times 16 pairs × 16 outputs, added to 16 × 16 sums.
 *
 * Every output is one chain over the inputs in steps of 16 pairs, the last of which may have fewer. A step sums its
 * even and its odd inputs by themselves, adds the two, and adds that to the chain. So a row's bits depend neither on
 * the number of rows, nor on how many of them are taken at once, nor on the cut into pieces, as long as pieces are cut
 * at multiples of 16 pairs. They are the kernel's own, not those of tiles.h or tiles_bf16.h.
 *
 * The processor has eight tiles, whose shapes are set for the thread. Up to 16 rows take four tiles of sums beside each
 * other, so that what is read of the matrix is read once; 17 to 32 rows take two by two, four products for four loads.
 *
 * What is set stays, and would be in the way of others who use tiles (oneDNN), and of switching threads (8 KiB). So
 * whoever has multiplied says multiplied() (operands.h) at the end of a piece of work.
 */
#ifndef SWARM_TILES_AMX_H
#define SWARM_TILES_AMX_H

#include "tiles.h"

#define TILE_PAIRS 16  /* pairs of inputs in a tile, and its most rows */
#define TWO_TILES 32   /* rows of two tiles */
#define TILES_AHEAD 4  /* how far ahead of itself whoever reads the matrix only once fetches: 16 KiB */
#define PANEL 256      /* rows of a piece of work: whole pairs of tiles */

/*
 * Tiles 0 to 3 hold sums, 4 rows, 5 to 7 the matrix; with more than 16 rows 4 and 5 rows, 6 and 7 the matrix. A tile's
 * number is part of the instruction, so these are macros. Memory is named as clobbered: the compiler can't know what a
 * tile reads.
 */
#define TILE_ZERO(tile) __asm__ volatile("tilezero %%tmm" #tile ::)
#define TILE_LOAD(tile, from, step) \
  __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #tile ::"r"(from), "r"((int64_t)(step)) : "memory")
#define TILE_STORE(tile, to, step) \
  __asm__ volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(to), "r"((int64_t)(step)) : "memory")
#define TILE_MULTIPLY(sums, rows, weights) \
  __asm__ volatile("tdpbf16ps %%tmm" #weights ", %%tmm" #rows ", %%tmm" #sums ::)
#define TILE_BEGIN(tile, first, sums, step) \
  do {                                      \
    if (first)                              \
      TILE_ZERO(tile);                      \
    else                                    \
      TILE_LOAD(tile, sums, step);          \
  } while (0)

/* What LDTILECFG reads. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t row_bytes[16];
  uint8_t rows[16];
} TileShapes;

/* What this thread's tiles are set for: rows * TWO_TILES + pairs; 0 if nothing is set. */
static _Thread_local int64_t shapes_of_this_thread;

static void set_tile(TileShapes *shapes, int tile, int64_t rows, int64_t bytes) {
  shapes->rows[tile] = (uint8_t)rows;
  shapes->row_bytes[tile] = (uint16_t)(rows > 0 ? bytes : 0);
}

/* Set the tiles for up to 32 rows and up to 16 pairs. That empties them. */
static void shape_tiles(int64_t rows, int64_t pairs) {
  int64_t wanted = rows * TWO_TILES + pairs;
  if (shapes_of_this_thread == wanted) return;
  int wide = rows > TILE_PAIRS;
  int64_t first = wide ? TILE_PAIRS : rows, second = wide ? rows - TILE_PAIRS : rows;
  TileShapes shapes = {.palette = 1};
  for (int tile = 0; tile < 4; tile++) set_tile(&shapes, tile, tile < 2 ? first : second, 64);
  set_tile(&shapes, 4, first, pairs * 4);
  set_tile(&shapes, 5, wide ? second : pairs, wide ? pairs * 4 : 64);
  for (int tile = 6; tile < 8; tile++) set_tile(&shapes, tile, pairs, 64);
  __asm__ volatile("ldtilecfg %0" ::"m"(shapes));
  shapes_of_this_thread = wanted;
}

static void release_tiles(void) {
  if (shapes_of_this_thread == 0) return;
  __asm__ volatile("tilerelease" ::: "memory");
  shapes_of_this_thread = 0;
}

/* Some steps of a product: where its weights, its rows and its sums are. */
typedef struct {
  const char *weights;
  int64_t step; /* bytes from pair to pair */
  const uint16_t *x;
  int64_t stride; /* elements from row to row */
  int64_t steps;
  int64_t pairs; /* in each step: TILE_PAIRS, or what is left of the inputs */
  float *sums;
  int64_t sums_stride;
  int first, vectors;
} TileRun;

/* What is fetched on the way: in each step some lines from `ahead` on; or, by whoever reads the matrix only once, what
 * it will read itself TILES_AHEAD later, then what comes after all (`ahead`, if not NULL). */
typedef struct {
  const char *ahead;
  int64_t from, to; /* lines of each step */
  int once;
} TileFetch;

INLINE void fetch_in_step(const TileRun *run, const TileFetch *fetch, int64_t at) {
  int64_t bytes = TILE_PAIRS * run->step;
  if (!fetch->once) {
    for (int64_t line = fetch->from; line < fetch->to; line++) fetch_far(fetch->ahead + at * bytes + line * 64);
    return;
  }
  int64_t later = at + TILES_AHEAD;
  const char *weights = run->weights;
  if (later >= run->steps) {
    if (fetch->ahead == NULL) return;
    weights = fetch->ahead;
    later -= run->steps;
  }
  weights += later * bytes;
  for (int pair = 0; pair < TILE_PAIRS; pair++)
    for (int vector = 0; vector < run->vectors; vector++) fetch_near(weights + pair * run->step + vector * 64);
}

/* Up to 16 rows. */
static void run_narrow(const TileRun *run, const TileFetch *fetch) {
  int64_t sums_step = run->sums_stride * (int64_t)sizeof(float), x_step = run->stride * 2, step = run->step;
  int vectors = run->vectors;
  TILE_BEGIN(0, run->first, run->sums, sums_step);
  if (vectors > 1) TILE_BEGIN(1, run->first, run->sums + 16, sums_step);
  if (vectors > 2) TILE_BEGIN(2, run->first, run->sums + 32, sums_step);
  if (vectors > 3) TILE_BEGIN(3, run->first, run->sums + 48, sums_step);
  for (int64_t at = 0; at < run->steps; at++) {
    const char *weights = run->weights + at * TILE_PAIRS * step;
    fetch_in_step(run, fetch, at);
    TILE_LOAD(4, run->x + at * 2 * TILE_PAIRS, x_step);
    TILE_LOAD(5, weights, step);
    TILE_MULTIPLY(0, 4, 5);
    if (vectors > 1) {
      TILE_LOAD(6, weights + 64, step);
      TILE_MULTIPLY(1, 4, 6);
    }
    if (vectors > 2) {
      TILE_LOAD(7, weights + 128, step);
      TILE_MULTIPLY(2, 4, 7);
    }
    if (vectors > 3) {
      TILE_LOAD(5, weights + 192, step);
      TILE_MULTIPLY(3, 4, 5);
    }
  }
  TILE_STORE(0, run->sums, sums_step);
  if (vectors > 1) TILE_STORE(1, run->sums + 16, sums_step);
  if (vectors > 2) TILE_STORE(2, run->sums + 32, sums_step);
  if (vectors > 3) TILE_STORE(3, run->sums + 48, sums_step);
}

/* 17 to 32 rows, and one or two vectors. */
static void run_wide(const TileRun *run, const TileFetch *fetch) {
  int64_t sums_step = run->sums_stride * (int64_t)sizeof(float), x_step = run->stride * 2, step = run->step;
  float *low = run->sums + TILE_PAIRS * run->sums_stride;
  const uint16_t *x_low = run->x + TILE_PAIRS * run->stride;
  int two = run->vectors > 1;
  TILE_BEGIN(0, run->first, run->sums, sums_step);
  TILE_BEGIN(2, run->first, low, sums_step);
  if (two) {
    TILE_BEGIN(1, run->first, run->sums + 16, sums_step);
    TILE_BEGIN(3, run->first, low + 16, sums_step);
  }
  for (int64_t at = 0; at < run->steps; at++) {
    const char *weights = run->weights + at * TILE_PAIRS * step;
    fetch_in_step(run, fetch, at);
    TILE_LOAD(4, run->x + at * 2 * TILE_PAIRS, x_step);
    TILE_LOAD(5, x_low + at * 2 * TILE_PAIRS, x_step);
    TILE_LOAD(6, weights, step);
    TILE_MULTIPLY(0, 4, 6);
    TILE_MULTIPLY(2, 5, 6);
    if (two) {
      TILE_LOAD(7, weights + 64, step);
      TILE_MULTIPLY(1, 4, 7);
      TILE_MULTIPLY(3, 5, 7);
    }
  }
  TILE_STORE(0, run->sums, sums_step);
  TILE_STORE(2, low, sums_step);
  if (two) {
    TILE_STORE(1, run->sums + 16, sums_step);
    TILE_STORE(3, low + 16, sums_step);
  }
}

/* The next of `passes` over the weights: each fetches its share of the lines of every step. */
INLINE TileFetch next_share(const TileFetch *last, int64_t lines, int64_t passes) {
  TileFetch mine = *last;
  mine.from = last->to;
  mine.to = last->to + (lines + passes - 1) / passes;
  if (mine.to > lines) mine.to = lines;
  return mine;
}

/*
 * These rows of the run, two vectors at a time, and all rows before the next two: half of a segment's weights (16 KiB)
 * stay in the first-level cache. `rows`: a multiple of 32, or fewer.
 */
static void run_pairs_of_tiles(TileRun run, int64_t rows, TileFetch *fetch, int64_t lines, int64_t passes) {
  int vectors = run.vectors;
  shape_tiles(rows < TWO_TILES ? rows : TWO_TILES, run.pairs);
  for (int vector = 0; vector < vectors; vector += 2) {
    for (int64_t row = 0; row < rows; row += TWO_TILES) {
      TileRun part = run;
      part.vectors = vectors - vector < 2 ? 1 : 2;
      part.weights += vector * 64;
      part.x += row * run.stride;
      part.sums += row * run.sums_stride + vector * 16;
      *fetch = next_share(fetch, lines, passes);
      run_wide(&part, fetch);
    }
  }
}

/* All rows, over the run's steps. */
static void run_rows(TileRun run, int64_t rows, const char *ahead) {
  int64_t whole = rows / TWO_TILES * TWO_TILES, rest = rows - whole, halves = (run.vectors + 1) / 2;
  int64_t passes = whole / TWO_TILES * halves + (rest > TILE_PAIRS ? halves : rest > 0);
  int64_t lines = ahead == NULL ? 0 : TILE_PAIRS * run.step / 64;
  TileFetch fetch = {ahead, 0, 0, 0};
  if (whole > 0) run_pairs_of_tiles(run, whole, &fetch, lines, passes);
  run.x += whole * run.stride;
  run.sums += whole * run.sums_stride;
  if (rest > TILE_PAIRS) {
    run_pairs_of_tiles(run, rest, &fetch, lines, passes);
  } else if (rest > 0) {
    shape_tiles(rest, run.pairs);
    fetch = next_share(&fetch, lines, passes);
    fetch.once = rows <= TILE_PAIRS;
    run_narrow(&run, &fetch);
  }
}

/* As multiply_wide of tiles.h. Last pairs that fill no tile are a run by themselves, with tiles of their size. */
static void multiply_tiles(Piece piece, const uint16_t *x, int64_t stride, int64_t rows, Sums sums, const char *ahead) {
  int64_t steps = piece.pairs / TILE_PAIRS, rest = piece.pairs % TILE_PAIRS, done = steps * TILE_PAIRS;
  TileRun run = {piece.weights, piece.step,  x,          stride,       steps, TILE_PAIRS,
                 sums.at,       sums.stride, sums.first, piece.vectors};
  if (steps > 0) run_rows(run, rows, ahead);
  if (rest == 0) return;
  run.weights += done * piece.step;
  run.x += 2 * done;
  run.steps = 1;
  run.pairs = rest;
  run.first = sums.first && steps == 0;
  run_rows(run, rows, NULL);
}

#define MULTIPLIES_PAIRS(kind) ((kind) == SWARM_BFLOAT16)
#define MULTIPLY_PAIRS multiply_tiles
#define MULTIPLIED release_tiles
#define TILES_FOR_QUANTIZED /* stream_amx.h and chunks_amx.h */

#endif
