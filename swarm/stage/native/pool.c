/*
 * Threads for work of some microseconds.
 *
 * Waking a sleeping thread takes 40 to 60 µs, as long as a product of one row. So a helper that runs out of work looks
 * for more for a moment before it sleeps, and a caller never waits for one to wake: pieces are taken one by one, by
 * whoever is there. Only pieces that were taken are waited for.
 */
#define _GNU_SOURCE
#include "pool.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#if defined(__x86_64__)
#define REST() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define REST() __asm__ volatile("yield")
#else
#define REST() ((void)0)
#endif

#define MOST_HELPERS 255
#define LOOK_NS 100000 /* how long a helper looks for work before it sleeps: the time between two products of a step */

typedef struct {
  swarm_piece piece;
  const void *job;
  int64_t count;
} Task;

/* Number of the task << 32 | pieces not yet taken. In one word, so that nobody takes a piece of a task that ended. */
static atomic_uint_fast64_t offer;
static Task task; /* of the current number; written only while no piece of it can be taken */
/* Number of the task << 32 | helpers that may still join it. Whoever was woken, no more than wanted take part. */
static atomic_uint_fast64_t seats;
static atomic_int_fast64_t finished;
static atomic_int sleepers;
static atomic_int bell; /* what sleepers wait on */
static pthread_mutex_t busy = PTHREAD_MUTEX_INITIALIZER;
static int num_helpers;

static uint64_t number_of(uint64_t word) { return word >> 32; }
static int64_t left_of(uint64_t word) { return (int64_t)(word & 0xffffffffu); }

/* One less of what is left for the task of this number, if anything is: how much there was, or 0. */
static int64_t take_one(atomic_uint_fast64_t *from, uint64_t number) {
  uint64_t word = atomic_load_explicit(from, memory_order_acquire);
  while (number_of(word) == number && left_of(word) > 0) {
    if (atomic_compare_exchange_weak(from, &word, word - 1)) return left_of(word);
  }
  return 0;
}

/* The next piece of this task, or -1. */
static int64_t take(const Task *mine, uint64_t number) {
  int64_t left = take_one(&offer, number);
  return left > 0 ? mine->count - left : -1;
}

/* One piece ahead, so that a piece can bring the next one's data into the cache. */
static void work(const Task *mine, uint64_t number) {
  int64_t index = take(mine, number);
  while (index >= 0) {
    int64_t next = take(mine, number);
    mine->piece(mine->job, index, next);
    atomic_fetch_add_explicit(&finished, 1, memory_order_release);
    index = next;
  }
}

static int64_t now_ns(void) {
  struct timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void sleep_until_rung(uint64_t number) {
  int seen = atomic_load(&bell);
  atomic_fetch_add(&sleepers, 1);
  if (number_of(atomic_load(&offer)) == number) syscall(SYS_futex, &bell, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
  atomic_fetch_sub(&sleepers, 1);
}

/* The number of a task after `seen`. */
static uint64_t await_task(uint64_t seen) {
  int64_t until = now_ns() + LOOK_NS;
  for (unsigned turn = 1;; turn++) {
    uint64_t number = number_of(atomic_load_explicit(&offer, memory_order_acquire));
    if (number != seen) return number;
    REST();
    if (turn % 64 == 0 && now_ns() > until) sleep_until_rung(seen);
  }
}

static void *help(void *argument) {
  (void)argument;
  uint64_t number = 0;
  for (;;) {
    number = await_task(number);
    uint64_t word = atomic_load_explicit(&offer, memory_order_acquire);
    /* While a piece is left, the task of this number can't end, and what is read here is its own. A copy that is torn
       because it did end is never used: no piece of that number can be taken any more. */
    if (number_of(word) != number || left_of(word) == 0) continue;
    Task mine = task;
    if (take_one(&seats, number) > 0) work(&mine, number);
  }
  return NULL;
}

static void hire(int wanted) {
  static const int faults[] = {SIGILL, SIGFPE, SIGSEGV, SIGBUS};
  sigset_t others, before;
  sigfillset(&others);
  /* A thread's own faults: blocked, they would end the process without a word of whoever handles them. */
  for (int i = 0; i < 4; i++) sigdelset(&others, faults[i]);
  pthread_sigmask(SIG_SETMASK, &others, &before); /* all other signals are for threads that the interpreter knows */
  while (num_helpers < wanted && num_helpers < MOST_HELPERS) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, help, NULL) != 0) break;
    pthread_detach(thread);
    num_helpers++;
  }
  pthread_sigmask(SIG_SETMASK, &before, NULL);
}

static void alone(swarm_piece piece, const void *job, int64_t count) {
  for (int64_t index = 0; index < count; index++) piece(job, index, index + 1 < count ? index + 1 : -1);
}

void swarm_share(swarm_piece piece, const void *job, int64_t count, int threads) {
  if (threads < 2 || count < 2 || count > UINT32_MAX || pthread_mutex_trylock(&busy) != 0) {
    alone(piece, job, count);
    return;
  }
  hire(threads - 1);
  uint64_t number = (number_of(atomic_load(&offer)) + 1) & 0xffffffffu;
  task = (Task){piece, job, count};
  atomic_store(&finished, 0);
  atomic_store(&seats, number << 32 | (uint64_t)(threads - 1));
  atomic_store(&offer, number << 32 | (uint64_t)count);
  if (atomic_load(&sleepers) > 0) {
    atomic_fetch_add(&bell, 1);
    syscall(SYS_futex, &bell, FUTEX_WAKE_PRIVATE, threads - 1, NULL, NULL, 0);
  }
  Task mine = task;
  work(&mine, number);
  for (unsigned turn = 1; atomic_load_explicit(&finished, memory_order_acquire) < count; turn++) {
    REST();
    if (turn % 1024 == 0) sched_yield(); /* the helper may wait for this very core */
  }
  pthread_mutex_unlock(&busy);
}

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

typedef struct {
  void *memory;
  int64_t bytes;
} Scratch;

static void drop_scratch(void *held) {
  for (int use = 0; use < SWARM_USES; use++) free(((Scratch *)held)[use].memory);
  free(held);
}

static void make_key(void) { pthread_key_create(&scratch_key, drop_scratch); }

static Scratch *scratch_of_this_thread(void) {
  pthread_once(&scratch_once, make_key);
  Scratch *held = pthread_getspecific(scratch_key);
  if (held == NULL) {
    held = calloc(SWARM_USES, sizeof *held);
    if (held != NULL) pthread_setspecific(scratch_key, held);
  }
  return held;
}

void *swarm_scratch(int use, int64_t bytes) {
  Scratch *all = scratch_of_this_thread();
  if (all == NULL) return NULL;
  Scratch *held = &all[use];
  if (held->bytes < bytes) {
    free(held->memory);
    int64_t rounded = (bytes + 4095) / 4096 * 4096;
    held->memory = aligned_alloc(4096, (size_t)rounded);
    held->bytes = held->memory == NULL ? 0 : rounded;
  }
  return held->memory;
}
