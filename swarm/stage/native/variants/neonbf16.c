#if defined(__aarch64__) && defined(__linux__)
#pragma GCC target("arch=armv8.2-a+bf16+dotprod")
#define VARIANT neonbf16
#include "../simd/neon.h"

#include "../kernels/tiles_bfdot.h"
#include "../kernels/table.h"
#endif
