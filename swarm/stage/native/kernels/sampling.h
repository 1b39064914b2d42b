/* Drawing tokens from logits, row by row; the rule that all of this follows stands in sampling.py. */
#ifndef SWARM_SAMPLING_H
#define SWARM_SAMPLING_H

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "chance.h"
#include "selection.h"

/* A token whose score isn't the model's logit. */
typedef struct {
  double score;
  int64_t id, said; /* how often the answer has it */
  int32_t seen, forbidden;
} Touched;

typedef struct {
  Touched *each;
  int64_t count;
  Bits *place; /* [words]: of a token among `each`, if the entry there is its own; not initialised */
} Touches;

typedef struct {
  int kind;
  int64_t words;
  SwarmDraw *draws;
  atomic_int *failed;
} Drawing;

static char *take_room(char **from, int64_t bytes) {
  char *here = *from;
  *from += (bytes + 63) / 64 * 64;
  return here;
}

/* Whether there was memory for it. */
static int lay_out(Desk *desk, Touches *touches, int64_t words, int64_t most_touched) {
  int64_t blocks = (words + WORDS - 1) / WORDS, row = blocks * WORDS * (int64_t)sizeof(float);
  int64_t few = blocks * 16 * (int64_t)sizeof(float), one = blocks * (int64_t)sizeof(int64_t);
  int64_t tally = BINS * 4 * (int64_t)sizeof(uint64_t), touched = most_touched * (int64_t)sizeof(Touched);
  char *room = swarm_scratch(SWARM_SCORES, 2 * row + few + 3 * one + tally + touched + 64 * 9);
  if (room == NULL) return 0;
  *desk = (Desk){.words = words, .blocks = blocks};
  desk->weights = (float *)take_room(&room, row);
  desk->some = (float *)take_room(&room, row + 64);
  desk->greatest = (float *)take_room(&room, few);
  desk->bins = (uint64_t *)take_room(&room, tally);
  desk->sums = (int64_t *)take_room(&room, one);
  desk->logits = (float *)take_room(&room, one);
  desk->scores = (float *)take_room(&room, one);
  *touches = (Touches){(Touched *)take_room(&room, touched), 0, (Bits *)desk->some};
  return 1;
}

static Touched *touch(const Drawing *job, const SwarmDraw *draw, Touches *all, int64_t id) {
  Bits place = all->place[id];
  if (place >= all->count || all->each[place].id != id) {
    place = all->place[id] = (Bits)all->count++;
    all->each[place] = (Touched){number_at(job->kind, draw->logits, id), id, 0, 0, 0};
  }
  return &all->each[place];
}

static int known(const Drawing *job, int64_t id) { return id >= 0 && id < job->words; }

static int is_allowed(const SwarmDraw *draw, int64_t id) {
  return draw->allowed == NULL || (draw->allowed[id >> 5] >> (id & 31) & 1) != 0;
}

/* Is every word's score its logit? */
static int is_plain(const SwarmDraw *draw, const Touches *touches) {
  return touches->count == 0 && draw->allowed == NULL;
}

/* Put the words that are not allowed out of reach. */
static void bar_words(const Drawing *job, const SwarmDraw *draw, float *scores) {
  if (draw->allowed == NULL) return;
  for (int64_t first = 0; first < job->words; first += 32) {
    uint32_t open = draw->allowed[first >> 5];
    if (open == UINT32_MAX) continue;
    int64_t count = least(32, job->words - first);
    for (int64_t i = 0; i < count; i++)
      if ((open >> i & 1) == 0) scores[first + i] = -INFINITY;
  }
}

static void penalise(const SwarmDraw *draw, Touched *each) {
  if (draw->repetition != 1.0 && each->seen)
    each->score = each->score > 0 ? each->score / draw->repetition : each->score * draw->repetition;
  if (each->said > 0) each->score -= draw->presence + draw->frequency * (double)each->said;
}

/* All tokens whose scores are other than the logits, with their scores. */
static void touch_all(const Drawing *job, const SwarmDraw *draw, Touches *all) {
  int64_t forbidden = 0;
  for (int64_t i = 0; i < draw->num_biased; i++)
    if (known(job, draw->biased[i])) touch(job, draw, all, draw->biased[i])->score += draw->biases[i];
  for (int64_t i = draw->repetition != 1.0 ? 0 : draw->num_prompt; i < draw->num_history; i++) {
    if (!known(job, draw->history[i])) continue;
    Touched *each = touch(job, draw, all, draw->history[i]);
    each->seen = 1;
    each->said += i >= draw->num_prompt;
  }
  for (int64_t i = 0; i < all->count; i++) penalise(draw, &all->each[i]);
  for (int64_t i = 0; i < draw->num_forbidden; i++) {
    if (!known(job, draw->forbidden[i])) continue;
    Touched *each = touch(job, draw, all, draw->forbidden[i]);
    forbidden += !each->forbidden;
    each->forbidden = 1;
  }
  if (forbidden >= job->words) /* never all of them */
    for (int64_t i = 0; i < all->count; i++) all->each[i].forbidden = 0;
  for (int64_t i = 0; i < all->count; i++) all->each[i].forbidden |= !is_allowed(draw, all->each[i].id);
}

static float rounded_score(double score) {
  return score > FLT_MAX ? FLT_MAX : score < -FLT_MAX ? -FLT_MAX : (float)score;
}

/* Where this number is first; the blocks' largest say in which block. */
INLINE int64_t first_place(int kind, const void *from, const Desk *desk, const float *largest, float number) {
  int64_t block = 0;
  while (largest[block] != number) block++;
  for (int64_t at = block * WORDS;; at += 16) {
    unsigned equal = m_bits(m_equal(numbers_or(kind, from, at, desk->words - at, -INFINITY), v_set(number)));
    if (equal != 0) return at + __builtin_ctz(equal);
  }
}

/* The largest score; of equals, the first. Touched scores are compared as they are, without being rounded. */
static int64_t take_largest(const Drawing *job, const SwarmDraw *draw, const Desk *desk, const Touches *touches) {
  if (is_plain(draw, touches))
    return first_place(job->kind, draw->logits, desk, desk->logits, largest_of(desk->logits, desk->blocks));
  for (int64_t i = 0; i < touches->count; i++) desk->weights[touches->each[i].id] = -INFINITY;
  bar_words(job, draw, desk->weights);
  survey(SWARM_FLOAT32, desk->weights, desk, desk->scores, NULL);
  float largest = largest_of(desk->scores, desk->blocks);
  int64_t best = first_place(SWARM_FLOAT32, desk->weights, desk, desk->scores, largest);
  double most = largest;
  for (int64_t i = 0; i < touches->count; i++) {
    const Touched *each = &touches->each[i];
    if (each->forbidden || each->score < most || (each->score == most && each->id > best)) continue;
    most = each->score;
    best = each->id;
  }
  return best;
}

static float inverse_of(double temperature) {
  double inverse = 1.0 / temperature;
  return inverse > FLT_MAX ? FLT_MAX : (float)inverse;
}

static void weigh_scores(const Drawing *job, const SwarmDraw *draw, const Desk *desk, const Touches *touches) {
  float inverse = inverse_of(draw->temperature);
  if (is_plain(draw, touches)) {
    weigh_words(job->kind, draw->logits, desk, largest_of(desk->logits, desk->blocks), inverse);
    return;
  }
  for (int64_t i = 0; i < touches->count; i++) {
    const Touched *each = &touches->each[i];
    desk->weights[each->id] = each->forbidden ? -INFINITY : rounded_score(each->score);
  }
  bar_words(job, draw, desk->weights);
  survey(SWARM_FLOAT32, desk->weights, desk, desk->scores, NULL);
  weigh_words(SWARM_FLOAT32, desk->weights, desk, largest_of(desk->scores, desk->blocks), inverse);
}

static int64_t whole_above(double x) {
  int64_t whole = (int64_t)x;
  return (double)whole < x ? whole + 1 : whole;
}

/* Top-k, of what is left top-p, of what is left min-p: all cut the same order. */
static void filter(const SwarmDraw *draw, const Desk *desk) {
  Cut cut = {0, 0, sum_of_blocks(desk)};
  if (draw->top_k > 0 && draw->top_k < desk->words) cut = cut_by_count(desk, draw->top_k);
  if (draw->top_p < 1.0) {
    int64_t limit = whole_above((double)cut.mass * draw->top_p);
    if (limit <= cut.mass) cut = cut_by_mass(desk, cut.edge > 0 ? cut.edge - 1 : 0, cut.mass, limit);
  }
  if (draw->min_p > 0.0) {
    Cut least = cut_below(whole_above(draw->min_p * 0x1p36));
    if (least.edge >= cut.edge) cut = least;
  }
  if (cut.edge > 0) drop(desk, cut);
}

/* The first token up to which the weights sum up to more than this share of all. */
static int64_t pick(const Desk *desk, double chance) {
  int64_t all = sum_of_blocks(desk), goal = (int64_t)(chance * (double)all), block = 0;
  if (goal >= all) goal = all - 1;
  for (; goal >= desk->sums[block]; block++) goal -= desk->sums[block];
  int64_t token = block * WORDS;
  for (; goal >= units_of(desk->weights[token]); token++) goal -= units_of(desk->weights[token]);
  return token;
}

/* Put a token into the list of the largest, if it belongs there; tokens come in the order of their ids. */
static void rank(int64_t *ids, double *values, int64_t *length, int64_t most, int64_t id, double value) {
  int64_t place = *length;
  if (place == most && value <= values[most - 1]) return;
  if (place < most) *length += 1;
  for (place = *length - 1; place > 0 && values[place - 1] < value; place--) {
    values[place] = values[place - 1];
    ids[place] = ids[place - 1];
  }
  values[place] = value;
  ids[place] = id;
}

/* The largest logits. Of that many blocks, each has one that is at least as large as the least of their largest. */
static void find_best(const Drawing *job, const SwarmDraw *draw, const Desk *desk) {
  int64_t *ids = draw->ids + 1, most = draw->num_best, length = 0;
  double *values = draw->logs + 1;
  if (most == 0) return;
  for (int64_t block = 0; block < desk->blocks; block++) rank(ids, values, &length, most, block, desk->logits[block]);
  double bar = length < most ? -INFINITY : values[most - 1];
  length = 0;
  for (int64_t block = 0; block < desk->blocks; block++) {
    if (desk->logits[block] < bar || (length == most && desk->logits[block] <= values[most - 1])) continue;
    for (int64_t id = block * WORDS; id < least(desk->words, (block + 1) * WORDS); id++) {
      double value = number_at(job->kind, draw->logits, id);
      if (value >= bar) rank(ids, values, &length, most, id, value);
    }
  }
}

/* Log probabilities of the model's own logits: of the token, and of the largest. */
static void tell_logs(const Drawing *job, const SwarmDraw *draw, const Desk *desk) {
  float largest = largest_of(desk->logits, desk->blocks);
  weigh_blocks(job->kind, draw->logits, desk, largest, 1.0f);
  double all = logarithm((double)sum_of_blocks(desk) * 0x1p-36);
  draw->ids[0] = draw->token;
  draw->logs[0] = number_at(job->kind, draw->logits, draw->token);
  find_best(job, draw, desk);
  for (int64_t i = 0; i <= draw->num_best; i++) draw->logs[i] = draw->logs[i] - largest - all;
}

static void draw_row(const void *argument, int64_t index, int64_t next) {
  const Drawing *job = argument;
  SwarmDraw *draw = &job->draws[index];
  Desk desk;
  Touches touches;
  int64_t most_touched = draw->num_history + draw->num_biased + draw->num_forbidden;
  (void)next;
  if (!lay_out(&desk, &touches, job->words, most_touched)) {
    atomic_store(job->failed, 1);
    return;
  }
  draw->token = -1;
  int others = most_touched > 0 || draw->allowed != NULL; /* some scores are not their logits */
  if (!survey(job->kind, draw->logits, &desk, desk.logits, others ? desk.weights : NULL)) return;
  if (most_touched > 0) touch_all(job, draw, &touches);
  if (draw->greedy) {
    draw->token = take_largest(job, draw, &desk, &touches);
  } else {
    weigh_scores(job, draw, &desk, &touches);
    filter(draw, &desk);
    draw->token = pick(&desk, chance(draw->seed, draw->position));
  }
  if (draw->num_best >= 0) tell_logs(job, draw, &desk);
}

static int draw_rows(int64_t kind, int64_t words, SwarmDraw *draws, int64_t num_rows, int threads) {
  atomic_int failed = 0;
  Drawing job = {(int)kind, words, draws, &failed};
  swarm_share(draw_row, &job, num_rows, threads);
  return failed ? -1 : 0;
}

#endif
