#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx512vnni,avx2,fma")
#define VARIANT avx512bf16
#include "../simd/avx512.h"

#include "../kernels/tiles_bf16.h"
#include "../kernels/table.h"
#endif
