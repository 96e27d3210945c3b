// The blocks of GGUF's tensor types, unpacked: execution/gguf/blocks.py says what is in them, and that both give the
// same numbers.
#pragma once

#include "common.h"

namespace streamserve {

// As GGUF numbers them.
enum BlockType : int32_t {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};
ABI_ENUM(BlockType, ABI_VALUE(Q4_0), ABI_VALUE(Q4_1), ABI_VALUE(Q5_0), ABI_VALUE(Q5_1), ABI_VALUE(Q8_0),
         ABI_VALUE(Q2_K), ABI_VALUE(Q3_K), ABI_VALUE(Q4_K), ABI_VALUE(Q5_K), ABI_VALUE(Q6_K), ABI_VALUE(IQ4_NL),
         ABI_VALUE(IQ4_XS), ABI_VALUE(MXFP4));

// Numbers of `bits` with a scale for each `group`, and a minimum unless `symmetric`. With a `table` they are its indices.
// `unpack` takes the blocks of k numbers; there is memory for minimums even if there are none.
struct BlockFormat {
    int group, bits;
    bool symmetric;
    const int8_t* table;
    void (*unpack)(const uint8_t* blocks, int k, uint8_t* numbers, float* scales, float* minimums);
};

// Null for a type that is not one of these.
const BlockFormat* block_format(int type);

}  // namespace streamserve
