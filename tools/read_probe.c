/* Reads memory as fast as it can be read, by some threads: what a product can be measured against. */
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { MOST_THREADS = 64, STEP = 256, AHEAD = 4096 };

typedef uint64_t Line __attribute__((vector_size(64)));

typedef struct {
  const char *from;
  int64_t bytes;
  uint64_t sum;
} Part;

static void *read_part(void *argument) {
  Part *part = argument;
  Line sums[4] = {{0}};
  for (int64_t at = 0; at + STEP <= part->bytes; at += STEP) {
    for (int i = 0; i < 4; i++) {
      __builtin_prefetch(part->from + at + AHEAD + 64 * i, 0, 3);
      sums[i] ^= *(const Line *)(const void *)(part->from + at + 64 * i);
    }
  }
  Line all = sums[0] ^ sums[1] ^ sums[2] ^ sums[3];
  for (int i = 0; i < 8; i++) part->sum ^= all[i];
  return NULL;
}

/* `bytes` from `from` on, which is a multiple of 64. */
uint64_t read_memory(const char *from, int64_t bytes, int threads) {
  pthread_t others[MOST_THREADS];
  Part parts[MOST_THREADS];
  int64_t each = bytes / threads / STEP * STEP;
  for (int i = 0; i < threads; i++) parts[i] = (Part){from + i * each, each, 0};
  for (int i = 1; i < threads; i++) pthread_create(&others[i], NULL, read_part, &parts[i]);
  read_part(&parts[0]);
  uint64_t sum = parts[0].sum;
  for (int i = 1; i < threads; i++) {
    pthread_join(others[i], NULL);
    sum ^= parts[i].sum;
  }
  return sum;
}
