/* A tile of bfloat16 rows by VDPBF16PS (AVX-512 BF16), which adds a pair's two products to each of sixteen sums. */
#ifndef SWARM_TILES_BF16_H
#define SWARM_TILES_BF16_H

#include "tiles.h"

INLINE void pair_tile(int rows, int vectors, const uint16_t *weights, int64_t step, int64_t pairs, const uint16_t *x,
                      int64_t stride, Sums sums, Fetch fetch) {
  vec sum[MOST_ROWS][4];
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      sum[row][v] = sums.first ? v_set(0.0f) : v_load(sums.at + row * sums.stride + v * 16);
    }
  }
  for (int64_t pair = 0; pair < pairs; pair++, weights += step / 2) {
    __m512bh some[4];
    fetch_on_the_way(&fetch, pair, (const char *)weights, step);
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
      some[v] = (__m512bh)_mm512_loadu_si512(weights + v * 32);
    }
    _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
      int both;
      __builtin_memcpy(&both, x + row * stride + 2 * pair, sizeof both);
      __m512bh pairs_of_row = (__m512bh)_mm512_set1_epi32(both);
      _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) {
        sum[row][v] = _mm512_dpbf16_ps(sum[row][v], some[v], pairs_of_row);
      }
    }
  }
  _Pragma("GCC unroll 6") for (int row = 0; row < rows; row++) {
    _Pragma("GCC unroll 4") for (int v = 0; v < vectors; v++) v_store(sums.at + row * sums.stride + v * 16, sum[row][v]);
  }
}

#include "tiles_pairs.h"

/* One pair, as pair_tile adds it. */
INLINE vec add_one_pair(vec sum, __m512i weights, const void *x) {
  int both;
  __builtin_memcpy(&both, x, sizeof both);
  return _mm512_dpbf16_ps(sum, (__m512bh)weights, (__m512bh)_mm512_set1_epi32(both));
}
#define ADD_PAIR add_one_pair

/* As v_store_bf16, in one instruction; what is denormal becomes 0, as it does when it is multiplied. */
INLINE void store_pairs(uint16_t *to, vec x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

#define STORE_PAIRS store_pairs

#endif
