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

enum { CHANNELS = 64, CHANNEL_VECTORS = CHANNELS / 16 }; /* of a piece */

static int64_t channel_blocks(int64_t channels) { return (channels + CHANNELS - 1) / CHANNELS; }

static int continues(const SwarmSegment *segments, int64_t at) {
  return at > 0 && segments[at].before == segments[at - 1].after;
}

/* Copy some columns of a state's rows. */
static void copy_columns(const float *before, float *after, int64_t rows, int64_t stride, int64_t count) {
  for (int64_t row = 0; row < rows; row++) memcpy(after + row * stride, before + row * stride, (size_t)count * 4);
}

/* --- convolution of every channel by itself ----------------------------------------------------------------------- */

/* The input `back` positions before a segment's row number `row`. */
INLINE vec earlier_input(const SwarmConvolution *job, const SwarmSegment *segment, int64_t row, int64_t back,
                         int64_t channel) {
  int64_t left = job->channels - channel;
  if (row >= back) return load_number((int)job->kind, job->x, (segment->offset + row - back) * job->stride + channel, left);
  const float *kept = segment->before + job->state + (job->taps - 1 + row - back) * job->channels;
  return v_load_some(kept + channel, left);
}

static void convolve_segment(const SwarmConvolution *job, const SwarmSegment *segment, int64_t first) {
  int64_t taps = job->taps, stop = least(first + CHANNELS, job->channels);
  for (int64_t channel = first; channel < stop; channel += 16) {
    int64_t left = job->channels - channel;
    vec bias = job->bias == NULL ? v_set(0.0f) : v_load_some(job->bias + channel, left);
    for (int64_t row = 0; row < segment->count; row++) {
      vec sum = bias;
      for (int64_t tap = 0; tap < taps; tap++)
        sum = v_fma(earlier_input(job, segment, row, taps - 1 - tap, channel),
                    v_load_some(job->weight + tap * job->channels + channel, left), sum);
      int64_t to = (segment->offset + row) * job->out_stride + channel;
      store_number((int)job->kind, job->out, to, activated(job->function, 1.0f, sum), left);
    }
    for (int64_t back = taps - 1; back > 0; back--) {
      float *to = segment->after + job->state + (taps - 1 - back) * job->channels + channel;
      v_store_some(to, earlier_input(job, segment, segment->count, back, channel), left);
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

/* One position of some columns of a head's state; `vectors` is known when this is compiled, but for a last block. */
INLINE void advance_head(const SwarmRecurrence *job, int64_t row, int64_t head, int64_t first, int64_t vectors,
                         float *state) {
  int64_t left = job->values - first, keys = job->keys, key_head = head / (job->heads / job->key_heads);
  const float *query = job->query + row * job->query_stride + key_head * keys;
  const float *key = job->key + row * job->key_stride + key_head * keys;
  const float *value = job->value + row * job->value_stride + head * job->values + first;
  const float *decay = job->decay + (row * job->heads + head) * job->decays;
  int64_t step = job->decays == 1 ? 0 : 1;
  vec change[CHANNEL_VECTORS], sums[CHANNEL_VECTORS];
  for (int64_t i = 0; i < vectors; i++) change[i] = v_load_some(value + 16 * i, left - 16 * i);
  if (job->beta != NULL) {
    vec beta = v_set(job->beta[row * job->heads + head]);
    for (int64_t i = 0; i < vectors; i++) sums[i] = v_set(0.0f);
    for (int64_t k = 0; k < keys; k++) {
      vec decayed = v_set(key[k] * decay[k * step]);
      for (int64_t i = 0; i < vectors; i++)
        sums[i] = v_fma(v_load_some(state + k * job->values + 16 * i, left - 16 * i), decayed, sums[i]);
    }
    for (int64_t i = 0; i < vectors; i++) change[i] = v_mul(v_sub(change[i], sums[i]), beta);
  }
  for (int64_t i = 0; i < vectors; i++) sums[i] = v_set(0.0f);
  for (int64_t k = 0; k < keys; k++) {
    vec keeps = v_set(decay[k * step]), writes = v_set(key[k]), reads = v_set(query[k]);
    for (int64_t i = 0; i < vectors; i++) {
      float *place = state + k * job->values + 16 * i;
      vec number = v_fma(writes, change[i], v_mul(v_load_some(place, left - 16 * i), keeps));
      v_store_some(place, number, left - 16 * i);
      sums[i] = v_fma(number, reads, sums[i]);
    }
  }
  float *out = job->out + (row * job->heads + head) * job->values + first;
  for (int64_t i = 0; i < vectors; i++) v_store_some(out + 16 * i, sums[i], left - 16 * i);
}

static void recur_segment(const SwarmRecurrence *job, const SwarmSegment *segment, int64_t head, int64_t first) {
  int64_t width = least(CHANNELS, job->values - first);
  int64_t place = job->state + head * job->keys * job->values + first;
  float *state = segment->after + place;
  copy_columns(segment->before + place, state, job->keys, job->values, width);
  for (int64_t row = segment->offset; row < segment->offset + segment->count; row++) {
    if (width == CHANNELS)
      advance_head(job, row, head, first, CHANNEL_VECTORS, state);
    else
      advance_head(job, row, head, first, (width + 15) / 16, state);
  }
}

static void recur_piece(const void *argument, int64_t index, int64_t next) {
  const SwarmRecurrence *job = argument;
  int64_t blocks = channel_blocks(job->values), at = index / blocks / job->heads;
  (void)next;
  if (continues(job->segments, at)) return;
  do recur_segment(job, job->segments + at, index / blocks % job->heads, index % blocks * CHANNELS);
  while (++at < job->num_segments && continues(job->segments, at));
}

static void recur(const SwarmRecurrence *job, int threads) {
  swarm_share(recur_piece, job, job->num_segments * job->heads * channel_blocks(job->values), threads);
}

/* --- states of each channel by itself ------------------------------------------------------------------------------ */

static void scan_segment(const SwarmScan *job, const SwarmSegment *segment, int64_t first) {
  int64_t channels = job->channels, width = least(CHANNELS, channels - first);
  float *state = segment->after + job->state + first;
  copy_columns(segment->before + job->state + first, state, job->states, channels, width);
  for (int64_t row = segment->offset; row < segment->offset + segment->count; row++) {
    const float *in = job->in + row * job->mix_stride, *out = job->out_mix + row * job->mix_stride;
    for (int64_t channel = 0; channel < width; channel += 16) {
      int64_t left = width - channel, at = row * channels + first + channel;
      vec step = v_load_some(job->step + at, left), x = v_load_some(job->x + at, left), sum = v_set(0.0f);
      vec taken = v_mul(step, x);
      for (int64_t n = 0; n < job->states; n++) {
        float *place = state + n * channels + channel;
        vec rate = v_load_some(job->rate + n * channels + first + channel, left);
        vec kept = v_mul(exponential(v_mul(step, rate)), v_load_some(place, left));
        vec number = v_fma(taken, v_set(in[n]), kept);
        v_store_some(place, number, left);
        sum = v_fma(number, v_set(out[n]), sum);
      }
      v_store_some(job->out + at, sum, left);
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
