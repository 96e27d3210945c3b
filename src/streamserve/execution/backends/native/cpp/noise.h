// Functions of sampling and draft selection: the noise of execution/compute/noise.py for groups of tokens, and maxima.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "sampling.h"

namespace streamserve {

constexpr int LANES = 32;  // tokens whose random numbers are computed together

// Compute the words of Philox4x32-10 (execution/compute/noise.py) from which the tokens' noise is computed: w1·2³² + w0.
inline void random_words(const Draw& draw, const int32_t* ids, int count, uint64_t* words) {
    constexpr uint64_t LOW = 0xffffffff;
    uint64_t c0[LANES], c1[LANES], c2[LANES], c3[LANES];
    for (int lane = 0; lane < LANES; lane++) {
        c0[lane] = draw.choice;
        c1[lane] = draw.index;
        c2[lane] = uint32_t(ids[lane < count ? lane : 0]);
        c3[lane] = 0;
    }
    uint64_t k0 = draw.seed & LOW, k1 = draw.seed >> 32;
    for (int round = 0; round < 10; round++) {
        for (int lane = 0; lane < LANES; lane++) {
            uint64_t p0 = (c0[lane] & LOW) * 0xD2511F53u, p1 = (c2[lane] & LOW) * 0xCD9E8D57u;
            c0[lane] = (p1 >> 32) ^ c1[lane] ^ k0;
            c1[lane] = p1 & LOW;
            c2[lane] = (p0 >> 32) ^ c3[lane] ^ k1;
            c3[lane] = p0 & LOW;
        }
        k0 = (k0 + 0x9E3779B9u) & LOW;
        k1 = (k1 + 0xBB67AE85u) & LOW;
    }
    for (int lane = 0; lane < LANES; lane++) words[lane] = c1[lane] << 32 | c0[lane];
}

// Return a number in (0, 1). The largest sum rounds to 1, for which the noise would be infinite.
inline double uniform(uint64_t words) {
    double u = (double(int64_t(words >> 11)) + 0.5) * 0x1p-53;
    return u < 1.0 - 0x1p-53 ? u : 1.0 - 0x1p-53;
}

inline double gumbel(uint64_t words) { return -std::log(-std::log(uniform(words))); }

// Return whether all `values` are finite. x - x is 0 for a finite x, and NaN otherwise.
inline bool all_finite(const float* values, int count) {
    float sums[LANES] = {};
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) sums[lane] += values[i + lane] - values[i + lane];
    }
    for (; i < count; i++) sums[0] += values[i] - values[i];
    float sum = 0.0f;
    for (float part : sums) sum += part;
    return sum == 0.0f;
}

template <class T>
T largest(const T* values, int count) {
    T best[LANES];
    std::fill(best, best + LANES, -std::numeric_limits<T>::infinity());
    int i = 0;
    for (; i + LANES <= count; i += LANES) {
        for (int lane = 0; lane < LANES; lane++) {
            best[lane] = values[i + lane] > best[lane] ? values[i + lane] : best[lane];
        }
    }
    for (; i < count; i++) best[0] = values[i] > best[0] ? values[i] : best[0];
    return *std::max_element(best, best + LANES);
}

}  // namespace streamserve
