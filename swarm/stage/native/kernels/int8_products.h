/* int8 rows times a block of a quantized matrix: the block is decoded group by group, and multiplied from the cache. */
#ifndef SWARM_INT8_PRODUCTS_H
#define SWARM_INT8_PRODUCTS_H

#include "int8_tiles.h"
#include "quantized.h"

#define INT8_SEGMENT 256     /* inputs that are decoded at a time: 16 KiB */
#define INT8_SEGMENT_GROUPS 16 /* the most groups that these are */

/* Where one thread works. */
typedef struct {
  uint8_t codes[INT8_SEGMENT * WIDTH];
  Factors factors[INT8_SEGMENT_GROUPS];
} Int8Bench;

#ifdef HAS_INT8_TILES
INLINE int uses_tiles(const Int8Codes *tiled, int64_t rows) { return rows >= INT8_TILED_ROWS && tiled->largest >= 0; }
#else
INLINE Int8Codes codes_for_tiles(const Int8Codes *codes) { return *codes; }
INLINE int uses_tiles(const Int8Codes *tiled, int64_t rows) { return tiled->largest < 0 && rows < 0; }
INLINE void int8_by_tiles(const Int8Piece *piece, const Int8Rows *x, int64_t row, int64_t rows, float *sums) {
  int8_tiles(piece, x, row, rows, sums);
}
#endif

/* Decode a group of the block, and fetch what is decoded later: of this block, or of what comes after it. */
static void decode_int8_group(const SwarmFormat *format, const SwarmLayout *layout, Stream stream,
                              const Int8Codes *codes, int64_t group, uint8_t *to, Factors *factors) {
  const char *from = stream.block + layout->nested + group * layout->group, *end = stream.block + layout->block;
  const char *ahead = from + BYTES_AHEAD;
  if (ahead >= end && stream.after != NULL) ahead = stream.after + (ahead - end);
  for (int64_t at = layout->codes; at < layout->group; at += LINE) fetch_near(ahead + at);
  decode_bytes(codes, from, format->group, to, ahead);
  load_factors(format, layout, stream.block, group, factors);
}

/* Rows `first` and on times a block: `sums` are [rows][64]. 0, or -1 if there is no memory to work in. */
static int multiply_int8(const SwarmFormat *format, const SwarmLayout *layout, Stream stream, const Int8Rows *x,
                         int64_t first, int64_t rows, float *sums) {
  Int8Bench *bench = swarm_scratch(SWARM_DECODED, sizeof *bench);
  if (bench == NULL) return -1;
  memset(sums, 0, (size_t)(rows * WIDTH) * sizeof *sums);
  Int8Codes codes = codes_for_tiles(&x->codes);
  int tiled = uses_tiles(&codes, rows);
  if (!tiled) codes = x->codes;
  int64_t size = x->group, at_once = rows <= INT8_ROWS ? 1 : INT8_SEGMENT / size;
  for (int64_t group = 0; group < x->groups; group += at_once) {
    Int8Piece piece = {bench->codes, size * WIDTH, bench->factors, group, least(at_once, x->groups - group)};
    for (int64_t i = 0; i < piece.groups; i++)
      decode_int8_group(format, layout, stream, &codes, group + i, bench->codes + i * piece.step, &bench->factors[i]);
    if (tiled)
      int8_by_tiles(&piece, x, first, rows, sums);
    else
      int8_tiles(&piece, x, first, rows, sums);
  }
  return 0;
}

#endif
