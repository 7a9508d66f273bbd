/* Includes block.h for both types that it computes in, with the level of instructions set by the includer. */

#define TYPE f32
#define REAL float
#define SQRT sqrtf
#define LARGEST_REAL FLT_MAX
#define LARGEST_GRADIENT 6.6e30f /* FLT_MAX^0.8, as in eigenbasis.py */
#include "block.h"

#define TYPE f64
#define REAL double
#define SQRT sqrt
#define LARGEST_REAL DBL_MAX
#define LARGEST_GRADIENT 4.3e246 /* DBL_MAX^0.8 */
#include "block.h"

#undef LEVEL
#undef VECTOR_BYTES
#undef ROWS
