/*
 * When a process is killed, the kernel first gives back its memory, page by page, and closes its sockets after that: so
 * long the others don't know that it is dead. A tenth of a second for each GiB, more or less.
 *
 * The memory is given back by whoever uses it last. So a second task uses it, too: it shares nothing but the memory,
 * does nothing, and ends after the process. The process then closes its sockets at once, and the keeper gives back the
 * memory when nobody waits for it any more.
 *
 * Why it waits on a descriptor of the process instead of asking for a signal at its parent's end: that signal comes when
 * the thread that made the keeper has ended. On a busy machine other threads may end later, and the last of them would
 * then be the last user of the memory.
 */
#define _GNU_SOURCE
#include "keeper.h"

#include <errno.h>

#if defined(__linux__) && (defined(__x86_64__) || defined(__aarch64__))
#include <sys/syscall.h>
#endif

#if defined(SYS_pidfd_open) && defined(SYS_close_range)
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define STACK_BYTES 16384 /* for one small function; mapped once, and left with the process */
#define SIGNAL_SET_BYTES 8

/* A system call that touches no errno: the keeper has none of its own, it would write into its maker's. */
static inline long raw(long number, long a, long b, long c, long d, long e) {
#if defined(__x86_64__)
  long result;
  register long r10 __asm__("r10") = d;
  register long r8 __asm__("r8") = e;
  __asm__ volatile("syscall"
                   : "=a"(result)
                   : "a"(number), "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                   : "rcx", "r11", "memory");
  return result;
#else
  register long x8 __asm__("x8") = number;
  register long x0 __asm__("x0") = a;
  register long x1 __asm__("x1") = b;
  register long x2 __asm__("x2") = c;
  register long x3 __asm__("x3") = d;
  register long x4 __asm__("x4") = e;
  __asm__ volatile("svc 0" : "+r"(x0) : "r"(x8), "r"(x1), "r"(x2), "r"(x3), "r"(x4) : "memory");
  return x0;
#endif
}

/* All that the keeper ever does. Signals are blocked: it has its maker's handlers, which are not for it. */
static int keep(void *of) {
  const int process = (int)(intptr_t)of;
  struct pollfd end = {.fd = process, .events = POLLIN};
  raw(SYS_prctl, PR_SET_NAME, (long)"swarm-keeper", 0, 0, 0);
  raw(SYS_setsid, 0, 0, 0, 0, 0); /* a signal to its maker's group would come to the keeper, too */
  raw(SYS_chdir, (long)"/", 0, 0, 0, 0);
  if (process > 0) raw(SYS_close_range, 0, process - 1, 0, 0, 0);
  raw(SYS_close_range, (unsigned)process + 1, ~0U, 0, 0, 0);
  long found;
  do found = raw(SYS_ppoll, (long)&end, 1, 0, 0, SIGNAL_SET_BYTES);
  while (found == -EINTR);
  raw(SYS_exit_group, 0, 0, 0, 0, 0);
  return 0;
}

static int start(int process) {
  /* Nobody ever has descriptors that high: does the call exist, and is it allowed? */
  if (raw(SYS_close_range, ~0U, ~0U, 0, 0, 0) != 0) return -ENOSYS;
  char *stack = mmap(NULL, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
  if (stack == MAP_FAILED) return -errno;
  const uint64_t all = ~(uint64_t)0;
  uint64_t before;
  raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&all, (long)&before, SIGNAL_SET_BYTES, 0);
  /* Untraced: a debugger would take it for a thread of the process. */
  const int keeper = clone(keep, stack + STACK_BYTES, CLONE_VM | CLONE_UNTRACED, (void *)(intptr_t)process);
  const int error = errno;
  raw(SYS_rt_sigprocmask, SIG_SETMASK, (long)&before, 0, SIGNAL_SET_BYTES, 0);
  if (keeper >= 0) return keeper;
  munmap(stack, STACK_BYTES);
  return -error;
}

int swarm_keeper_start(void) {
  const long process = raw(SYS_pidfd_open, getpid(), 0, 0, 0, 0);
  if (process < 0) return (int)process;
  const int keeper = start((int)process);
  close((int)process);
  return keeper;
}
#else
int swarm_keeper_start(void) { return -ENOSYS; }
#endif
