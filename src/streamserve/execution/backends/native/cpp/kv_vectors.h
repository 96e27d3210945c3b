// Keys and values of 8 bits: a vector of `dim` numbers is stored as `dim` signed integers, then their float32
// scale. Rounding rules and bytes equal execution/compute/kv_vectors.py.
#pragma once

#include <algorithm>
#include <cfloat>
#include <limits>

#include "elementwise.h"

namespace streamserve {

// Quantize `from` [dim]: write `dim` integers and their scale to `to`.
template <class V, class T>
void quantize_vector(const T* from, int dim, char* to) {
    int whole = dim / V::lanes * V::lanes;
    V zero = V::set(0.0f), peak = zero, check = zero;  // `check` becomes NaN if a number is not finite
    for (int d = 0; d < whole; d += V::lanes) {
        V x = V::load(from + d);
        peak = peak.max(x).max(zero - x);
        check = check + x * zero;
    }
    float largest = peak.largest(), invalid = check.sum();
    for (int d = whole; d < dim; d++) {
        float x = widen(from[d]);
        largest = std::max(largest, std::abs(x));
        invalid += x * 0.0f;
    }
    float scale = invalid != invalid ? std::numeric_limits<float>::quiet_NaN() : largest / 127.0f;
    if (scale < FLT_MIN) scale = 0.0f;
    std::memcpy(to + dim, &scale, sizeof scale);
    if (!(scale > 0.0f)) {
        std::memset(to, 0, size_t(dim));
        return;
    }
    int8_t* integers = reinterpret_cast<int8_t*>(to);
    for (int d = 0; d < whole; d += V::lanes) (V::load(from + d) / V::set(scale)).store(integers + d);
    for (int d = whole; d < dim; d++) integers[d] = int8_t(std::nearbyint(widen(from[d]) / scale));
}

// Write the numbers [dim] of a stored vector to `to`, rounded to T.
template <class V, class T>
static inline void dequantize_vector(const char* from, int dim, T* to) {
    float scale;
    std::memcpy(&scale, from + dim, sizeof scale);
    const int8_t* integers = reinterpret_cast<const int8_t*>(from);
    int whole = dim / V::lanes * V::lanes;
    for (int d = 0; d < whole; d += V::lanes) (V::load(integers + d) * V::set(scale)).store(to + d);
    for (int d = whole; d < dim; d++) put(to[d], float(integers[d]) * scale);
}

}  // namespace streamserve
