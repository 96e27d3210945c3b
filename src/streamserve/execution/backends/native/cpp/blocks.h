// Unpacking of the blocks of GGUF's tensor types. execution/formats/gguf/blocks.py describes the blocks; both
// implementations return the same numbers.
#pragma once

#include "common.h"

namespace streamserve {

// The values are GGUF's numbers of the types.
enum BlockType : int32_t {
    Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14,
    IQ4_NL = 20, IQ4_XS = 23, MXFP4 = 39
};
ABI_ENUM(BlockType, ABI_VALUE(Q4_0), ABI_VALUE(Q4_1), ABI_VALUE(Q5_0), ABI_VALUE(Q5_1), ABI_VALUE(Q8_0),
         ABI_VALUE(Q2_K), ABI_VALUE(Q3_K), ABI_VALUE(Q4_K), ABI_VALUE(Q5_K), ABI_VALUE(Q6_K), ABI_VALUE(IQ4_NL),
         ABI_VALUE(IQ4_XS), ABI_VALUE(MXFP4));

// Where the scales and minimums of a row's groups are unpacked to. Those of formats with two levels are to be multiplied
// by `supers` and `least`, which have a number for each LEVEL_K numbers of the row.
struct GroupTables {
    float *scales, *minimums, *supers, *least;
};

// The format of a block type: numbers of `bits` bits, a scale for each `group` of them, and a minimum unless
// `symmetric`. `levels`: scales and minimums have two levels. With a `table`, the numbers are its indices. `unpack`
// unpacks the blocks of k numbers; all tables must have memory for them, whatever the type.
struct BlockFormat {
    int group, bits;
    bool symmetric, levels;
    const int8_t* table;
    void (*unpack)(const uint8_t* blocks, int k, uint8_t* numbers, GroupTables to);
};

// Return the format of a block type, or null for a number that is not a BlockType.
const BlockFormat* block_format(int type);

}  // namespace streamserve
