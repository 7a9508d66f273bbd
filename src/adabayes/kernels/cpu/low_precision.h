/* 16-bit floating point, and the random bits that round it stochastically. */
#include <stdint.h>
#include <string.h>

static inline float as_float(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

static inline uint32_t as_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

static inline float from_bf16(uint16_t x) { return as_float((uint32_t)x << 16); }

/* Adds `carry` below the last bit that stays: 0x7fff and the last bit to round to nearest even, 16 random bits to round
 * up with the probability of the remainder. That keeps infinities; a nan could carry over into a number. */
static inline uint16_t to_bf16(float x, uint32_t carry) {
    return (uint16_t)((x == x ? as_bits(x) + carry : 0x7fc00000u) >> 16);
}

static inline uint32_t nearest_even(float x) { return 0x7fffu + ((as_bits(x) >> 16) & 1u); }

static inline float from_f16(uint16_t x) {
    uint32_t magnitude = (uint32_t)(x & 0x7fffu) << 13;
    uint32_t special = (x & 0x7c00u) == 0x7c00u;
    float scaled = as_float(magnitude) * 0x1p112f; /* moves the exponent's bias, also of subnormals */
    uint32_t bits = special ? magnitude | 0x7f800000u : as_bits(scaled);
    return as_float(bits | (uint32_t)(x & 0x8000u) << 16);
}

static inline uint16_t to_f16(float x) {
    uint32_t bits = as_bits(x), magnitude = bits & 0x7fffffffu;
    uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
    uint32_t subnormal = as_bits(as_float(magnitude) + 0.5f) - 0x3f000000u; /* the addition rounds */
    uint32_t special = magnitude > 0x7f800000u ? 0x7e00u : 0x7c00u;
    uint32_t half = magnitude >= 0x47800000u ? special : magnitude < 0x38800000u ? subnormal : normal;
    return (uint16_t)(half | (bits >> 16 & 0x8000u));
}

/* A random generator that is a function of seed, tensor, step and element; random_bits.py computes the same bits.
 * Neighbouring elements get evenly spread values (multiples of a constant). Over the steps, the key makes the values of
 * one element independent. Rounding needs no more than that, and it costs a sixth of the loop. */

static inline uint32_t mix(uint32_t x) {
    x *= 0x9e3779b1u;
    return x ^ x >> 16;
}

static inline uint32_t scatter(uint32_t x) { /* for keys: Wellons's lowbias32 */
    x = (x ^ x >> 16) * 0x21f0aaadu;
    x = (x ^ x >> 15) * 0xd35a2d97u;
    return x ^ x >> 15;
}

static inline uint32_t key_of(int64_t seed, int64_t index, double step) {
    uint32_t key = scatter((uint32_t)seed) ^ (uint32_t)(seed >> 32);
    key = scatter(key + (uint32_t)index);
    return scatter(key + (uint32_t)(int64_t)step);
}
