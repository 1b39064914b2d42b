/* bfloat16 and elementary functions on vectors of 16. */
#ifndef SWARM_VECTORS_H
#define SWARM_VECTORS_H

#include <immintrin.h>
#include <stdint.h>

#define TARGET __attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16")))
#define VECTOR TARGET static inline __attribute__((always_inline, unused))

VECTOR __m512bh load_bf16(const uint16_t *from) { return (__m512bh)_mm512_loadu_si512(from); }

/* The two elements at `from`, sixteen times. */
VECTOR __m512bh broadcast_pair(const uint16_t *from) {
  int both;
  __builtin_memcpy(&both, from, sizeof both);
  return (__m512bh)_mm512_set1_epi32(both);
}

VECTOR __mmask16 first_of_16(int64_t count) { return count >= 16 ? 0xffff : (__mmask16)((1u << count) - 1); }

VECTOR void store_bf16(uint16_t *to, __mmask16 which, __m512 values) {
  _mm256_mask_storeu_epi16(to, which, (__m256i)_mm512_cvtneps_pbh(values));
}

VECTOR __m512 widen(__m256i halves) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

VECTOR __m512 load_wide(const uint16_t *from, __mmask16 which) {
  return widen(_mm256_maskz_loadu_epi16(which, from));
}

/* e to the x: 2^n times a polynomial of what is left; relative error below 2e-7, 0 below -103, infinite above 89. */
VECTOR __m512 exponential(__m512 x) {
  const __m512 log2e = _mm512_set1_ps(1.44269504f);
  /* Beyond these it is 0 and infinite anyway, and infinities would make the differences below no numbers. A NaN stays. */
  x = _mm512_min_ps(_mm512_set1_ps(200.0f), _mm512_max_ps(_mm512_set1_ps(-200.0f), x));
  __m512 n = _mm512_roundscale_ps(_mm512_mul_ps(x, log2e), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  /* ln 2 in two parts, so that the difference keeps its last bits. */
  __m512 rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693145752f), x);
  rest = _mm512_fnmadd_ps(n, _mm512_set1_ps(1.42860677e-6f), rest);
  __m512 sum = _mm512_set1_ps(1.98412698e-4f);
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.38888889e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(8.33333333e-3f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(4.16666667e-2f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.66666667e-1f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(0.5f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(1.0f));
  return _mm512_scalef_ps(sum, n);
}

VECTOR __m512 silu(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f);
  __m512 below = _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x)));
  return _mm512_div_ps(x, below);
}

/* 1 - 2 / (e^2x + 1): right at both ends, since the exponential becomes 0 and infinite there. */
VECTOR __m512 tangent(__m512 x) {
  __m512 one = _mm512_set1_ps(1.0f);
  __m512 power = exponential(_mm512_add_ps(x, x));
  return _mm512_sub_ps(one, _mm512_div_ps(_mm512_set1_ps(2.0f), _mm512_add_ps(power, one)));
}

VECTOR __m512 gelu_tanh(__m512 x) {
  __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
  __m512 inner = _mm512_fmadd_ps(cube, _mm512_set1_ps(0.044715f), x);
  __m512 half = _mm512_mul_ps(_mm512_set1_ps(0.5f), x);
  return _mm512_mul_ps(half, _mm512_add_ps(_mm512_set1_ps(1.0f), tangent(_mm512_mul_ps(inner, _mm512_set1_ps(0.797884561f)))));
}

#endif
