// Weights as the kernels read them, made of a checkpoint's rows panel by panel: converted, or rounded to 8 or 4
// bits. Threads share panels.
#pragma once

#include "common.h"
#include "pool.h"

namespace streamserve {

// What a checkpoint's floats are.
enum Source : int32_t { FROM_F32 = 0, FROM_BF16 = 1, FROM_F16 = 2 };

// A weight's outputs as they come: rows[i] is the address of the k numbers of output i, null for padding.
struct Outputs {
    const void* const* rows;
    int source;
};

// All three write n_padded · k_padded numbers to `to`, packed as gemm.h and gemm_int.cpp draw it; what is padded is
// zero. The first two return whether all numbers are finite, as they are stored and in the weight's type.
bool pack(Pool& pool, const Linear& linear, const Outputs& from, void* to);

// Rounds as execution/quantization.py does, with and without zero points; scales and zero points are
// [panel][group][64].
bool quantize(Pool& pool, const Linear& linear, const Outputs& from, bool symmetric, void* to, bf16* scales,
              int8_t* zeros);

// Takes numbers of one byte each.
void pack_integers(Pool& pool, const Linear& linear, const uint8_t* const* rows, void* to);

// Output `row` of a packed weight as it was before, k numbers.
void unpack(const Linear& linear, int row, void* to);

}  // namespace streamserve
