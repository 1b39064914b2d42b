#if defined(__x86_64__) && defined(__linux__)
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx512vbmi,avx512bf16,avx512vnni,amx-tile,amx-bf16,amx-int8,avx2,fma")
#define VARIANT amx
#include "../simd/avx512.h"

#include "../kernels/tiles_amx.h"
#include "../kernels/int8_amx.h"
#include "../kernels/table.h"
#endif
