/* Which variants there are, which of them this processor can run, and the one that computes. */
#include <stddef.h>
#include <string.h>

#include "adapters.h"
#include "kernels.h"
#include "proof.h"
#include "tiles_here.h"

/* The build says which of the variants this compiler could compile: SWARM_HAS_… A file for another kind of machine
 * compiles to nothing. */
extern const SwarmKernels swarm_kernels_portable;
#if defined(__x86_64__) && defined(__linux__)
extern const SwarmKernels swarm_kernels_avx2, swarm_kernels_avx512, swarm_kernels_avx512bf16, swarm_kernels_amx;
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
extern const SwarmKernels swarm_kernels_neon, swarm_kernels_neonbf16;
#endif

typedef struct {
  const SwarmKernels *kernels;
  int (*runs_here)(void);
} Variant;

static int anywhere(void) { return 1; }

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>

/* Conversions of float16. Older compilers don't know the name. */
__attribute__((unused)) static int has_f16c(void) {
  unsigned a, b, c, d;
  return __get_cpuid(1, &a, &b, &c, &d) && (c & 1u << 29);
}

__attribute__((unused)) static int has_avx2(void) {
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && has_f16c();
}

__attribute__((unused)) static int has_avx512(void) {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}

/* A compiler that can't build these variants may not know the name either. */
#if defined(SWARM_HAS_AVX512BF16) || defined(SWARM_HAS_AMX)
static int has_avx512bf16(void) {
  return has_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vbmi") &&
         __builtin_cpu_supports("avx512vnni");
}

__attribute__((unused)) static int has_amx(void) { return has_avx512bf16() && swarm_tiles_refused() == NULL; }
#endif
#endif

#if defined(__aarch64__) && defined(__linux__)
#define DOTS (1ul << 20) /* HWCAP_ASIMDDP */
#define BF16 (1ul << 14) /* HWCAP2_BF16, which older headers lack */
__attribute__((unused)) static int has_neonbf16(void) {
  return (getauxval(AT_HWCAP2) & BF16) != 0 && (getauxval(AT_HWCAP) & DOTS) != 0;
}
#endif

/* The quickest first. */
static const Variant VARIANTS[] = {
#if defined(__x86_64__) && defined(__linux__)
#ifdef SWARM_HAS_AMX
    {&swarm_kernels_amx, has_amx},
#endif
#ifdef SWARM_HAS_AVX512BF16
    {&swarm_kernels_avx512bf16, has_avx512bf16},
#endif
#ifdef SWARM_HAS_AVX512
    {&swarm_kernels_avx512, has_avx512},
#endif
#ifdef SWARM_HAS_AVX2
    {&swarm_kernels_avx2, has_avx2},
#endif
#endif
#if defined(__aarch64__) && defined(__linux__)
#ifdef SWARM_HAS_NEONBF16
    {&swarm_kernels_neonbf16, has_neonbf16},
#endif
#ifdef SWARM_HAS_NEON
    {&swarm_kernels_neon, anywhere},
#endif
#endif
    {&swarm_kernels_portable, anywhere},
};

enum { NUM_VARIANTS = sizeof VARIANTS / sizeof *VARIANTS };

static const SwarmKernels *chosen;

/* The digest of the sources that this was built from (sources.py): it is not used beside others. */
const char *swarm_native_sources(void) { return SWARM_NATIVE_SOURCES; }

const SwarmKernels *swarm_kernels(void) { return chosen; }

/* Name of the variant number `index`, NULL past the last; `runs_here` gets whether this processor can run it. */
const char *swarm_variant(int index, int *runs_here) {
  if (index < 0 || index >= NUM_VARIANTS) return NULL;
#if defined(__x86_64__)
  __builtin_cpu_init();
#endif
  *runs_here = VARIANTS[index].runs_here();
  return VARIANTS[index].kernels->name;
}

/* From now on this variant computes, in all threads. 0, or -1 if there is none of this name that runs here. */
int swarm_choose(const char *name) {
  int runs_here;
  for (int index = 0; index < NUM_VARIANTS; index++) {
    if (strcmp(swarm_variant(index, &runs_here), name) == 0 && runs_here) {
      chosen = VARIANTS[index].kernels;
      return 0;
    }
  }
  return -1;
}

/* What is wrong with the variant of this name: NULL if nothing is, or if there is none. */
const char *swarm_proof(const char *name) {
  for (int index = 0; index < NUM_VARIANTS; index++)
    if (strcmp(VARIANTS[index].kernels->name, name) == 0)
      return swarm_prove(VARIANTS[index].kernels, &swarm_kernels_portable);
  return NULL;
}

int swarm_multiply(const SwarmMatrix *matrices, const int64_t *offsets, int64_t groups, const SwarmRows *rows,
                   int threads) {
  return chosen->multiply(matrices, offsets, groups, rows, threads);
}

/* One matrix, all rows, and their adapters if they have any (NULL: none has). */
int swarm_linear(const SwarmMatrix *matrix, const void *x, int64_t stride, int64_t num_rows, void *out,
                 int64_t out_stride, const SwarmAdapted *adapted, int threads) {
  const SwarmRows rows = {x, stride, out, out_stride, NULL};
  return swarm_adapt(matrix, rows, num_rows, adapted, 0, threads);
}

void swarm_rms_norm(int64_t kind, const SwarmRows *rows, int64_t num_rows, int64_t count, int64_t size,
                    const float *weight, float epsilon, int64_t rounded) {
  chosen->rms_norm(kind, rows, num_rows, count, size, weight, epsilon, rounded);
}

void swarm_layer_norm(int64_t kind, const SwarmRows *rows, int64_t num_rows, int64_t size, const float *weight,
                      const float *bias, float epsilon) {
  chosen->layer_norm(kind, rows, num_rows, size, weight, bias, epsilon);
}

void swarm_turn(int64_t kind, void *rows, int64_t stride, int64_t num_rows, int64_t heads, int64_t size,
                int64_t turned, const void *cosines, const void *sines, int64_t table, int64_t wide) {
  chosen->turn(kind, rows, stride, num_rows, heads, size, turned, cosines, sines, table, wide);
}

void swarm_activate(int64_t kind, int64_t function, const void *x, void *out, int64_t count) {
  chosen->activate(kind, function, x, out, count);
}

void swarm_quantize(const SwarmQuantization *job, int threads) { chosen->quantize(job, threads); }

void swarm_convolve(const SwarmConvolution *job, int threads) { chosen->convolve(job, threads); }

void swarm_recur(const SwarmRecurrence *job, int threads) { chosen->recur(job, threads); }

void swarm_scan(const SwarmScan *job, int threads) { chosen->scan(job, threads); }

int swarm_attend(const SwarmSpan *spans, int64_t num_spans, const SwarmCache *cache, const SwarmBatch *batch,
                 const SwarmHow *how, int threads) {
  return chosen->attend(spans, num_spans, cache, batch, how, threads);
}

int swarm_draw(int64_t kind, int64_t words, SwarmDraw *draws, int64_t num_rows, int threads) {
  return chosen->draw(kind, words, draws, num_rows, threads);
}
