/* The number that decides a draw, and a logarithm: plain arithmetic, so that no library decides about its bits. */
#ifndef SWARM_CHANCE_H
#define SWARM_CHANCE_H

#include <stdint.h>
#include <string.h>

/*
 * A number in [0, 1) that seed and position alone determine: the first of Philox 4x64 with ten rounds (Salmon et al.,
 * "Parallel random numbers: as easy as 1, 2, 3"), as numpy's generator gives it: it counts before it draws.
 */
static double chance(uint64_t seed, uint64_t position) {
  uint64_t counter[4] = {position + 1, position + 1 == 0, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; round++) {
    unsigned __int128 first = (unsigned __int128)0xd2e7470ee14c6c93ull * counter[0];
    unsigned __int128 second = (unsigned __int128)0xca5a826395121157ull * counter[2];
    counter[0] = (uint64_t)(second >> 64) ^ counter[1] ^ key[0];
    counter[1] = (uint64_t)second;
    counter[2] = (uint64_t)(first >> 64) ^ counter[3] ^ key[1];
    counter[3] = (uint64_t)first;
    key[0] += 0x9e3779b97f4a7c15ull;
    key[1] += 0xbb67ae8584caa73bull;
  }
  return (double)(counter[0] >> 11) * 0x1p-53;
}

/* The natural logarithm of a number from 1 on: of its power of two, and of what is left by the series of artanh. */
static double logarithm(double number) {
  uint64_t bits;
  memcpy(&bits, &number, sizeof bits);
  int64_t power = (int64_t)(bits >> 52) - 1022;
  bits = (bits & 0xfffffffffffffull) | 1022ull << 52; /* between a half and 1 */
  double part, series = 0;
  memcpy(&part, &bits, sizeof part);
  if (part < 0.70710678118654752) {
    part *= 2;
    power--;
  }
  double ratio = (part - 1) / (part + 1), square = ratio * ratio;
  for (int odd = 21; odd > 0; odd -= 2) series = series * square + 1.0 / odd;
  return 2 * ratio * series + (double)power * 0.69314718055994531;
}

#endif
