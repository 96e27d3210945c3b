// Packing of weights in the kernels' layout, from a checkpoint's rows, panel by panel: numbers are converted,
// rounded to 8 or 4 bits, or taken from GGUF blocks. Panels are shared among threads.
#pragma once

#include "common.h"
#include "pool.h"

namespace streamserve {

// The type of a checkpoint's floats.
enum Source : int32_t { FROM_F32 = 0, FROM_BF16 = 1, FROM_F16 = 2 };
ABI_ENUM(Source, ABI_VALUE(FROM_F32), ABI_VALUE(FROM_BF16), ABI_VALUE(FROM_F16));

// A weight's outputs in the checkpoint: rows[i] is the address of the k numbers of output i, null for padding.
struct Outputs {
    const void* const* rows;
    int source;
};

// The four packing functions write n_padded · k_padded numbers to `to`, in the layout of gemm.h or gemm_int.cpp.
// Padding is zero. `pack` and `quantize` return whether all numbers are finite, in the checkpoint and in the
// weight's type.
bool pack(Pool& pool, const Linear& linear, const Outputs& from, void* to);

// Round to integers as execution/formats/quantization.py does, with zero points unless `symmetric`. Scales and zero
// points are [panel][group][64].
bool quantize(Pool& pool, const Linear& linear, const Outputs& from, bool symmetric, void* to, bf16* scales,
              int8_t* zeros);

// Pack integers that are stored one in each byte.
void pack_integers(Pool& pool, const Linear& linear, const uint8_t* const* rows, void* to);

// Rows of GGUF's blocks (blocks.h): rows[i] is the address of the blocks of output i, null for padding;
// types[i] is their type.
struct BlockRows {
    const uint8_t* const* rows;
    const int32_t* types;
};

enum class PackResult : int32_t { PACKED = 0, NOT_FINITE = 1, NOT_HELD = 2 };
ABI_ENUM(PackResult, ABI_VALUE(PACKED), ABI_VALUE(NOT_FINITE), ABI_VALUE(NOT_HELD));

// Pack rows of blocks in the weight's format, or in formats that it holds exactly (execution/formats/quantization.py: widen).
// Scales and minimums (null for a symmetric weight) are tables of the weight's scale type (gemm_int.cpp). Returns
// NOT_FINITE if a number is not finite, and NOT_HELD if the scale type does not hold a scale or minimum.
PackResult pack_blocks(Pool& pool, const Linear& linear, const BlockRows& from, void* to, void* scales,
                       void* minimums);

// Write the floats of `count` rows of blocks of `k` numbers to `to` [count, k], in float32 or rounded to
// bf16. Return whether all are finite.
bool unpack_floats(Pool& pool, const BlockRows& from, int count, int k, int type, void* to);

// Write the k numbers of output `row` of a packed weight of floats to `to`.
void unpack(const Linear& linear, int row, void* to);

}  // namespace streamserve
