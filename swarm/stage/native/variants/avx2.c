#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx2,fma,f16c")
#define VARIANT avx2
#include "../simd/avx2.h"

#include "../kernels/table.h"
#endif
