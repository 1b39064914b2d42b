/*
 * Layers that keep a state between positions. All of them go through a sequence position by position, in one order of
 * operations, so that no bit depends on where a step ends. Work is shared out by sequences, heads and channels: the
 * thread that begins a sequence's first segment goes on with those that begin with the state that it has written.
 */
#ifndef SWARM_RECURRENCE_H
#define SWARM_RECURRENCE_H

#include <string.h>

#include "../counting.h"
#include "../pool.h"
#include "activations.h"
#include "tiles.h"

enum { CHANNELS = 64 }; /* of a piece */

static int64_t channel_blocks(int64_t channels) { return (channels + CHANNELS - 1) / CHANNELS; }

static int continues(const SwarmSegment *segments, int64_t at) {
  return at > 0 && segments[at].before == segments[at - 1].after;
}

/* Copy some columns of a state's rows, which are so many numbers apart. */
static void copy_columns(const float *from, int64_t from_stride, float *to, int64_t to_stride, int64_t rows,
                         int64_t count) {
  for (int64_t row = 0; row < rows; row++) memcpy(to + row * to_stride, from + row * from_stride, (size_t)count * 4);
}

/* Most vectors are whole: they need no mask, which costs some processors more than the arithmetic. */
INLINE vec load_part(const float *from, int64_t left) { return left >= 16 ? v_load(from) : v_load_some(from, left); }
INLINE void store_part(float *to, vec x, int64_t left) { left >= 16 ? v_store(to, x) : v_store_some(to, x, left); }

/* --- convolution of every channel by itself ----------------------------------------------------------------------- */

/* The input `back` positions before a segment's row number `row`. */
INLINE vec earlier_input(const SwarmConvolution *job, const SwarmSegment *segment, int64_t row, int64_t back,
                         int64_t channel) {
  int64_t left = job->channels - channel;
  if (row >= back) return load_number((int)job->kind, job->x, (segment->offset + row - back) * job->stride + channel, left);
  const float *kept = segment->before + job->state + (job->taps - 1 + row - back) * job->channels;
  return load_part(kept + channel, left);
}

static void convolve_segment(const SwarmConvolution *job, const SwarmSegment *segment, int64_t first) {
  int64_t taps = job->taps, stop = least(first + CHANNELS, job->channels);
  for (int64_t channel = first; channel < stop; channel += 16) {
    int64_t left = job->channels - channel;
    vec bias = job->bias == NULL ? v_set(0.0f) : load_part(job->bias + channel, left);
    for (int64_t row = 0; row < segment->count; row++) {
      vec sum = bias;
      for (int64_t tap = 0; tap < taps; tap++)
        sum = v_fma(earlier_input(job, segment, row, taps - 1 - tap, channel),
                    load_part(job->weight + tap * job->channels + channel, left), sum);
      int64_t to = (segment->offset + row) * job->out_stride + channel;
      store_number((int)job->kind, job->out, to, activated(job->function, 1.0f, sum), left);
    }
    for (int64_t back = taps - 1; back > 0; back--) {
      float *to = segment->after + job->state + (taps - 1 - back) * job->channels + channel;
      store_part(to, earlier_input(job, segment, segment->count, back, channel), left);
    }
  }
}

static void convolve_piece(const void *argument, int64_t index, int64_t next) {
  const SwarmConvolution *job = argument;
  int64_t blocks = channel_blocks(job->channels), at = index / blocks;
  (void)next;
  if (continues(job->segments, at)) return;
  do convolve_segment(job, job->segments + at, index % blocks * CHANNELS);
  while (++at < job->num_segments && continues(job->segments, at));
}

static void convolve(const SwarmConvolution *job, int threads) {
  swarm_share(convolve_piece, job, job->num_segments * channel_blocks(job->channels), threads);
}

/* --- states that are matrices -------------------------------------------------------------------------------------- */

/*
 * Columns of a piece: as many as leave the registers room for their sums and for what is written. They are copied side
 * by side, which keeps them in the nearest cache from one position to the next, unless a state has very many rows.
 */
enum { COLUMNS = IS_NARROW ? 32 : 64, COLUMN_VECTORS = COLUMNS / 16, MOST_COPIED = 256 };

static int64_t column_blocks(const SwarmRecurrence *job) { return (job->values + COLUMNS - 1) / COLUMNS; }

/* One position of some columns of a head's state; `width` is known when this is compiled, but for a last block. */
INLINE void advance_head(const SwarmRecurrence *job, int64_t row, int64_t head, int64_t first, int64_t width,
                         float *state, int64_t stride) {
  int64_t vectors = (width + 15) / 16, keys = job->keys, key_head = head / (job->heads / job->key_heads);
  const float *query = job->query + row * job->query_stride + key_head * keys;
  const float *key = job->key + row * job->key_stride + key_head * keys;
  const float *value = job->value + row * job->value_stride + head * job->values + first;
  const float *decay = job->decay + (row * job->heads + head) * job->decays;
  int64_t step = job->decays == 1 ? 0 : 1;
  vec change[COLUMN_VECTORS], sums[COLUMN_VECTORS];
  for (int64_t i = 0; i < vectors; i++) change[i] = load_part(value + 16 * i, width - 16 * i);
  if (job->beta != NULL) {
    vec beta = v_set(job->beta[row * job->heads + head]);
    for (int64_t i = 0; i < vectors; i++) sums[i] = v_set(0.0f);
    for (int64_t k = 0; k < keys; k++) {
      vec decayed = v_set(key[k] * decay[k * step]);
      for (int64_t i = 0; i < vectors; i++)
        sums[i] = v_fma(load_part(state + k * stride + 16 * i, width - 16 * i), decayed, sums[i]);
    }
    for (int64_t i = 0; i < vectors; i++) change[i] = v_mul(v_sub(change[i], sums[i]), beta);
  }
  for (int64_t i = 0; i < vectors; i++) sums[i] = v_set(0.0f);
  for (int64_t k = 0; k < keys; k++) {
    vec keeps = v_set(decay[k * step]), writes = v_set(key[k]), reads = v_set(query[k]);
    for (int64_t i = 0; i < vectors; i++) {
      float *place = state + k * stride + 16 * i;
      vec number = v_fma(writes, change[i], v_mul(load_part(place, width - 16 * i), keeps));
      store_part(place, number, width - 16 * i);
      sums[i] = v_fma(number, reads, sums[i]);
    }
  }
  float *out = job->out + (row * job->heads + head) * job->values + first;
  for (int64_t i = 0; i < vectors; i++) store_part(out + 16 * i, sums[i], width - 16 * i);
}

static void recur_segment(const SwarmRecurrence *job, const SwarmSegment *segment, int64_t head, int64_t first) {
  float copy[MOST_COPIED * COLUMNS] __attribute__((aligned(64)));
  int64_t width = least(COLUMNS, job->values - first), rows = segment->offset + segment->count;
  int64_t place = job->state + head * job->keys * job->values + first;
  float *after = segment->after + place, *state = job->keys <= MOST_COPIED ? copy : after;
  int64_t stride = state == copy ? COLUMNS : job->values;
  copy_columns(segment->before + place, job->values, state, stride, job->keys, width);
  for (int64_t row = segment->offset; row < rows; row++) {
    if (width == COLUMNS)
      advance_head(job, row, head, first, COLUMNS, state, stride);
    else
      advance_head(job, row, head, first, width, state, stride);
  }
  if (state == copy) copy_columns(copy, stride, after, job->values, job->keys, width);
}

static void recur_piece(const void *argument, int64_t index, int64_t next) {
  const SwarmRecurrence *job = argument;
  int64_t blocks = column_blocks(job), at = index / blocks / job->heads;
  (void)next;
  if (continues(job->segments, at)) return;
  do recur_segment(job, job->segments + at, index / blocks % job->heads, index % blocks * COLUMNS);
  while (++at < job->num_segments && continues(job->segments, at));
}

static void recur(const SwarmRecurrence *job, int threads) {
  swarm_share(recur_piece, job, job->num_segments * job->heads * column_blocks(job), threads);
}

/* --- states of each channel by itself ------------------------------------------------------------------------------ */

static void scan_segment(const SwarmScan *job, const SwarmSegment *segment, int64_t first) {
  int64_t channels = job->channels, width = least(CHANNELS, channels - first);
  float *state = segment->after + job->state + first;
  copy_columns(segment->before + job->state + first, channels, state, channels, job->states, width);
  for (int64_t row = segment->offset; row < segment->offset + segment->count; row++) {
    const float *in = job->in + row * job->mix_stride, *out = job->out_mix + row * job->mix_stride;
    for (int64_t channel = 0; channel < width; channel += 16) {
      int64_t left = width - channel, at = row * channels + first + channel;
      vec step = load_part(job->step + at, left), x = load_part(job->x + at, left), sum = v_set(0.0f);
      vec taken = v_mul(step, x);
      for (int64_t n = 0; n < job->states; n++) {
        float *place = state + n * channels + channel;
        vec rate = load_part(job->rate + n * channels + first + channel, left);
        vec kept = v_mul(exponential(v_mul(step, rate)), load_part(place, left));
        vec number = v_fma(taken, v_set(in[n]), kept);
        store_part(place, number, left);
        sum = v_fma(number, v_set(out[n]), sum);
      }
      store_part(job->out + at, sum, left);
    }
  }
}

static void scan_piece(const void *argument, int64_t index, int64_t next) {
  const SwarmScan *job = argument;
  int64_t blocks = channel_blocks(job->channels), at = index / blocks;
  (void)next;
  if (continues(job->segments, at)) return;
  do scan_segment(job, job->segments + at, index % blocks * CHANNELS);
  while (++at < job->num_segments && continues(job->segments, at));
}

static void scan(const SwarmScan *job, int threads) {
  swarm_share(scan_piece, job, job->num_segments * channel_blocks(job->channels), threads);
}

#endif
