/* Includes the rules for each type of parameter that is computed in fp32, with the type of state set by the includer. */

#define PARAM_NAME f32
#define PARAM_C float
#define LOAD_PARAM(x) (x)
#define STORE_PARAM(x, random) (x)
#include "rules.h"

#define PARAM_NAME f16
#define PARAM_C uint16_t
#define LOAD_PARAM(x) from_f16(x)
#define STORE_PARAM(x, random) to_f16(x)
#include "rules.h"

#define PARAM_NAME bf16
#define PARAM_C uint16_t
#define LOAD_PARAM(x) from_bf16(x)
#define STORE_PARAM(x, random) to_bf16(x, round_params ? (random) >> 16 : nearest_even(x))
#include "rules.h"
