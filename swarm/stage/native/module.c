/* What is asked of the library before anything else, on every machine it can be built on. */
#include <stdint.h>

/* Which version of the functions' arguments this is: a library from an older build is not used. */
int swarm_native_version(void) { return 3; }

int swarm_native_supported(void) {
#if defined(__x86_64__) && defined(__linux__)
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512bf16");
#else
  return 0;
#endif
}
