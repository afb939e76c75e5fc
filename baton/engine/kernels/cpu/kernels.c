/* All kernels, for both kinds of elements, as one translation unit. */
#define ELEM_BF16
#include "linear.c"
#undef ELEM_BF16
#undef elem
#include "linear.c"
