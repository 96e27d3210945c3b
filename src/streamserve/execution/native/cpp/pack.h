// Weights as the kernels read them, made of a checkpoint's rows panel by panel: converted, rounded to 8 or
// 4 bits, or unpacked from blocks of them. Threads share panels.
#pragma once

#include "common.h"
#include "pool.h"

namespace streamserve {

// What a checkpoint's floats are.
enum Source : int32_t { FROM_F32 = 0, FROM_BF16 = 1, FROM_F16 = 2 };
ABI_ENUM(Source, ABI_VALUE(FROM_F32), ABI_VALUE(FROM_BF16), ABI_VALUE(FROM_F16));

// A weight's outputs as they come: rows[i] is the address of the k numbers of output i, null for padding.
struct Outputs {
    const void* const* rows;
    int source;
};

// All four write n_padded · k_padded numbers to `to`, packed as gemm.h and gemm_int.cpp draw it; what is padded is
// zero. The first two return whether all numbers are finite, as they are stored and in the weight's type.
bool pack(Pool& pool, const Linear& linear, const Outputs& from, void* to);

// Rounds as execution/quantization.py does, with and without zero points; scales and zero points are
// [panel][group][64].
bool quantize(Pool& pool, const Linear& linear, const Outputs& from, bool symmetric, void* to, bf16* scales,
              int8_t* zeros);

// Takes numbers of one byte each.
void pack_integers(Pool& pool, const Linear& linear, const uint8_t* const* rows, void* to);

// GGUF's blocks (blocks.h): rows[i] is the address of those of output i, null for padding, and types[i] their type.
struct BlockRows {
    const uint8_t* const* rows;
    const int32_t* types;
};

enum class PackResult : int32_t { PACKED = 0, NOT_FINITE = 1, NOT_HELD = 2 };
ABI_ENUM(PackResult, ABI_VALUE(PACKED), ABI_VALUE(NOT_FINITE), ABI_VALUE(NOT_HELD));

// Takes rows of blocks in the weight's format, or in ones that it holds too (execution/quantization.py: widen). Scales,
// of the weight's scale type, and minimums, null of a symmetric weight, are [panel][group][64]. Returns whether all
// numbers are finite, and whether the scale type holds the scales.
PackResult pack_blocks(Pool& pool, const Linear& linear, const BlockRows& from, void* to, void* scales,
                       float* minimums);

// The floats that `count` rows of blocks of `k` numbers stand for, in float32 or rounded to bf16, to `to` [count, k].
// Returns whether all are finite.
bool unpack_floats(Pool& pool, const BlockRows& from, int count, int k, int type, void* to);

// Output `row` of a packed weight as it was before, k numbers.
void unpack(const Linear& linear, int row, void* to);

}  // namespace streamserve
