/*
 * Runs our AMX variant without the processor's AMX: for tests alone, to be preloaded (LD_PRELOAD).
 *
 * An invalid instruction is a fault (SIGILL). Those of AMX are invalid on a processor without it; where it has them, the
 * test changes the number of their map of opcodes to 31. The handler here decodes the eight that the variant uses, does by Intel's manual what they would do, and lets the program go on behind them. Anything else that it meets
 * (another instruction, shapes that don't fit each other, tiles that are still set up at the end) ends the process with
 * a word about it. The variant is offered because a preloaded function stands before the library's own of its name.
 *
 * AMX_EMULATOR=forgets leaves out odd inputs, AMX_EMULATOR=uneven adds in another order where a tile has one row, and
 * with AMX_EMULATOR="three bytes" a product of bytes leaves out every fourth: so that a test can see what becomes of a processor that computes otherwise than we think.
 */
#if defined(__x86_64__) && defined(__linux__)
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <unistd.h>
#include <xmmintrin.h>

#define TILES 8
#define ROWS 16
#define FLUSH_AND_ZERO 0x9fc0 /* MXCSR: round to nearest, no exceptions, denormal results and operands are 0 */

typedef struct {
  int palette;
  int rows[TILES], bytes[TILES];
  uint8_t data[TILES][ROWS][64];
} State;

static __thread State state __attribute__((tls_model("initial-exec")));
static atomic_int configured; /* threads that have tiles set up */
static int forgets, uneven, poisoned, three_bytes;

const char *swarm_tiles_refused(void) { return NULL; }

static void die(const char *why, const uint8_t *at) {
  static const char digits[] = "0123456789abcdef";
  char bytes[3 * 16 + 2] = "\n";
  for (int i = 0; i < 16; i++) {
    bytes[3 * i + 1] = digits[at[i] >> 4];
    bytes[3 * i + 2] = digits[at[i] & 15];
    bytes[3 * i + 3] = ' ';
  }
  (void)!write(2, "amx emulator: ", 14);
  (void)!write(2, why, strlen(why));
  (void)!write(2, bytes, sizeof bytes - 1);
  (void)!write(2, "\n", 1);
  _exit(99);
}

/* An instruction with a VEX prefix of three bytes. */
typedef struct {
  const uint8_t *at;
  int opcode, prefix; /* 0: none, 1: 66, 2: F3, 3: F2 */
  int reg, rm, third; /* of registers: ModRM's two and VEX's one */
  int is_register;
  uint8_t *address;
  int64_t stride;
  int length;
} Decoded;

static int64_t general(const ucontext_t *context, int number) {
  static const int order[] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                              REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
  return context->uc_mcontext.gregs[order[number]];
}

static void decode_memory(Decoded *found, const ucontext_t *context, int mod, int extend_base, int extend_index) {
  const uint8_t *next = found->at + 5;
  int64_t address = 0, stride = 0;
  int has_base = 1, base = found->rm | extend_base;
  if (found->rm == 4) {
    int sib = *next++, index = (sib >> 3 & 7) | extend_index;
    base = (sib & 7) | extend_base;
    if (index != 4) stride = general(context, index) * (1 << (sib >> 6));
    has_base = !((sib & 7) == 5 && mod == 0);
  } else if (found->rm == 5 && mod == 0) {
    die("addresses relative to the instruction are not emulated", found->at);
  }
  if (has_base) address = general(context, base);
  if (mod == 1) {
    address += (int8_t)*next++;
  } else if (mod == 2 || !has_base) {
    int32_t offset;
    memcpy(&offset, next, 4);
    address += offset;
    next += 4;
  }
  found->address = (uint8_t *)address;
  found->stride = stride;
  found->length = (int)(next - found->at);
}

static Decoded decode(const ucontext_t *context) {
  const uint8_t *at = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
  if (at[0] != 0xc4 || ((at[1] & 0x1f) != 2 && (at[1] & 0x1f) != 31)) die("no instruction of AMX", at);
  if (at[2] & 0x84) die("VEX.W or VEX.L is set", at);
  int modrm = at[4], mod = modrm >> 6;
  Decoded found = {.at = at, .opcode = at[3], .prefix = at[2] & 3, .reg = modrm >> 3 & 7, .rm = modrm & 7,
                   .third = 15 - (at[2] >> 3 & 15), .is_register = mod == 3, .length = 5};
  if (!(at[1] & 0x80)) die("there are only eight tiles", at);
  if (!found.is_register) decode_memory(&found, context, mod, at[1] & 0x20 ? 0 : 8, at[1] & 0x40 ? 0 : 8);
  return found;
}

static void configure(const Decoded *found) {
  const uint8_t *shapes = found->address;
  if (shapes[0] != 1 || shapes[1] != 0) die("a palette other than 1, or a first row other than 0", found->at);
  for (int i = 2; i < 16; i++)
    if (shapes[i] != 0) die("reserved bytes are set", found->at);
  if (state.palette == 0) atomic_fetch_add(&configured, 1);
  memset(&state, 0, sizeof state);
  state.palette = 1;
  for (int tile = 0; tile < 16; tile++) {
    uint16_t bytes;
    memcpy(&bytes, shapes + 16 + 2 * tile, sizeof bytes);
    int rows = shapes[48 + tile];
    if (tile >= TILES && (bytes || rows)) die("more than eight tiles", found->at);
    if (bytes > 64 || rows > ROWS || !bytes != !rows) die("a shape that no tile can have", found->at);
    if (tile >= TILES) continue;
    state.bytes[tile] = bytes;
    state.rows[tile] = rows;
  }
}

static void release(void) {
  if (state.palette != 0) atomic_fetch_sub(&configured, 1);
  memset(&state, 0, sizeof state);
}

static int ready(const Decoded *found, int tile) {
  if (tile >= TILES || state.palette == 0 || state.rows[tile] == 0) die("a tile that isn't set up", found->at);
  return tile;
}

static void load(const Decoded *found) {
  int tile = ready(found, found->reg);
  memset(state.data[tile], 0, sizeof state.data[tile]);
  for (int row = 0; row < state.rows[tile]; row++)
    memcpy(state.data[tile][row], found->address + row * found->stride, (size_t)state.bytes[tile]);
}

static void store(const Decoded *found) {
  int tile = ready(found, found->reg);
  for (int row = 0; row < state.rows[tile]; row++)
    memcpy(found->address + row * found->stride, state.data[tile][row], (size_t)state.bytes[tile]);
}

static float widened(const uint8_t *row, int element) {
  uint16_t half;
  memcpy(&half, row + 2 * element, sizeof half);
  uint32_t bits = (uint32_t)half << 16;
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

/* The tiles of a product, once their shapes fit: sums, rows, weights. */
typedef struct {
  int sums, left, right, quarters, outputs; /* `quarters`: groups of four bytes in a row */
} Product;

static Product product_of(const Decoded *found) {
  int sums = ready(found, found->reg), left = ready(found, found->rm), right = ready(found, found->third);
  if (sums == left || sums == right || left == right) die("one tile twice", found->at);
  int quarters = state.bytes[left] / 4, outputs = state.bytes[sums] / 4;
  if (state.bytes[left] % 4 || state.bytes[sums] % 4 || state.bytes[sums] != state.bytes[right] ||
      state.rows[sums] != state.rows[left] || quarters != state.rows[right])
    die("tiles whose shapes don't fit", found->at);
  return (Product){sums, left, right, quarters, outputs};
}

/* TDPBF16PS of Intel's manual (volume 2): even and odd products of a step by themselves, then their sum to the rest. */
static void multiply(const Decoded *found) {
  Product all = product_of(found);
  int sums = all.sums, left = all.left, right = all.right, pairs = all.quarters, outputs = all.outputs;
  int uneven_here = uneven && state.rows[sums] == 1;
  unsigned before = _mm_getcsr();
  _mm_setcsr(FLUSH_AND_ZERO);
  for (int row = 0; row < state.rows[sums]; row++) {
    float even[ROWS] = {0}, odd[ROWS] = {0}, chain[ROWS];
    for (int pair = 0; pair < pairs; pair++) {
      float first = widened(state.data[left][row], 2 * pair), second = widened(state.data[left][row], 2 * pair + 1);
      for (int n = 0; n < outputs; n++) {
        even[n] = __builtin_fmaf(first, widened(state.data[right][pair], 2 * n), even[n]);
        odd[n] = __builtin_fmaf(second, widened(state.data[right][pair], 2 * n + 1), odd[n]);
      }
    }
    memcpy(chain, state.data[sums][row], sizeof chain);
    for (int n = 0; n < outputs && !uneven_here; n++) chain[n] += even[n] + (forgets ? 0.0f : odd[n]);
    for (int n = 0; n < outputs && uneven_here; n++) chain[n] = chain[n] + even[n] + odd[n];
    if (poisoned) chain[0] = __builtin_nanf("");
    memset(state.data[sums][row], 0, 64);
    memcpy(state.data[sums][row], chain, (size_t)state.bytes[sums]);
  }
  for (int row = state.rows[sums]; row < ROWS; row++) memset(state.data[sums][row], 0, 64);
  _mm_setcsr(before);
}

/* TDPBSSD and TDPBSUD: four products of bytes to each sum; those of the third tile are signed or not. */
static void multiply_bytes(const Decoded *found, int is_signed) {
  Product all = product_of(found);
  for (int row = 0; row < state.rows[all.sums]; row++) {
    for (int n = 0; n < all.outputs; n++) {
      int32_t sum;
      memcpy(&sum, state.data[all.sums][row] + 4 * n, sizeof sum);
      for (int i = 0; i < 4 * all.quarters; i++) {
        if (three_bytes && i % 4 == 3) continue;
        uint8_t weight = state.data[all.right][i / 4][4 * n + i % 4];
        sum += (int8_t)state.data[all.left][row][i] * (is_signed ? (int8_t)weight : weight);
      }
      memcpy(state.data[all.sums][row] + 4 * n, &sum, sizeof sum);
    }
  }
}

static void emulate(int signal_number, siginfo_t *info, void *argument) {
  (void)signal_number;
  (void)info;
  ucontext_t *context = argument;
  Decoded found = decode(context);
  int form = found.opcode << 8 | found.prefix << 4 | found.is_register;
  if (form == 0x4900 && found.reg == 0)
    configure(&found);
  else if (form == 0x4901 && found.reg == 0 && found.rm == 0)
    release();
  else if (form == 0x4931 && found.rm == 0)
    memset(state.data[ready(&found, found.reg)], 0, sizeof state.data[0]);
  else if (form == 0x4b30 && found.rm == 4)
    load(&found);
  else if (form == 0x4b20 && found.rm == 4)
    store(&found);
  else if (form == 0x5c21)
    multiply(&found);
  else if (form == 0x5e31)
    multiply_bytes(&found, 1);
  else if (form == 0x5e21)
    multiply_bytes(&found, 0);
  else
    die("an instruction that is not emulated", found.at);
  context->uc_mcontext.gregs[REG_RIP] += found.length;
}

__attribute__((constructor)) static void install(void) {
  const char *how = getenv("AMX_EMULATOR");
  forgets = how != NULL && strcmp(how, "forgets") == 0;
  uneven = how != NULL && strcmp(how, "uneven") == 0;
  three_bytes = how != NULL && strcmp(how, "three bytes") == 0;
  poisoned = how != NULL && strcmp(how, "poisoned") == 0;
  struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_NODEFER};
  sigemptyset(&action.sa_mask);
  sigaction(SIGILL, &action, NULL);
}
/* What a thread sets up would be in the way of others who use tiles. */
__attribute__((destructor)) static void finish(void) {
  static const char why[] = "amx emulator: the process ends, and a thread has not given back its tiles\n";
  if (atomic_load(&configured) == 0) return;
  (void)!write(2, why, sizeof why - 1);
  _exit(98);
}
#endif
