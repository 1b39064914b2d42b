#if defined(__aarch64__) && defined(__linux__)
#define VARIANT neon
#include "../simd/neon.h"

#include "../kernels/table.h"
#endif
