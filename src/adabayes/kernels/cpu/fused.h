/* What matrix.c uses of fused.c. */
#include <stdint.h>

enum dtype { F32, F64, BF16, F16, DTYPES };

/* A rule for elements of one tensor. `first` is the index of the first element, and `key` that of the random generator. */
typedef void update(const double *coefficients, void *restrict p, const void *restrict g, void *restrict m,
                    void *restrict s, uint32_t first, int32_t count, int returns_step, int round_params, uint32_t key);

/* The rule of AdaBayes-FP for gradients of fp32, or of fp64 if the state is fp64. */
update *fixed_point_update(int state_type);
