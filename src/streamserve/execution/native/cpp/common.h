// Shared by all kernels: number types, instruction paths, and the layout of activations and weights.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>

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

// Round to nearest, ties to even; a NaN stays one.
inline bf16 round_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    if ((bits & 0x7fffffff) > 0x7f800000) return {uint16_t((bits >> 16) | 0x40)};
    return {uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16)};
}

// The instructions a kernel uses. Each path gives a row the same bits whatever other rows there are; two paths may differ.
enum Path : int32_t { PORTABLE = 0, AVX2 = 1, AVX512 = 2, AVX512_BF16 = 3, AMX = 4 };
enum Type : int32_t { F32 = 0, BF16 = 1 };

// Weights are made for columns in panels of 64, activations come in chunks of 32 numbers.
constexpr int PANEL = 64;
constexpr int CHUNK = 32;
constexpr int ROW_TILE = 16;

inline int ceil_div(int a, int b) { return (a + b - 1) / b; }
inline int round_up(int a, int b) { return ceil_div(a, b) * b; }

// A linear map as the kernels see it. Made by Python; `weight` is packed for `path` (gemm.h draws how).
// `bias` has n_padded entries or is null. Padding is zero. With `bits` the weight's numbers are integers of so
// many bits, with `scales` and perhaps `offsets` for each `group` of k (gemm_int.cpp); 0: they are of `type`,
// as activations are.
struct Linear {
    const void* weight;
    const float* bias;
    const float* scales;
    const float* offsets;
    int32_t n, k;
    int32_t n_padded, k_padded;
    int32_t path, type;
    int32_t bits, group;
};

// Activations: rows of chunks of 32 numbers, each chunk contiguous.
//
//   plain    row after row                          AMX    tiles of 16 rows and 32 columns, 1 KB each
//            [row][chunk][32]                              [row / 16][chunk][row % 16][32]
//
// so that a tile register is filled from 16 adjacent cache lines instead of 16 rows a power of two apart,
// which would all fall into the same few lines of the L1 cache.
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
