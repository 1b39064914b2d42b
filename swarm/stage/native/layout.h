/* Sizes of a quantized matrix's parts in memory; kernels.h describes the layout. */
#ifndef SWARM_LAYOUT_H
#define SWARM_LAYOUT_H

#include "kernels.h"

#define SUPER_GROUP 256 /* inputs that share nested numbers */

/* All in bytes, but the groups. */
typedef struct {
  int64_t groups;       /* of the inputs */
  int64_t super, nested; /* nested numbers of a super-group, and of a block */
  int64_t codes;        /* of a group, and what of it comes before its scales */
  int64_t scales;       /* of a group */
  int64_t group;
  int64_t block;
} SwarmLayout;

static inline SwarmLayout swarm_layout(const SwarmFormat *format, int64_t inputs) {
  static const int64_t CODES[] = {32, 40, 48, 64, 64};  /* of an input's 64 codes */
  static const int64_t SCALES[] = {128, 128, 256, 64}, MINIMA[] = {0, 128, 64, 64};
  SwarmLayout layout;
  layout.groups = (inputs + format->group - 1) / format->group;
  layout.super = 128 * ((format->scales == SWARM_SCALES_NESTED) + (format->minima == SWARM_MINIMA_NESTED));
  layout.nested = (inputs + SUPER_GROUP - 1) / SUPER_GROUP * layout.super;
  layout.codes = format->group * CODES[format->codes];
  layout.scales = SCALES[format->scales];
  layout.group = layout.codes + layout.scales + MINIMA[format->minima];
  layout.block = layout.nested + layout.groups * layout.group;
  return layout;
}

#endif
