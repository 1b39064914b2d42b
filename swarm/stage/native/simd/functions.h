/*
 * Elementary functions on vectors, made of operations that every processor rounds alike: the same bits everywhere.
 * Include one of the simd headers first.
 */
#ifndef SWARM_FUNCTIONS_H
#define SWARM_FUNCTIONS_H

#include <math.h>

/* e to the x where that is small: up to half of ln 2, either way. */
INLINE vec power_series(vec x) {
  vec sum = v_set(1.98412698e-4f);
  sum = v_fma(sum, x, v_set(1.38888889e-3f));
  sum = v_fma(sum, x, v_set(8.33333333e-3f));
  sum = v_fma(sum, x, v_set(4.16666667e-2f));
  sum = v_fma(sum, x, v_set(1.66666667e-1f));
  sum = v_fma(sum, x, v_set(0.5f));
  sum = v_fma(sum, x, v_set(1.0f));
  return v_fma(sum, x, v_set(1.0f));
}

/*
 * e to the x: 2^n times a polynomial of what is left; relative error below 2e-7. 0 below -87 (no denormal numbers),
 * infinite above 88; NaN stays.
 */
INLINE vec exponential(vec x) {
  /* The bounds come first in min and max, so that a NaN in x, the second one, stays. */
  vec in = v_min(v_set(88.5f), v_max(v_set(-88.0f), x));
  vec n = v_round(v_mul(in, v_set(1.44269504f)));
  /* ln 2 in two parts, so that the difference keeps its last bits. */
  vec rest = v_fnma(n, v_set(0.693145752f), in);
  vec sum = power_series(v_fnma(n, v_set(1.42860677e-6f), rest));
  /* n is at most 128 and at least -127: half of the power before, half of it after keeps both in range. */
  vec half = v_round(v_mul(n, v_set(0.5f)));
  sum = v_mul(v_mul(sum, v_power(half)), v_power(v_sub(n, half)));
  sum = v_select(m_less(x, v_set(-87.0f)), v_set(0.0f), sum);
  return v_select(m_less(v_set(88.0f), x), v_set(INFINITY), sum);
}

INLINE vec silu(vec x) { return v_div(x, v_add(v_set(1.0f), exponential(v_sub(v_set(0.0f), x)))); }

INLINE vec sigmoid(vec x) { return v_div(v_set(1.0f), v_add(v_set(1.0f), exponential(v_sub(v_set(0.0f), x)))); }

/*
 * 1 - 2 / (e^2x + 1): right at both ends, since the exponential becomes 0 and infinite there. Near 0 that would lose
 * what is small beside 1, so there it is an odd polynomial (of Cephes' tanhf); relative error below 3e-7.
 */
INLINE vec tangent(vec x) {
  vec one = v_set(1.0f), square = v_mul(x, x);
  vec far = v_sub(one, v_div(v_set(2.0f), v_add(exponential(v_add(x, x)), one)));
  vec near = v_set(-5.70498872745e-3f);
  near = v_fma(near, square, v_set(2.06390887954e-2f));
  near = v_fma(near, square, v_set(-5.37397155531e-2f));
  near = v_fma(near, square, v_set(1.33314422036e-1f));
  near = v_fma(near, square, v_set(-3.33332819422e-1f));
  near = v_fma(v_mul(near, square), x, x);
  return v_select(m_less(square, v_set(0.390625f)), near, far);
}

INLINE vec gelu_tanh(vec x) {
  vec cube = v_mul(v_mul(x, x), x);
  vec inner = v_fma(cube, v_set(0.044715f), x);
  vec half = v_mul(v_set(0.5f), x);
  return v_mul(half, v_add(v_set(1.0f), tangent(v_mul(inner, v_set(0.797884561f)))));
}

/*
 * x times the normal distribution up to x. The error function by a rational approximation of Abramowitz and Stegun
 * (7.1.26), good to 1.5e-7.
 */
INLINE vec gelu(vec x) {
  vec one = v_set(1.0f), zero = v_set(0.0f);
  vec z = v_mul(x, v_set(0.707106781f));
  vec size = v_max(z, v_sub(zero, z));
  vec t = v_div(one, v_fma(v_set(0.3275911f), size, one));
  vec sum = v_set(1.061405429f);
  sum = v_fma(sum, t, v_set(-1.453152027f));
  sum = v_fma(sum, t, v_set(1.421413741f));
  sum = v_fma(sum, t, v_set(-0.284496736f));
  sum = v_fma(sum, t, v_set(0.254829592f));
  vec tail = v_mul(v_mul(sum, t), exponential(v_sub(zero, v_mul(size, size)))); /* 1 - erf(|z|) */
  vec half = v_mul(v_set(0.5f), x);
  return v_select(m_less(x, zero), v_mul(half, tail), v_mul(half, v_sub(v_set(2.0f), tail)));
}

/*
 * log(1 + e^x): the greater of x and 0, and log(1 + e^-|x|). With s = e / (2 + e), which is at most a third, that is
 * 2 (s + s^3 / 3 + s^5 / 5 ...).
 */
INLINE vec softplus(vec x) {
  vec zero = v_set(0.0f), e = exponential(v_min(x, v_sub(zero, x)));
  vec s = v_div(e, v_add(v_set(2.0f), e)), square = v_mul(s, s);
  vec sum = v_set(1.0f / 15);
  sum = v_fma(sum, square, v_set(1.0f / 13));
  sum = v_fma(sum, square, v_set(1.0f / 11));
  sum = v_fma(sum, square, v_set(1.0f / 9));
  sum = v_fma(sum, square, v_set(1.0f / 7));
  sum = v_fma(sum, square, v_set(1.0f / 5));
  sum = v_fma(sum, square, v_set(1.0f / 3));
  sum = v_fma(v_mul(sum, square), s, s);
  return v_add(v_max(zero, x), v_add(sum, sum));
}

INLINE vec relu(vec x) { return v_max(v_set(0.0f), x); } /* NaN, the second one, stays */

INLINE vec quick_gelu(vec x) { return v_mul(x, sigmoid(v_mul(v_set(1.702f), x))); }

/* Sum and greatest of the lanes, in one order: halves onto each other. */
INLINE float sum_of(vec x) {
  float lanes[16];
  v_to_array(x, lanes);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] += lanes[i + width];
  return lanes[0];
}

INLINE float greatest_of(vec x) {
  float lanes[16];
  v_to_array(x, lanes);
  for (int width = 8; width > 0; width /= 2)
    for (int i = 0; i < width; i++) lanes[i] = lanes[i] > lanes[i + width] ? lanes[i] : lanes[i + width];
  return lanes[0];
}

#endif
