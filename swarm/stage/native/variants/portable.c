#define VARIANT portable
#include "../simd/portable.h"

#include "../kernels/table.h"
