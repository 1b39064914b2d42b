/* Sixty-four bytes in four registers (NEON, aarch64); see bytes_avx512.h for what the operations do. */
#ifndef SWARM_SIMD_BYTES_H
#define SWARM_SIMD_BYTES_H

typedef struct {
  uint8x16_t part[4];
} byte_vec;
typedef byte_vec pair_vec;

#define B_EACH(expression)                                         \
  byte_vec result;                                                    \
  for (int i = 0; i < 4; i++) result.part[i] = (expression);       \
  return result

INLINE byte_vec b_load(const void *from) { B_EACH(vld1q_u8((const uint8_t *)from + 16 * i)); }
INLINE void p_store(uint16_t *to, pair_vec x) {
  for (int i = 0; i < 4; i++) vst1q_u8((uint8_t *)to + 16 * i, x.part[i]);
}
#define TABLE_BITS 4
INLINE byte_vec b_table(const uint8_t table[64]) { return b_load(table); }
INLINE byte_vec b_low(byte_vec x) { B_EACH(vandq_u8(x.part[i], vdupq_n_u8(0x0f))); }
INLINE byte_vec b_high(byte_vec x) { B_EACH(vshrq_n_u8(x.part[i], 4)); }

INLINE byte_vec b_with_bits(byte_vec codes, byte_vec line, int at, int mask) {
  const int8x16_t by = vdupq_n_s8((int8_t)(4 - at));
  B_EACH(vorrq_u8(codes.part[i], vandq_u8(vshlq_u8(line.part[i], by), vdupq_n_u8((uint8_t)mask))));
}

INLINE void p_join(byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  for (int i = 0; i < 4; i++) {
    first->part[i] = vtrn1q_u8(low.part[i], high.part[i]);
    second->part[i] = vtrn2q_u8(low.part[i], high.part[i]);
  }
}

INLINE byte_vec look_up(byte_vec table, byte_vec at) { B_EACH(vqtbl1q_u8(table.part[i], at.part[i])); }

/* The upper halves of eight whole numbers as float32. */
INLINE uint8x16_t upper_halves(int16x8_t x) {
  uint32x4_t low = vreinterpretq_u32_f32(vcvtq_f32_s32(vmovl_s16(vget_low_s16(x))));
  uint32x4_t high = vreinterpretq_u32_f32(vcvtq_f32_s32(vmovl_s16(vget_high_s16(x))));
  return vreinterpretq_u8_u16(vcombine_u16(vshrn_n_u32(low, 16), vshrn_n_u32(high, 16)));
}
INLINE void p_from_differences(byte_vec codes, int64_t offset, pair_vec *first, pair_vec *second) {
  const int16x8_t from = vdupq_n_s16((int16_t)offset);
  for (int i = 0; i < 4; i++) {
    uint16x8_t all = vreinterpretq_u16_u8(codes.part[i]);
    uint16x8_t even = vandq_u16(all, vdupq_n_u16(0x00ff)), odd = vshrq_n_u16(all, 8);
    first->part[i] = upper_halves(vsubq_s16(vreinterpretq_s16_u16(even), from));
    second->part[i] = upper_halves(vsubq_s16(vreinterpretq_s16_u16(odd), from));
  }
}

INLINE void p_from_floats8(byte_vec codes, byte_vec low, byte_vec high, pair_vec *first, pair_vec *second) {
  const uint8x16_t sign = vdupq_n_u8(0x80);
  byte_vec lower, upper;
  for (int i = 0; i < 4; i++) {
    uint8x16_t size = vbicq_u8(codes.part[i], sign), small = vcltq_u8(size, vdupq_n_u8(8));
    uint8x16_t up = vaddq_u8(vshrq_n_u8(size, 4), vdupq_n_u8(0x3c));
    up = vbslq_u8(small, vqtbl1q_u8(high.part[i], size), up);
    upper.part[i] = vorrq_u8(up, vandq_u8(codes.part[i], sign));
    lower.part[i] = vbslq_u8(small, vqtbl1q_u8(low.part[i], size), vshlq_n_u8(size, 4));
  }
  p_join(lower, upper, first, second);
}

INLINE float32x4_t widen_f16_4(const uint16_t *from) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from))); }
INLINE vec v_load_f16(const uint16_t *from) {
  return (vec){widen_f16_4(from), widen_f16_4(from + 4), widen_f16_4(from + 8), widen_f16_4(from + 12)};
}
INLINE vec v_load_i8(const int8_t *from) {
  int8x16_t all = vld1q_s8(from);
  int16x8_t low = vmovl_s8(vget_low_s8(all)), high = vmovl_s8(vget_high_s8(all));
  return (vec){vcvtq_f32_s32(vmovl_s16(vget_low_s16(low))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(low))),
               vcvtq_f32_s32(vmovl_s16(vget_low_s16(high))), vcvtq_f32_s32(vmovl_s16(vget_high_s16(high)))};
}
INLINE vec v_load_u8(const uint8_t *from) {
  uint8x16_t all = vld1q_u8(from);
  uint16x8_t low = vmovl_u8(vget_low_u8(all)), high = vmovl_u8(vget_high_u8(all));
  return (vec){vcvtq_f32_u32(vmovl_u16(vget_low_u16(low))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(low))),
               vcvtq_f32_u32(vmovl_u16(vget_low_u16(high))), vcvtq_f32_u32(vmovl_u16(vget_high_u16(high)))};
}

#undef B_EACH
#endif
