/* All kernels for one element type, as one translation unit. */
#include "linear.c"
#include "gemm.c"
#include "attention.c"
#include "elementwise.c"
#include "blocks.c"
#include "quantized.c"
#include "sampling.c"
#include "calls.c"
