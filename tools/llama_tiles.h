/*
 * For building llama.cpp with gcc 12 on a processor with AMX: CXXFLAGS="-include …/llama_tiles.h". That compiler's
 * _tile_loadconfig names 8 of the 64 bytes that it reads, so the stores of the others are dropped, and the first product
 * with quantized weights ends the process.
 */
#if defined(__cplusplus) && defined(__AMX_TILE__)
#include <immintrin.h>
#define _tile_loadconfig(config)                           \
  do {                                                     \
    __asm__ volatile("" : : "r"(config) : "memory");       \
    _tile_loadconfig(config);                              \
  } while (0)
#endif
