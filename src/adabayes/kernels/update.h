/* The two updates of a run of elements of one tensor, in whole units, for the types that the includer has set. Not
 * guarded: included once for each pair of types. */

#define RUN(update)                                                                                                \
    CLONES static void NAME(update, PARAM_NAME, STATE_NAME)(                                                       \
        const void *numbers, const bias_corrections *bias, void *restrict param, const void *restrict grad,        \
        void *restrict exp_avg, void *restrict second_state, uint32_t first, int32_t count, int round_params,      \
        uint32_t key)

/* predict: gain + (noise - forget * gain); update: prior / (1 + prior * B g^2). A filter that has not started, whose
 * state is all zero, starts at the fixed point of its first gradient (or, if slope is 0, at lr_sgd). With MEMORY, it
 * remembers so many steps: gain / (h + sqrt(h^2 + share (gain g / lr)^2)), h = (1 - share (1 - gain / lr_sgd)) / 2;
 * the root of the share goes into the slope, so that no square is larger than it has to be. */
#define FILTER(MAY_START, MEMORY, from)                                                                              \
    for (int32_t i = from; i < from + UNIT; i++) {                                                                 \
        const uint32_t who = (first + (uint32_t)i) ^ key, random = mix(who), more = mix(who ^ PARAM_STREAM);       \
        const REAL gi = (REAL)LOAD_PARAM(g[i]);                                                                    \
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(s[i]);                                  \
        const REAL mean = beta1 * old + weight * gi;                                                               \
        const int unstarted = MAY_START && before == 0 && old == 0;                                                \
        const REAL line = slope * gi;                                                                              \
        const REAL begun = unstarted ? 1 / (half + SQRT(half * half + line * line)) : before;                      \
        const REAL next = begun + (noise - forget * begun), prior = next < noise ? noise : next;                   \
        const REAL alive = begun < (REAL)LEAST_GAIN ? (REAL)LEAST_GAIN : begun;                                    \
        const REAL h = rest + pull * alive, known = share_slope * gi * alive;                                      \
        const REAL posterior = MEMORY ? alive / (h + SQRT(h * h + known * known))                                  \
                                      : prior / (1 + prior * (information * gi * gi));                             \
        const REAL moved = (REAL)LOAD_PARAM(p[i]) * shrink - size * (posterior * mean);                            \
        p[i] = STORE_PARAM(moved, more);                                                                           \
        m[i] = STORE_STATE(mean, random);                                                                          \
        s[i] = STORE_STATE(unstarted && gi == 0 && slope != 0 ? 0 : posterior, random >> 16);                      \
        (void)random, (void)more;                                                                                  \
    }

RUN(adabayes) {
    const adabayes_numbers *c = numbers;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *s = second_state;
    const double unscale = c->common.unscale; /* goes into what the gradient is multiplied with */
    const REAL shrink = (REAL)c->common.shrink;
    const REAL weight = (REAL)((1 - c->common.beta1) * unscale), beta1 = (REAL)c->common.beta1;
    const REAL forget = (REAL)c->forget, noise = (REAL)c->noise;
    const REAL information = (REAL)(c->information * unscale * unscale);
    const REAL half = (REAL)c->half, slope = (REAL)(c->slope * unscale);
    const double share = c->memory == 0 ? 0 : 1 / (bias->step < c->memory ? bias->step : c->memory);
    const REAL rest = (REAL)((1 - share) / 2), pull = (REAL)(share * c->half);
    const REAL share_slope = (REAL)(sqrt(share) * (c->slope * unscale));
    const REAL size = (REAL)(c->common.rate / bias->first);
    (void)round_params;

    /* To start a filter costs a root, and few have not started: so only in units where there is one. */
    for (int32_t from = 0; from < count; from += UNIT) {
        int unstarted = 0;
        for (int32_t i = from; i < from + UNIT; i++) unstarted |= LOAD_STATE(s[i]) == 0;
        if (c->memory != 0) {
            if (unstarted) {
                FILTER(1, 1, from)
            } else {
                FILTER(0, 1, from)
            }
        } else if (unstarted) {
            FILTER(1, 0, from)
        } else {
            FILTER(0, 0, from)
        }
    }
}

/* With `centred`, the variance is that of what the average did not predict. With `cautious`, a weight stays where it is
 * if its average does not have the sign of the newest gradient. */
#define SETTLED(CENTRED, CAUTIOUS)                                                                                 \
    for (int32_t i = 0; i < count; i++) {                                                                          \
        const uint32_t who = (first + (uint32_t)i) ^ key, random = mix(who), more = mix(who ^ PARAM_STREAM);       \
        const REAL gi = (REAL)LOAD_PARAM(g[i]);                                                                    \
        const REAL old = (REAL)LOAD_STATE(m[i]), before = (REAL)LOAD_STATE(v[i]);                                  \
        const REAL mean = beta1 * old + weight * gi;                                                               \
        const REAL seen = CENTRED ? gi - old * (REAL)(1 / unscale) : gi;                                           \
        const REAL product = weight2 * (seen * seen); /* whose square may overflow */                              \
        const REAL square = before * beta2 + (product <= LARGEST ? product : weight2 * seen * seen);               \
        const REAL kept = shrink == 0 ? 0 : (REAL)LOAD_PARAM(p[i]) * shrink; /* if 0, it need not be a number */   \
        const int opposed = CAUTIOUS && (((mean > 0) & (gi <= 0)) | ((mean < 0) & (gi >= 0)));                     \
        const REAL moving = opposed ? 0 : mean;                                                                    \
        const REAL moved = kept - size * (moving / (SQRT(square + inside) + outside));                             \
        p[i] = STORE_PARAM(moved, more);                                                                           \
        m[i] = STORE_STATE(mean, random);                                                                          \
        v[i] = STORE_STATE(square, random >> 16);                                                                  \
        (void)random, (void)more;                                                                                  \
    }

RUN(adabayes_fp) {
    const adabayes_fp_numbers *c = numbers;
    PARAM_C *p = param;
    const PARAM_C *g = grad;
    STATE_C *m = exp_avg, *v = second_state;
    const double unscale = c->common.unscale; /* goes into what the gradient is multiplied with */
    const REAL shrink = (REAL)c->common.shrink;
    const REAL weight = (REAL)((1 - c->common.beta1) * unscale), beta1 = (REAL)c->common.beta1;
    const REAL beta2 = (REAL)c->common.beta2, weight2 = (REAL)((1 - c->common.beta2) * unscale * unscale);
    /* The denominator and the step are both multiplied by the root of v's bias correction. */
    const double root = sqrt(bias->second), outer = root * (c->eps / 2);
    const REAL inside = (REAL)(outer * outer), outside = (REAL)outer;
    const REAL size = (REAL)(c->common.rate * root / bias->first);
    (void)round_params;

    if (c->centred != 0) {
        if (c->cautious != 0) {
            SETTLED(1, 1)
        } else {
            SETTLED(1, 0)
        }
    } else if (c->cautious != 0) {
        SETTLED(0, 1)
    } else {
        SETTLED(0, 0)
    }
}

#undef RUN
#undef FILTER
#undef SETTLED
#undef PARAM_NAME
#undef PARAM_C
#undef LOAD_PARAM
#undef STORE_PARAM
