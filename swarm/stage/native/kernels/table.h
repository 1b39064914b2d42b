/* The table of a variant, once its header has said what a vector is. VARIANT: its name. */
#include "../simd/functions.h"
#include "adapters.h"
#include "attention.h"
#include "experts.h"
#include "norms.h"
#include "products.h"
#include "quantize.h"
#include "recurrence.h"
#include "rope.h"
#include "sampling.h"

#define JOIN(a, b) a##b
#define TABLE(name) JOIN(swarm_kernels_, name)
#define QUOTE(a) #a
#define NAME(a) QUOTE(a)

const SwarmKernels TABLE(VARIANT) = {
    .name = NAME(VARIANT),
    .multiply = multiply_matrices,
    .rms_norm = rms_norm,
    .layer_norm = layer_norm,
    .turn = turn,
    .attend = attend,
    .draw = draw_rows,
    .add = add_numbers,
    .activate = activate,
    .route = route,
    .combine = combine,
    .lower = lower,
    .quantize = quantize,
    .convolve = convolve,
    .recur = recur,
    .scan = scan,
};
