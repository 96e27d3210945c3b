// Shared by all kernels: number types, instruction paths, and the layout of activations and weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

#include "abi.h"

namespace streamserve {

struct bf16 {
    uint16_t bits;
};

inline float widen(float x) { return x; }
inline float widen(int8_t x) { return float(x); }

inline float widen(bf16 x) {
    uint32_t bits = uint32_t(x.bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// A float of 8 bits: sign, 4 bits of exponent, 3 of fraction; no infinities. `widen` returns its value / 256,
// which is the float16 number with the same fields; scales are multiplied by 256 to make up for it.
struct e4m3 {
    uint8_t bits;
};

inline float widen(e4m3 x) {
    uint32_t exponent = x.bits >> 3 & 15, fraction = x.bits & 7;
    uint32_t bits = (exponent + 127 - 15) << 23 | fraction << 20;
    float value;
    std::memcpy(&value, &bits, 4);
    if (exponent == 0) value = float(fraction) * 0x1p-17f;
    return x.bits & 128 ? -value : value;
}

// Round to nearest, ties to even. A NaN stays a NaN.
inline bf16 round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// The instructions that a kernel uses. On each path, a row's bits do not depend on the other rows. AVX2,
// AVX512 and AVX512_BF16 compute the same bits.
enum Path : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };
ABI_ENUM(Path, ABI_VALUE(PORTABLE), ABI_VALUE(AVX2), ABI_VALUE(AVX512), ABI_VALUE(AVX512_BF16), ABI_VALUE(AMX));
enum Type : int32_t { F32 = 0, BF16 = 1 };
ABI_ENUM(Type, ABI_VALUE(F32), ABI_VALUE(BF16));
// float16, for scales.
struct f16 {
    uint16_t bits;
};

inline float widen(f16 x) {
    uint32_t sign = uint32_t(x.bits & 0x8000) << 16, exponent = (x.bits >> 10) & 31, fraction = x.bits & 0x3ff;
    uint32_t bits = sign | ((exponent == 31 ? 255 : exponent + 112) << 23) | (fraction << 13);
    float out = float(fraction) * 0x1p-24f;  // of a number without exponent
    if (exponent) {
        std::memcpy(&out, &bits, 4);
        return out;
    }
    return sign ? -out : out;
}

// A power of two, stored as the exponent of its float32; or zero.
struct e8m0 {
    uint8_t bits;
};

inline float widen(e8m0 x) {
    uint32_t bits = uint32_t(x.bits) << 23;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}

// How the scales and offsets of integers are stored.
//   SCALE_F32               scales and offsets in float32
//   SCALE_BF16, SCALE_F16   scales in 16 bits, zero points in 8 bits; an offset is -(zero point · scale)
//   SCALE_E8M0              scales in 8 bits, no zero points
//   SCALE_LEVELS            scales and offsets in 8 bits, to be multiplied by float16 that LEVEL_K of K share
enum ScaleType { SCALE_F32 = 0, SCALE_BF16 = 1, SCALE_F16 = 2, SCALE_E8M0 = 3, SCALE_LEVELS = 4 };
ABI_ENUM(ScaleType, ABI_VALUE(SCALE_F32), ABI_VALUE(SCALE_BF16), ABI_VALUE(SCALE_F16), ABI_VALUE(SCALE_E8M0),
         ABI_VALUE(SCALE_LEVELS));
constexpr int LEVEL_K = 256;


// The activation of an MLP's gates (elementwise.h: activate).
enum Activation : int32_t { SILU = 0, GELU = 1, CLAMPED_SILU = 2 };
ABI_ENUM(Activation, ABI_VALUE(SILU), ABI_VALUE(GELU), ABI_VALUE(CLAMPED_SILU));
// The numbers of a weight: of the type of its activations, unsigned integers, or e4m3.
enum Numbers : int32_t { PLAIN = 0, INTEGERS = 1, E4M3 = 2 };
ABI_ENUM(Numbers, ABI_VALUE(PLAIN), ABI_VALUE(INTEGERS), ABI_VALUE(E4M3));

// Weights are packed in panels of 64 columns; activations are laid out in chunks of 32 numbers.
constexpr int PANEL = 64;
constexpr int CHUNK = 32;
constexpr int ROW_TILE = 16;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A linear map with n outputs and k inputs, made by Python. `weight` is packed for `path` (gemm.h draws how).
//
//   bias     n_padded entries, or null; padding is zero
//   type     the type of the activations
//   bits     the bits of a number, for INTEGERS
//   scales   INTEGERS: one for each output and `group` of k, perhaps with `offsets` (gemm_int.cpp)
//            E4M3: see gemm_fma.cpp
//   order    k_padded entries, or null; number k of the weight is multiplied by x[order[k]] (INTEGERS only)
//   table    16 numbers of 8 bits, or null; the weight's numbers of 4 bits are its indices
struct Linear {
    const void* weight;
    const float* bias;
    const void* scales;
    const void* offsets;
    const int32_t* order;
    const uint8_t* table;
    int32_t n, k;
    int32_t n_padded, k_padded;
    int32_t path, type;
    int32_t numbers, bits, group;
    int32_t scale_type;
};
ABI_STRUCT(Linear, ABI_FIELD(weight), ABI_FIELD(bias), ABI_FIELD(scales), ABI_FIELD(offsets), ABI_FIELD(order),
           ABI_FIELD(table), ABI_FIELD(n), ABI_FIELD(k), ABI_FIELD(n_padded), ABI_FIELD(k_padded), ABI_FIELD(path),
           ABI_FIELD(type), ABI_FIELD(numbers), ABI_FIELD(bits), ABI_FIELD(group), ABI_FIELD(scale_type));

// Activations: rows of chunks of 32 numbers, each chunk contiguous.
//
//   plain    row after row                          AMX    tiles of 16 rows and 32 columns, 1 KB each
//            [row][chunk][32]                              [row / 16][chunk][row % 16][32]
//
// With AMX, a tile register is thus filled from 16 adjacent cache lines. Lines of 16 rows that are a power of
// two apart would all fall into the same few sets of the L1 cache.
struct Rows {
    char* base;
    size_t tile_stride;   // bytes between rows 0 and 16
    size_t row_stride;    // bytes between rows 0 and 1
    size_t chunk_stride;  // bytes between chunks of a row

    char* at(int row, int chunk) const {
        return base + size_t(row / ROW_TILE) * tile_stride + size_t(row % ROW_TILE) * row_stride +
               size_t(chunk) * chunk_stride;
    }
};

inline size_t size_of(int type) { return type == BF16 ? 2 : 4; }

inline Rows rows_for(void* base, int path, int type, int k_padded) {
    char* at = static_cast<char*>(base);
    size_t chunk = CHUNK * size_of(type);
    if (path == AMX && type == BF16) {
        return {at, size_t(k_padded / CHUNK) * ROW_TILE * chunk, chunk, ROW_TILE * chunk};
    }
    size_t row = size_t(k_padded) * size_of(type);
    return {at, ROW_TILE * row, row, chunk};
}

// Bytes of `rows_for`'s memory: whole row tiles.
inline size_t rows_bytes(int rows, int type, int k_padded) {
    return size_t(round_up(rows, ROW_TILE)) * size_t(k_padded) * size_of(type);
}

}  // namespace streamserve
