/*
 * A few rows times a block of a quantized matrix, without a detour over memory: what was decoded is multiplied while it
 * is in registers. The same sums in the same order as multiply_group makes.
 */
#ifndef SWARM_FUSED_H
#define SWARM_FUSED_H

/* A pair of a row's inputs times sixteen outputs' weights, as the variant's tiles add it. */
INLINE vec add_pair(int wide, vec sum, pair_vec weights, const void *x) {
#ifdef ADD_PAIR
  if (!wide) return ADD_PAIR(sum, weights, x);
#endif
  (void)wide;
  __m512i upper = _mm512_and_si512(weights, _mm512_set1_epi32((int)0xffff0000));
  sum = v_fma(_mm512_castsi512_ps(_mm512_slli_epi32(weights, 16)), v_set(((const float *)x)[0]), sum);
  return v_fma(_mm512_castsi512_ps(upper), v_set(((const float *)x)[1]), sum);
}

/* Codes of a quad of inputs of sixteen outputs. `from`: where eight inputs begin. */
INLINE byte_vec codes_of_quad(int kind, const char *from, int quad, int vector) {
  if (kind == SWARM_CODES8 || kind == SWARM_FLOATS8) return b_load(from + (4 * quad + vector) * LINE);
  byte_vec both = b_load(from + (2 * quad + vector / 2) * LINE);
  byte_vec codes = vector % 2 ? high_code(kind, both) : low_code(kind, both);
  if (kind == SWARM_CODES5) return b_with_bits(codes, b_load(from + 4 * LINE), 4 * quad + vector, 0x10);
  if (kind == SWARM_CODES6) return b_with_bits(codes, b_load(from + (4 + quad) * LINE), 2 * vector, 0x30);
  return codes;
}

INLINE void fused_block(int kind, int wide, int rows, const Quantized *job, Stream stream, const BlockRows *to) {
  const SwarmLayout *layout = &job->layout;
  const Tables tables = tables_of(kind, &job->values);
  const int64_t size = job->format->group, bytes = lines_of_eight(kind) * LINE;
  for (int64_t group = 0; group < layout->groups; group++) {
    const char *from = codes_of_group(job, stream, group), *ahead = ahead_of(job, stream, from);
    vec part[FUSED_ROWS][4];
    _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++)
      _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) part[row][v] = v_set(0.0f);
    for (int64_t input = 0; input < size; input += 8, from += bytes, ahead += bytes) {
      for (int64_t line = 0; line < lines_of_eight(kind); line++) fetch_far(ahead + line * LINE);
      _Pragma("GCC unroll 2") for (int quad = 0; quad < 2; quad++) {
        _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {
          pair_vec even, odd;
          decode_pairs(kind, &tables, codes_of_quad(kind, from, quad, v), &even, &odd);
          _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {
            int64_t at = group * size + input + 4 * quad;
            part[row][v] = add_pair(wide, part[row][v], even, operand_at(to->x, row, at).at);
            part[row][v] = add_pair(wide, part[row][v], odd, operand_at(to->x, row, at + 2).at);
          }
        }
      }
    }
    for (int64_t at = layout->codes; at < layout->group; at += LINE, ahead += LINE) fetch_far(ahead);
    FactorVectors factors = factors_of(job->format, layout, stream.block, group);
    _Pragma("GCC unroll 4") for (int row = 0; row < rows; row++) {
      _Pragma("GCC unroll 4") for (int v = 0; v < 4; v++) {
        vec sum = group == 0 ? v_set(0.0f) : v_load(to->sums + row * WIDTH + v * 16);
        sum = v_fma(part[row][v], factors.scale[v], sum);
        if (to->row_sums != NULL)
          sum = v_fnma(factors.minimum[v], v_set(to->row_sums[row * layout->groups + group]), sum);
        v_store(to->sums + row * WIDTH + v * 16, sum);
      }
    }
  }
}

#define DEFINE_FUSED(KIND, ROWS)                                                                        \
  static void fused_##KIND##_##ROWS(int wide, const Quantized *job, Stream stream, const BlockRows *to) { \
    if (wide)                                                                                           \
      fused_block(KIND, 1, ROWS, job, stream, to);                                                      \
    else                                                                                                \
      fused_block(KIND, 0, ROWS, job, stream, to);                                                      \
  }
#define DEFINE_FUSED_ROWS(KIND) DEFINE_FUSED(KIND, 1) DEFINE_FUSED(KIND, 2) DEFINE_FUSED(KIND, 3) DEFINE_FUSED(KIND, 4)
#define FUSED_OF(KIND) {fused_##KIND##_1, fused_##KIND##_2, fused_##KIND##_3, fused_##KIND##_4}
DEFINE_FUSED_ROWS(SWARM_CODES4)
DEFINE_FUSED_ROWS(SWARM_CODES5)
DEFINE_FUSED_ROWS(SWARM_CODES6)
DEFINE_FUSED_ROWS(SWARM_CODES8)
DEFINE_FUSED_ROWS(SWARM_FLOATS8)

typedef void (*Fused)(int, const Quantized *, Stream, const BlockRows *);
static const Fused FUSED[][FUSED_ROWS] = {FUSED_OF(SWARM_CODES4), FUSED_OF(SWARM_CODES5), FUSED_OF(SWARM_CODES6),
                                          FUSED_OF(SWARM_CODES8), FUSED_OF(SWARM_FLOATS8)};

/* 0 if there are too many rows. */
static int multiply_fused(int kind, const Quantized *job, Stream stream, const BlockRows *to) {
  if (to->rows > FUSED_ROWS) return 0;
  FUSED[job->format->codes][to->rows - 1](!MULTIPLIES_PAIRS(kind), job, stream, to);
  return 1;
}

#endif
