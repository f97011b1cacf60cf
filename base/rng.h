#ifndef TANDEM_BASE_RNG_H
#define TANDEM_BASE_RNG_H

/* Counter-based random numbers: Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as
 * 1, 2, 3", SC 2011; checked against the known-answer vectors of Random123). A draw is a pure
 * function of (seed, position, purpose, index), so a request's text depends neither on its
 * neighbours in the batch nor on how often somebody else drew. */

#include <stdint.h>

/* What a draw is for. Two purposes never share bits. */
enum rng_purpose {
    RNG_SAMPLE = 1,    /* the target's own token */
    RNG_DRAFT = 2,     /* the draft's token */
    RNG_ACCEPT = 3,    /* the accept test */
    RNG_RESIDUAL = 4,  /* the corrected token */
    RNG_SELECTION = 5, /* SparDA's reserve blocks */
    RNG_GUMBEL = 6,    /* noise that target and draft share, index = token id */
    RNG_TRAIN = 13,    /* scorers: first weights, order of windows, texts and places */
    RNG_EVAL = 14,     /* prompts that `tandem eval` makes */
    RNG_TEST = 15
};

/* 128 random bits of block `counter` under `key`. */
static inline void philox4x32(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c0 = counter[0], c1 = counter[1], c2 = counter[2], c3 = counter[3];
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t p0 = (uint64_t)0xD2511F53u * c0, p1 = (uint64_t)0xCD9E8D57u * c2;
        uint32_t n0 = (uint32_t)(p1 >> 32) ^ c1 ^ k0, n2 = (uint32_t)(p0 >> 32) ^ c3 ^ k1;
        c1 = (uint32_t)p1;
        c3 = (uint32_t)p0;
        c0 = n0;
        c2 = n2;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0;
    out[1] = c1;
    out[2] = c2;
    out[3] = c3;
}

/* 32 random bits for (seed, position, purpose, index). */
static inline uint32_t rng_u32(uint64_t seed, uint64_t position, enum rng_purpose purpose,
                               uint32_t index) {
    uint32_t counter[4] = {(uint32_t)position, (uint32_t)(position >> 32), (uint32_t)purpose,
                           index / 4};
    uint32_t key[2] = {(uint32_t)seed, (uint32_t)(seed >> 32)}, out[4];
    philox4x32(counter, key, out);
    return out[index % 4];
}

/* Uniform in [0, 1) with 24 bits, exact in f32. */
static inline float rng_uniform(uint64_t seed, uint64_t position, enum rng_purpose purpose,
                                uint32_t index) {
    return (float)(rng_u32(seed, position, purpose, index) >> 8) * 0x1p-24f;
}

#endif
