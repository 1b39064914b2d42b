/*
 * May this process use tiles (AMX)? The processor must have them, with products of bfloat16 and of bytes; the system must keep them
 * for a thread that is put aside; and it must have given its leave, which a process asks for once. A refusal happens
 * where signal handlers have stacks too small for what is to be kept (Python's faulthandler makes such ones), and in
 * some sandboxes.
 */
#define _GNU_SOURCE
#include "tiles_here.h"

#if defined(__x86_64__) && defined(__linux__)
#include <cpuid.h>
#include <stddef.h>
#include <stdatomic.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ASK_FOR_STATE 0x1023 /* ARCH_REQ_XCOMP_PERM of asm/prctl.h */
#define TILE_SHAPES 17       /* numbers of kinds of state, of a processor's manual */
#define TILE_DATA 18

static int processor_has_tiles(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
  return (d & 1u << 22) && (d & 1u << 24) && (d & 1u << 25); /* AMX-BF16, AMX-TILE, AMX-INT8 */
}

static int system_keeps_tiles(void) {
  unsigned a, b, c, d;
  if (!__get_cpuid(1, &a, &b, &c, &d) || !(c & 1u << 27)) return 0; /* OSXSAVE: XGETBV may be asked */
  uint32_t low, high;
  __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & 1u << TILE_SHAPES) && (low & 1u << TILE_DATA);
}

static const char *ask(void) {
  if (!processor_has_tiles()) return "";
  if (!system_keeps_tiles()) return "the system does not keep the processor's tiles (XCR0)";
  if (syscall(SYS_arch_prctl, ASK_FOR_STATE, TILE_DATA) != 0)
    return "the system gives no leave to use the processor's tiles (ARCH_REQ_XCOMP_PERM); is a signal stack too small?";
  return NULL;
}

/* Weak, so that a test's emulator can stand in for a processor that has none. */
__attribute__((weak)) const char *swarm_tiles_refused(void) {
  static atomic_int asked;
  static const char *answer;
  if (!atomic_load(&asked)) {
    answer = ask(); /* whoever asks twice at once gets the same answer twice */
    atomic_store(&asked, 1);
  }
  return answer;
}
#else
const char *swarm_tiles_refused(void) { return ""; }
#endif
