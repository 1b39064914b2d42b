#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")
#define VARIANT avx512
#include "../simd/avx512.h"

#include "../kernels/table.h"
#endif
