/* One call of the AMX variant's product, as attention makes it, for a test. Memory that must not be read is guarded. */
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,amx-tile,amx-bf16,avx2,fma")
#include "simd/avx512.h"

#include "kernels/tiles_amx.h"
#include "kernels/operands.h"

#include <sys/mman.h>

/* Memory of so many bytes; whoever reads or writes behind it ends the process. */
void *guarded(int64_t bytes) {
  int64_t pages = (bytes + 4095) / 4096 * 4096;
  char *memory = mmap(NULL, (size_t)(pages + 4096), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory + pages, 4096, PROT_NONE) != 0) return NULL;
  return memory + pages - bytes;
}

void piece_of_product(const char *weights, int64_t step, int64_t pairs, int vectors, const uint16_t *x, int64_t stride,
                      int64_t rows, float *sums, int64_t sums_stride, int first, const char *ahead) {
  multiply(SWARM_BFLOAT16, (Piece){weights, step, pairs, vectors}, (Operand){x, stride, 2}, rows,
           (Sums){sums, sums_stride, first}, ahead);
}

void end_of_piece(void) { multiplied(); }
