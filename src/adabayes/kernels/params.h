/* The updates for each type of parameter that fp32 arithmetic serves, with the state that the includer has set. */

#define PARAM_NAME f32
#define PARAM_C float
#define LOAD_PARAM(x) (x)
#define STORE_PARAM(x, random) (x)
#include "update.h"

#define PARAM_NAME f16
#define PARAM_C uint16_t
#define LOAD_PARAM(x) from_f16(x)
#define STORE_PARAM(x, random) to_f16(x)
#include "update.h"

#define PARAM_NAME bf16
#define PARAM_C uint16_t
#define LOAD_PARAM(x) from_bf16(x)
#define STORE_PARAM(x, random) to_bf16(x, round_params ? (random) >> 16 : nearest_even(x))
#include "update.h"
