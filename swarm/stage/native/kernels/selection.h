/*
 * The largest weights of a row, without sorting: where the order by weight must be cut is found by the digits of the
 * weights' bits, the first of them for all that may matter, the others for those that share the digits so far. What a
 * cut costs is bounded by three looks at every weight, whatever they are.
 */
#ifndef SWARM_SELECTION_H
#define SWARM_SELECTION_H

#include "weights.h"

#define NO_LIMIT INT64_MAX
#define LARGEST (127u << 23)   /* the bits of 1 */
#define FIRST_BITS (91u << 23) /* of one unit, the smallest weight there is */
#define ONE (1ull << 40)       /* a bin counts above this bit, and sums the digits to come below it */

/* Where to cut the order by weight: all weights above `edge` stay, and the first `equals` by id of those that equal it.
   An edge of 0 cuts nothing. */
typedef struct {
  Bits edge;
  int64_t equals;
  int64_t mass; /* in units, of what stays */
} Cut;

typedef struct {
  int64_t bin, count, mass; /* where it must be cut, how many and how much lies in the bins above */
  int64_t in;               /* how many in it */
} Found;

INLINE float float_of(Bits bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

#ifndef HAS_PACK
/* Write the lanes of which this holds one after another; anything may stand behind, up to sixteen. Returns how many. */
INLINE int64_t v_pack(float *to, vec x, mask which) {
  float lanes[16];
  int64_t count = 0;
  unsigned bits = m_bits(which);
  v_to_array(x, lanes);
  for (int i = 0; i < 16; i++) {
    to[count] = lanes[i];
    count += bits >> i & 1;
  }
  return count;
}
#endif

/* The weights above `below` and not above `last`, one after another; `to` may be `from`. Returns how many there are. */
static int64_t pack(float *to, const float *from, int64_t count, Bits below, Bits last) {
  const vec least = v_set(float_of(below)), end = v_set(float_of(last)), none = v_set(0.0f);
  int64_t packed = 0;
  for (int64_t at = 0; at < count; at += 16) {
    vec all = count - at >= 16 ? v_load(from + at) : v_load_some(from + at, count - at);
    all = v_select(m_less(end, all), none, all);
    packed += v_pack(to + packed, all, m_less(least, all));
  }
  return packed;
}

/* Count weights by a digit, which is 0 for those that begin at `base`, and sum the bits after it. */
static void tally(uint64_t *bins, const float *weights, int64_t count, Bits base, int shift) {
  const Bits *each = (const Bits *)weights, rest = (1u << shift) - 1;
  memset(bins, 0, BINS * 4 * sizeof *bins);
  for (int64_t at = 0; at < count; at++) /* four bins for a digit, so that equal ones don't wait for each other */
    bins[((each[at] - base) >> shift) * 4 + (Bits)(at & 3)] += ONE | (each[at] & rest);
}

/* Units of `count` weights that begin with these bits, the rest of whose bits sums up to `rest`. */
static int64_t mass_of(Bits bits, int64_t count, int64_t rest) {
  int64_t sum = count * ((bits & 0x7fffff) | 0x800000) + rest;
  int shift = (int)(bits >> 23) - (127 - 36 + 23);
  return shift >= 0 ? sum << shift : sum >> -shift; /* exact: weights are whole units */
}

/* The bin, from the last one down, in which `most` weights or the mass of `limit` is reached; -1 if in none. */
static Found walk(const uint64_t *bins, Bits base, int shift, Found so_far, int64_t most, int64_t limit) {
  for (int64_t bin = BINS - 1; bin >= 0; bin--) {
    const uint64_t *four = bins + bin * 4;
    uint64_t all = four[0] + four[1] + four[2] + four[3];
    if (all == 0) continue;
    int64_t count = (int64_t)(all / ONE), mass = mass_of(base + ((Bits)bin << shift), count, (int64_t)(all % ONE));
    if (so_far.count + count >= most || so_far.mass + mass >= limit)
      return (Found){bin, so_far.count, so_far.mass, count};
    so_far.count += count;
    so_far.mass += mass;
  }
  return (Found){-1, so_far.count, so_far.mass, 0};
}

/*
 * The cut after the `most` largest of `count` weights, or where their mass has reached `limit`. Only weights above
 * `below` are looked at; if what is asked for isn't reached by those, nothing is cut.
 */
static Cut cut_at(const Desk *desk, const float *weights, int64_t count, Bits below, int64_t most, int64_t limit) {
  static const int SHIFTS[] = {19, 9, 0}; /* the first digit: the exponent and four bits after it */
  Found found = {0, 0, 0, 0};
  Bits base = FIRST_BITS;
  int64_t left = pack(desk->some, weights, count, below, LARGEST);
  for (int digit = 0; digit < 3; digit++) {
    int shift = SHIFTS[digit];
    tally(desk->bins, desk->some, left, base, shift);
    found = walk(desk->bins, base, shift, found, most, limit);
    if (found.bin < 0) return (Cut){0, 0, found.mass};
    base += (Bits)found.bin << shift;
    if (shift > 0 && found.in < left)
      left = pack(desk->some, desk->some, left, base - 1, base + (1u << shift) - 1);
  }
  int64_t each = units_of(float_of(base));
  int64_t equals = limit == NO_LIMIT ? most - found.count : (limit - found.mass + each - 1) / each;
  return (Cut){base, equals, found.mass + equals * each};
}

/* The `most` largest. The greatest of every lane of every block are weights, too: as many as are wanted bound it. */
static Cut cut_by_count(const Desk *desk, int64_t most) {
  Bits bound = cut_at(desk, desk->greatest, desk->blocks * 16, 0, most, NO_LIMIT).edge;
  return cut_at(desk, desk->weights, desk->blocks * WORDS, bound > 0 ? bound - 1 : 0, most, NO_LIMIT);
}

/*
 * The largest, until their mass has reached `limit` of all that there is above `below`. If the greatest of the lanes
 * reach it, the edge lies where they do or above; and never in the tail that sums up to less than may be left out.
 */
static Cut cut_by_mass(const Desk *desk, Bits below, int64_t mass, int64_t limit) {
  Bits bound = cut_at(desk, desk->greatest, desk->blocks * 16, below, NO_LIMIT, limit).edge, tail;
  float small = (float)((double)(mass - limit) / (double)desk->words * 0x1p-37);
  memcpy(&tail, &small, sizeof tail);
  bound = bound > 0 ? bound - 1 : tail;
  return cut_at(desk, desk->weights, desk->blocks * WORDS, bound > below ? bound : below, NO_LIMIT, limit);
}

/* Those of at least so many units. */
static Cut cut_below(int64_t units) {
  float edge = (float)((double)units * 0x1p-36);
  Bits bits;
  memcpy(&bits, &edge, sizeof bits);
  return (Cut){(double)edge * 0x1p36 < (double)units ? bits : bits - 1, 0, 0};
}

/* `left`, with those of its lanes that equal the edge, as long as there may be more of them. */
static vec with_equals(vec all, vec left, unsigned equal, Cut *cut) {
  float lanes[16];
  int many = __builtin_popcount(equal);
  if (many <= cut->equals) {
    cut->equals -= many;
    return v_select(m_less(all, v_set(float_of(cut->edge))), left, all);
  }
  v_to_array(left, lanes);
  for (; cut->equals > 0; equal &= equal - 1, cut->equals--) lanes[__builtin_ctz(equal)] = float_of(cut->edge);
  return v_load(lanes);
}

/* Drop all weights behind the cut. */
static void drop(const Desk *desk, Cut cut) {
  const vec edge = v_set(float_of(cut.edge)), none = v_set(0.0f);
  for (int64_t block = 0; block < desk->blocks; block++) {
    Exact sum = {none, none};
    for (float *at = desk->weights + block * WORDS; at < desk->weights + (block + 1) * WORDS; at += 16) {
      vec all = v_load(at);
      unsigned equal = cut.equals > 0 ? m_bits(m_equal(all, edge)) : 0;
      vec left = v_select(m_less(edge, all), all, none);
      if (equal != 0) left = with_equals(all, left, equal, &cut);
      v_store(at, left);
      add_units(&sum, left);
    }
    desk->sums[block] = units_in(sum);
  }
}

#endif
