/* All kernels for one kind of elements, as one translation unit. */
#include "linear.c"
#include "gemm.c"
#include "attention.c"
#include "elementwise.c"
#include "blocks.c"
