/* Small whole numbers of NEON; see dots_avx512.h for what the operations do. Codes beyond 127 are less by 128. */
#ifndef SWARM_DOTS_H
#define SWARM_DOTS_H

typedef struct {
  int32x4_t a, b, c, d;
} ints;

/* How products are added: by SDOT; or widened. */
enum { DOTS_AT_ONCE, DOTS_WIDE, NUM_DOTS };

#define INT8_ROWS 4
#define INT8_VECTORS(dots) 1
#define SIGNED_CODES(largest) ((largest) > 127)

#ifdef __ARM_FEATURE_DOTPROD
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif

#define INT8_EACH_TILE(DEFINE) INT8_EACH_ROWS(DEFINE, DOTS_AT_ONCE) INT8_EACH_ROWS(DEFINE, DOTS_WIDE)
#define INT8_EACH_ROWS(DEFINE, DOTS) DEFINE(DOTS, 1) DEFINE(DOTS, 2) DEFINE(DOTS, 3) DEFINE(DOTS, 4)
INLINE int quads_at_once(int dots) { return dots == NUM_DOTS ? 0 : 1; }
INLINE int dots_for(int largest) { return largest < 0 ? NUM_DOTS : HAS_DOTS ? DOTS_AT_ONCE : DOTS_WIDE; }

INLINE byte_vec b_bits(byte_vec x, int by, int mask) {
  for (int i = 0; i < 4; i++)
    x.part[i] = vandq_u8(vshlq_u8(x.part[i], vdupq_n_s8((int8_t)-by)), vdupq_n_u8((uint8_t)mask));
  return x;
}
INLINE byte_vec b_or(byte_vec x, byte_vec y) {
  for (int i = 0; i < 4; i++) x.part[i] = vorrq_u8(x.part[i], y.part[i]);
  return x;
}
INLINE byte_vec b_sixteen(const uint8_t table[16]) {
  uint8x16_t all = vld1q_u8(table);
  return (byte_vec){{all, all, all, all}};
}
INLINE void b_store(uint8_t *to, byte_vec x) {
  for (int i = 0; i < 4; i++) vst1q_u8(to + 16 * i, x.part[i]);
}
INLINE byte_vec b_minus(byte_vec x, int y) {
  for (int i = 0; i < 4; i++) x.part[i] = vsubq_u8(x.part[i], vdupq_n_u8((uint8_t)y));
  return x;
}
INLINE byte_vec b_lookup(byte_vec table, byte_vec at) {
  for (int i = 0; i < 4; i++) at.part[i] = vqtbl1q_u8(table.part[i], at.part[i]);
  return at;
}

INLINE ints i_set(int32_t x) {
  int32x4_t all = vdupq_n_s32(x);
  return (ints){all, all, all, all};
}
INLINE vec v_from_ints(ints x) {
  return (vec){vcvtq_f32_s32(x.a), vcvtq_f32_s32(x.b), vcvtq_f32_s32(x.c), vcvtq_f32_s32(x.d)};
}

INLINE int32x4_t dots_4(int dots, int32x4_t sum, uint8x16_t codes, int32x4_t quads) {
  int8x16_t left = vreinterpretq_s8_u8(codes), right = vreinterpretq_s8_s32(quads);
#if HAS_DOTS
  if (dots == DOTS_AT_ONCE) return vdotq_s32(sum, left, right);
#endif
  (void)dots;
  int16x8_t low = vmull_s8(vget_low_s8(left), vget_low_s8(right)), high = vmull_high_s8(left, right);
  return vaddq_s32(sum, vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high)));
}
INLINE ints i_dots(int dots, ints sum, const byte_vec *codes, const ints *quads) {
  return (ints){dots_4(dots, sum.a, codes->part[0], quads->a), dots_4(dots, sum.b, codes->part[1], quads->b),
                dots_4(dots, sum.c, codes->part[2], quads->c), dots_4(dots, sum.d, codes->part[3], quads->d)};
}

INLINE void v_store_quads(int8_t *to, vec x) {
  const uint8x16_t order = {0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15};
  int16x8_t low = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.a)), vmovn_s32(vcvtnq_s32_f32(x.b)));
  int16x8_t high = vcombine_s16(vmovn_s32(vcvtnq_s32_f32(x.c)), vmovn_s32(vcvtnq_s32_f32(x.d)));
  int8x16_t all = vcombine_s8(vmovn_s16(low), vmovn_s16(high));
  vst1q_s8(to, vqtbl1q_s8(all, order));
}

#endif
