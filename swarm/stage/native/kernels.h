/* What the library computes. Every variant, for a kind of processor, fills one table of these. */
#ifndef SWARM_KERNELS_H
#define SWARM_KERNELS_H

#include <stdint.h>

/* Kinds of numbers: of a matrix's weights, of the rows it multiplies and of what comes out. */
enum { SWARM_FLOAT32, SWARM_BFLOAT16 };

/*
 * What is applied to a product: nothing; a function of the gate, times what it gates; or, with SWARM_ALONE added to it,
 * a function of the product itself. SWARM_CLAMPED gates only: (up + 1) * gate * sigmoid(alpha * gate), both within
 * the limit. SWARM_SOFTCAP is for products alone: limit * tanh(x / limit). SWARM_EXP and SWARM_SOFTPLUS are for numbers
 * that no product gives.
 */
enum {
  SWARM_LINEAR,
  SWARM_SILU,
  SWARM_GELU_TANH,
  SWARM_GELU,
  SWARM_RELU,
  SWARM_RELU_SQUARED,
  SWARM_SIGMOID,
  SWARM_TANH,
  SWARM_QUICK_GELU,
  SWARM_SOFTCAP,
  SWARM_CLAMPED,
  SWARM_EXP,
  SWARM_SOFTPLUS,
  SWARM_ALONE = 64
};

/*
 * Weights of a few bits: for each output and group of inputs, scale * value(code) - minimum. The value of a code of four
 * bits is table[code]; of a FLOATS8 code, the E4M3 number; of all others, code - offset. All are exact in bfloat16.
 */
enum { SWARM_CODES4, SWARM_CODES5, SWARM_CODES6, SWARM_CODES8, SWARM_FLOATS8 };
enum { SWARM_SCALES_FLOAT16, SWARM_SCALES_BFLOAT16, SWARM_SCALES_FLOAT32, SWARM_SCALES_NESTED };
enum { SWARM_NO_MINIMA, SWARM_MINIMA_FLOAT16, SWARM_ZERO_POINTS, SWARM_MINIMA_NESTED };

/*
 * How a quantized matrix is packed. It consists of blocks of 64 outputs, one after the other; outputs and inputs that are
 * missing of a last block or group have code `offset`, scale 0 and minimum 0.
 *
 * A block begins with its nested numbers, if it has any: for each super-group of 256 inputs, 64 float16 scales, then, with
 * nested minima, 64 float16 minima. The groups follow in the order of their inputs. A group: its codes; 64 scales (nested:
 * 64 int8 that multiply the super-group's); with minima, 64 of them (float16; zero points and nested: uint8).
 *
 * Codes of a group come eight inputs at a time, in lines of 64 bytes. A line has sixteen outputs side by side, four bytes
 * for each: inputs 0, 2, 1 and 3 of a quad. So the even bytes are the quad's first pair, and the odd ones its second pair.
 *   CODES8, FLOATS8: for each of the two quads four lines, of outputs 0-15, 16-31, 32-47 and 48-63.
 *   CODES4: for each quad two lines: low halves of outputs 0-15, high halves of 16-31; then 32-47 and 48-63.
 *   CODES5: as CODES4; then one line with the fifth bits of both quads: bit 4 * quad + v is of outputs 16 v up to 16 v + 15.
 *   CODES6: as CODES4; then for each quad one line with two bits more: bits 2 v and 2 v + 1 are of outputs 16 v and on.
 */
typedef struct {
  int64_t codes, scales, minima;
  int64_t group;        /* inputs that share a scale: 16, 32, 64 or 128 */
  int64_t offset;
  int64_t int8_rows;    /* multiply rows that are rounded to int8, with one scale for each row and group */
  const int32_t *order; /* packed input i multiplies a row's element order[i]; NULL: element i */
  uint16_t table[16];   /* bfloat16 values of codes of four bits */
} SwarmFormat;

/*
 * A packed matrix, in blocks of 64 outputs; within a block, by pairs of inputs. bfloat16: [block][pair][64][2];
 * float32: [block][pair][2][64]. What is missing of a last block or pair is 0. With a function: 32 outputs of the gate
 * and the same 32 of what it gates in each block.
 */
typedef struct {
  const void *packed;
  const float *bias; /* NULL: none. Of a gated matrix as its outputs lie: whole blocks, 32 of the gate and 32 others. */
  int64_t outputs;   /* a gated matrix has two for each one that it gives */
  int64_t inputs;
  int64_t function;
  int64_t kind;
  float alpha, limit; /* for functions that have them */
  const SwarmFormat *format; /* of the packed weights; NULL: numbers of `kind`, as above */
} SwarmMatrix;

/* The ranks of an adapter that add to sixteen outputs: `count` from `first` on, whose vectors lie at `at` in `up`. */
typedef struct {
  int64_t first, count, at;
} SwarmRanks;

/*
 * What an adapter adds to a product: up * (scales * (down * x)), summed in float32. Groups of sixteen outputs are those
 * in which the product is stored: of a gated matrix, those of the gate, then those of what it gates.
 */
typedef struct {
  const void *down;         /* [rank][inputs], of the rows' kind */
  const float *scales;      /* [rank] */
  const void *up;           /* [vector][16], of the rows' kind */
  const SwarmRanks *groups;
  int64_t rank;             /* 0: the adapter leaves this product alone */
} SwarmAdapter;

/* The adapters of a step's rows. */
typedef struct {
  const int32_t *which;                /* by row: index into `adapters`, or -1 for none */
  const int32_t *order;                /* rows, sorted by `which` */
  const SwarmAdapter *const *adapters; /* of each one: what it adds to product number `slot` */
  int64_t num_adapters, slot;
  float *lowered; /* by row: scales * (down * x), `stride` apart */
  int64_t stride;
} SwarmAdapted;

/* Rows, `stride` elements apart, of the matrix's kind. */
typedef struct {
  const void *x;
  int64_t stride;
  void *out;
  int64_t out_stride;
  const SwarmAdapted *adapted; /* NULL: no row has an adapter */
} SwarmRows;

/* One row of a step: its new tokens' place in the batch, their positions, and where its keys and values lie. */
typedef struct {
  int64_t offset; /* of its first token in the batch */
  int64_t count;  /* tokens */
  int64_t start;  /* position of the first */
  int64_t place;  /* of its keys and values in the cache */
  int64_t guessed; /* tokens at its end that are proposals */
} SwarmSpan;

/*
 * One layer's keys and values, for each place and head a matrix, packed. Keys, with positions for outputs, as in
 * SwarmMatrix. Values, with elements for outputs, a whole number of sixteens; bfloat16: [pair of positions][element][2],
 * float32: [position][element]. Strides count numbers.
 *
 * Latents, where `values` is NULL: the first `value_size` numbers of a key are its value. Keys as rows, one position
 * after the other, each a whole number of sixteens.
 */
typedef struct {
  void *keys, *values;
  int64_t key_place, key_head, value_place, value_head;
  int64_t key_size, value_size;
  int64_t heads;
  int64_t kind;
} SwarmCache;

/* The batch: [token][head][size], with strides for tokens and heads, of the cache's kind. `out` lies without gaps. */
typedef struct {
  const void *query, *key, *value;
  void *out;
  int64_t query_token, query_head, key_token, key_head, value_token, value_head;
  int64_t query_heads;
} SwarmBatch;

typedef struct {
  float scale;
  float softcap;      /* 0: none */
  int64_t window;     /* 0: none */
  const float *sinks; /* one per query head, or NULL */
  int64_t chunk;      /* a query sees positions of its own chunk of this length only; 0: of all */
  /*
   * ALiBi: per query head, what a score changes by for each position between key and query; or NULL. If `rounded` is
   * not 0: by that much times the key's position, where position and product are rounded to bfloat16, times `rounded`.
   */
  const float *slopes;
  float rounded;
} SwarmHow;

/*
 * What is asked of a row's draw, and what came of it. Penalties are 1, 0 and 0 where there are none; `history` is empty
 * where they don't need it.
 */
typedef struct {
  const void *logits;
  const int64_t *history; /* the tokens so far, the prompt's first */
  const int64_t *biased;
  const double *biases;
  const int64_t *forbidden;
  const uint32_t *allowed; /* a bit for each word, the lowest first: all others are forbidden; NULL: none is */
  int64_t num_history, num_prompt, num_biased, num_forbidden;
  uint64_t seed, position; /* what decides */
  int64_t greedy;          /* the largest score; else by weight */
  int64_t top_k;           /* 0: all */
  double temperature, top_p, min_p, repetition, presence, frequency;
  int64_t num_best; /* how many log probabilities beside the token's own; -1: not even that */
  int64_t *ids;     /* [1 + num_best], and `logs`, too: the token, then the largest logits */
  double *logs;
  int64_t token; /* -1: the logits are not all finite */
} SwarmDraw;

/*
 * Plain weights that become codes and scales (quantization/quantize.py). A format's values are whole numbers of steps;
 * the tables have 512 entries, the middle one for the number 0.
 */
#define SWARM_LEAST_QUANTIZED 0x1p-64f /* a group of smaller weights becomes zeros: so would its float16 scale */
typedef struct {
  const void *weights; /* [row][input], of the kind */
  int64_t kind, rows, inputs, group;
  const float *values; /* nearest value of each whole number, in steps */
  const uint8_t *grid; /* its code */
  const float *trials; /* what the largest weight becomes, in steps */
  int64_t num_trials;
  float step;
  uint8_t *codes;   /* [row][input] */
  uint16_t *scales; /* float16 [row][group] */
} SwarmQuantization;

/*
 * Consecutive rows of one sequence, and a layer's state before and after them. A state consists of parts; `state` in the
 * structures below is the first number of the part that is meant.
 */
typedef struct {
  int64_t offset, count;
  const float *before;
  float *after;
} SwarmSegment;

/*
 * A causal convolution of each channel by itself, and a function of its result. State: the last taps - 1 inputs,
 * [position][channel]. Rows are of `kind`.
 */
typedef struct {
  const SwarmSegment *segments;
  int64_t num_segments, state, kind;
  const void *x;
  int64_t stride;
  void *out;
  int64_t out_stride;
  int64_t channels, taps, function;
  const float *weight; /* [tap][channel], the oldest input's first */
  const float *bias;   /* or NULL */
} SwarmConvolution;

/*
 * A state [key element][value element] for each head. At each position, in this order:
 *   state = decay * state; value = beta * (value - key . state); state = state + key x value; out = query . state.
 * Without `beta`, values are written as they are. A head of queries and keys serves heads / key_heads heads of values.
 */
typedef struct {
  const SwarmSegment *segments;
  int64_t num_segments, state;
  const float *query, *key, *value; /* [row][head][element], rows so many numbers apart */
  int64_t query_stride, key_stride, value_stride;
  const float *decay; /* [row][head][decays] */
  const float *beta;  /* [row][head], or NULL */
  float *out;         /* [row][head][value element] */
  int64_t heads, key_heads, keys, values;
  int64_t decays; /* 1, or one for each key element */
} SwarmRecurrence;

/*
 * A state [number][channel] that each channel has by itself. At each position:
 *   state = exp(step * rate) * state + step * x * in; out = the sum of out_mix * state over a channel's numbers.
 */
typedef struct {
  const SwarmSegment *segments;
  int64_t num_segments, state;
  const float *x, *step;      /* [row][channel] */
  const float *rate;          /* [number][channel] */
  const float *in, *out_mix;  /* [row][number], rows so many numbers apart */
  int64_t mix_stride;
  float *out; /* [row][channel] */
  int64_t channels, states;
} SwarmScan;

typedef struct {
  const char *name;
  /*
   * Rows times matrices, each its own rows: matrix g has rows offsets[g] up to offsets[g + 1]. All matrices have the
   * same shape, function and kind. 0, or -1 if there was no memory to work in: then `out` holds nothing of use.
   */
  int (*multiply)(const SwarmMatrix *matrices, const int64_t *offsets, int64_t groups, const SwarmRows *rows,
                  int threads);
  /*
   * out = x / rms(x) * weight for `count` pieces of `size` elements in each row, one after the other; may be in place.
   * `rounded`: what is normed is rounded to the kind before it is weighted, as Llama does; else once, at the end.
   */
  void (*rms_norm)(int64_t kind, const SwarmRows *rows, int64_t num_rows, int64_t count, int64_t size,
                   const float *weight, float epsilon, int64_t rounded);
  /* out = (x - mean) / deviation * weight + bias. No bias: NULL. */
  void (*layer_norm)(int64_t kind, const SwarmRows *rows, int64_t num_rows, int64_t size, const float *weight,
                     const float *bias, float epsilon);
  /*
   * Turn the first `turned` elements of the first `heads` heads of every row by its position, in place: the halves of
   * those elements against each other. `cosines` and `sines` hold `table` numbers of the kind `wide` for each row: as
   * many as are turned, or half as many, which then serve both halves.
   */
  void (*turn)(int64_t kind, void *rows, int64_t stride, int64_t num_rows, int64_t heads, int64_t size, int64_t turned,
               const void *cosines, const void *sines, int64_t table, int64_t wide);
  /*
   * Write the batch's keys and values where they belong, then attend. Each span has other keys and values than all
   * others. 0, or -1 if there was no memory to work in: then `out` holds nothing of use.
   */
  int (*attend)(const SwarmSpan *spans, int64_t num_spans, const SwarmCache *cache, const SwarmBatch *batch,
                const SwarmHow *how, int threads);
  /* Draw a token from each row of `words` logits. 0, or -1 if there was no memory to work in. */
  int (*draw)(int64_t kind, int64_t words, SwarmDraw *draws, int64_t num_rows, int threads);
  /* out = a + b of every number; may be in place. */
  void (*add)(int64_t kind, const void *a, const void *b, void *out, int64_t count);
  /* out = function(x) of every number. */
  void (*activate)(int64_t kind, int64_t function, const void *x, void *out, int64_t count);
  /*
   * The `choices` experts of each row whose logits are the largest, the lowest number among equals, in the order of
   * their numbers; and what each one's answer weighs: its share of the softmax, over all experts or (`normed`) over the
   * chosen ones. `rounded`: rounded to the kind.
   */
  void (*route)(int64_t kind, const void *logits, int64_t stride, int64_t num_rows, int64_t experts, int64_t choices,
                int64_t normed, int64_t rounded, int32_t *chosen, float *weights);
  /*
   * out = the sum of each row's answers times their weights, one after the other, rounded once. `slots`: where the
   * answers of a row are, `choices` for each; a negative one gives nothing.
   */
  void (*combine)(int64_t kind, const SwarmRows *answers, const int64_t *slots, const float *weights, int64_t choices,
                  int64_t num_rows, int64_t size);
  /* lowered = scales * (down * x) of `ranks` ranks from `first` on, of the listed rows of `inputs` numbers. */
  void (*lower)(int64_t kind, const SwarmAdapter *adapter, const SwarmRows *rows, const int32_t *listed,
                int64_t num_listed, int64_t inputs, int64_t first, int64_t ranks);
  /* Quantize plain weights. Every variant gives the same bits. */
  void (*quantize)(const SwarmQuantization *job, int threads);
  /* Layers with a state; see the structures. */
  void (*convolve)(const SwarmConvolution *job, int threads);
  void (*recur)(const SwarmRecurrence *job, int threads);
  void (*scan)(const SwarmScan *job, int threads);
} SwarmKernels;

/* The variant that computes. */
const SwarmKernels *swarm_kernels(void);

#endif
