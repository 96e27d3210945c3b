// Queries, keys and values of a tile of keys, packed for instructions that multiply pairs of bf16 numbers: in
// squares of 16 × 16 pairs, a kilobyte each. Padding after the last dimension and the last key is zero.
//
//   queries       [16 queries][pair of dimensions]       not converted
//   key pairs     [pair of dimensions][16 keys]          transposed
//   value pairs   [pair of keys][16 dimensions]          the numbers of two keys' values alternate
#pragma once

#include "attention_engine.h"

#ifdef STREAMSERVE_AVX512
#include <immintrin.h>

namespace streamserve {

// Transpose a 16 × 16 matrix of 32-bit numbers: to[column][row] = from[row][column]. Strides are in bytes.
static inline void transpose16(const char* from, size_t stride, char* to, size_t to_stride) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(from + size_t(i) * stride);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        b[i] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0x88);
        b[i + 4] = _mm512_shuffle_i32x4(a[i], a[i + 4], 0xdd);
        b[i + 8] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0x88);
        b[i + 12] = _mm512_shuffle_i32x4(a[i + 8], a[i + 12], 0xdd);
    }
    for (int i = 0; i < 4; i++) {
        _mm512_storeu_si512(to + size_t(i) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0x88));
        _mm512_storeu_si512(to + size_t(i + 8) * to_stride, _mm512_shuffle_i32x4(b[i], b[i + 8], 0xdd));
        _mm512_storeu_si512(to + size_t(i + 4) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0x88));
        _mm512_storeu_si512(to + size_t(i + 12) * to_stride, _mm512_shuffle_i32x4(b[i + 4], b[i + 12], 0xdd));
    }
}

// The order 0, 0', 1, 1', … of the numbers of two vectors of 32. Indices from 32 on are in the second vector.
struct PairOrder {
    uint16_t order[64];
    constexpr PairOrder() : order() {
        for (uint16_t i = 0; i < 32; i++) order[2 * i] = i, order[2 * i + 1] = uint16_t(32 + i);
    }
};
constexpr PairOrder PAIRS;
inline const uint16_t* const PAIR_ORDER = PAIRS.order;

class PairTiles {
  public:
    static constexpr size_t SQUARE = 1024;

    static size_t bytes(int dim) { return (MAX_QUERIES + 3 * KEY_TILE) * size_t(padded(dim)) * 2; }

    PairTiles(char* memory, int dim) : dim_(dim), steps(padded(dim) / CHUNK), row(size_t(padded(dim)) * 2) {
        queries_ = memory;
        gathered_ = queries_ + MAX_QUERIES * row;
        key_pairs_ = gathered_ + KEY_TILE * row;
        value_pairs_ = key_pairs_ + KEY_TILE * row;
    }

    // Pack queries in tiles of 16, with `steps` squares each. Returns the number of tiles.
    int take_queries(const bf16* const* from, int count) {
        int tiles = ceil_div(count, QUERY_TILE);
        std::memset(queries_, 0, size_t(tiles) * QUERY_TILE * row);
        for (int i = 0; i < count; i++) {
            char* tile = queries_ + size_t(i / QUERY_TILE * QUERY_TILE) * row + size_t(i % QUERY_TILE) * 64;
            for (int step = 0; step < steps; step++) {
                int left = dim_ - step * CHUNK;
                std::memcpy(tile + size_t(step) * SQUARE, from[i] + step * CHUNK, left < CHUNK ? left * 2 : 64);
            }
        }
        return tiles;
    }

    // Pack a tile of keys and values. Without `turn`, no key pairs are made; without `pair`, no value pairs.
    void take(const KeyTile<bf16>& tile, bool turn, bool pair, Ahead& ahead) {
        count = tile.count;
        bool direct = tile.whole && dim_ % CHUNK == 0;
        for (int i = 0; i * 16 < count; i++) {
            keys[i] = direct ? reinterpret_cast<const char*>(tile.keys[i * 16]) : gather(tile, i);
        }
        for (int i = 0; turn && i * 16 < count; i++) {
            char* to = key_pairs_ + size_t(i * steps) * SQUARE;
            for (int step = 0; step < steps; step++) {
                ahead.fetch(pair ? 8 : 16);
                transpose16(keys[i] + step * 64, row, to + size_t(step) * SQUARE, 64);
            }
        }
        for (int i = 0; pair && i < round_up(count, 32) / 2; i++) {
            ahead.fetch(2 * steps);
            interleave(tile, i);
        }
    }

    // Return the squares of the query tile that begins at query `first`, or of the keys from 16 · i on.
    const char* queries(int first) const { return queries_ + size_t(first) * row; }
    const char* key_pairs(int i) const { return key_pairs_ + size_t(i * steps) * SQUARE; }

    // Return the squares of the dimensions from 16 · `column` on. The squares of the next 32 keys are
    // columns() squares further.
    const char* value_pairs(int column) const { return value_pairs_ + size_t(column) * SQUARE; }
    int columns() const { return steps * 2; }

  private:
    const char* gather(const KeyTile<bf16>& tile, int i) {
        char* to = gathered_ + size_t(i) * 16 * row;
        std::memset(to, 0, 16 * row);
        for (int key = i * 16; key < count && key < i * 16 + 16; key++) {
            std::memcpy(to + size_t(key % 16) * row, tile.keys[key], size_t(dim_) * 2);
        }
        return to;
    }

    // Pack the values of keys 2 · pair and 2 · pair + 1.
    void interleave(const KeyTile<bf16>& tile, int pair) {
        const bf16* first = 2 * pair < count ? tile.values[2 * pair] : nullptr;
        const bf16* second = 2 * pair + 1 < count ? tile.values[2 * pair + 1] : nullptr;
        char* to = value_pairs_ + size_t(pair / 16 * columns()) * SQUARE + size_t(pair % 16) * 64;
        if (first && second && dim_ % 32 == 0) {  // the usual case: two vectors of 32 shuffled into two
            const __m512i low = _mm512_loadu_si512(PAIR_ORDER), high = _mm512_loadu_si512(PAIR_ORDER + 32);
            for (int d = 0; d < dim_; d += 32, to += 2 * SQUARE) {
                __m512i one = _mm512_loadu_si512(first + d), other = _mm512_loadu_si512(second + d);
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(one, low, other));
                _mm512_storeu_si512(to + SQUARE, _mm512_permutex2var_epi16(one, high, other));
            }
            return;
        }
        for (int d = 0; d < padded(dim_); d += 16, to += SQUARE) {
            __mmask16 inside = d + 16 <= dim_ ? 0xffff : d >= dim_ ? 0 : (1 << (dim_ - d)) - 1;
            __m512i low = _mm512_setzero_si512(), high = low;
            if (first) low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, first + d));
            if (second) high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, second + d));
            _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }

    int dim_;
    char *queries_, *gathered_, *key_pairs_, *value_pairs_;

  public:
    const int steps;   // squares of a row, with 32 numbers each
    const size_t row;  // bytes of a query or key
    int count = 0;     // number of keys
    const char* keys[KEY_TILE / 16] = {};  // 16 keys each, rows of `row` bytes
};

}  // namespace streamserve
#endif
