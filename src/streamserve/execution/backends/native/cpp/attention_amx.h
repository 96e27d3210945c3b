// The AMX engine. Scores are computed in one of two ways, with the same products in the same order:
//
//   few queries    Sᵀ = K Qᵀ     keys in the layout of the cache, 16 × 32 numbers for a tile register; the small
//                                result is transposed. Keys need no conversion: decoding is bound by memory
//   many queries   S  = Q Kᵀ     keys transposed into pairs once for all query tiles of the item
//
//   always         O  = P V      values interleaved in pairs of keys, weights rounded to bf16
#pragma once

#include "attention_pairs.h"

#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)

namespace streamserve {

class AmxEngine {
  public:
    using Weight = bf16;
    static constexpr size_t TILE = PairTiles::SQUARE;

    static size_t bytes(int dim) {
        return PairTiles::bytes(dim) + MAX_QUERIES * size_t(padded(dim)) * 2 + 4 * TILE;
    }

    AmxEngine(char* memory, int dim) : tiles_(memory, dim), dim_(dim) {
        query_pairs_ = memory + PairTiles::bytes(dim);
        result_ = reinterpret_cast<float*>(query_pairs_ + MAX_QUERIES * tiles_.row);
    }

    void queries(const bf16* const* from, int count) {
        int squares = tiles_.take_queries(from, count) * tiles_.steps;
        for (int i = 0; i < squares; i++) {
            transpose16(tiles_.queries(0) + size_t(i) * TILE, 64, query_pairs_ + size_t(i) * TILE, 64);
        }
    }

    void tile(const KeyTile<bf16>& tile, int query_tiles, Ahead& ahead) {
        turned_ = query_tiles > 2;
        tiles_.take(tile, turned_, true, ahead);
    }

    // Compute four tiles of scores at a time, so that the multiplier does not wait for its own results.
    void scores(int first, int, int, int, float* to) {
        const char* rows = tiles_.queries(first);
        const char* pairs = query_pairs_ + size_t(first) * tiles_.row;
        int tiles = ceil_div(tiles_.count, 16);
        for (int i = 0; i < tiles; i += 4) {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
            if (turned_) {
                four_turned(rows, i);
                _tile_stored(0, to + i * 16, KEY_TILE * 4);
                _tile_stored(1, to + i * 16 + 16, KEY_TILE * 4);
                _tile_stored(2, to + i * 16 + 32, KEY_TILE * 4);
                _tile_stored(3, to + i * 16 + 48, KEY_TILE * 4);
                continue;
            }
            four_direct(pairs, i, tiles - 1);
            char* small = reinterpret_cast<char*>(result_);
            _tile_stored(0, small, 64);
            _tile_stored(1, small + TILE, 64);
            _tile_stored(2, small + 2 * TILE, 64);
            _tile_stored(3, small + 3 * TILE, 64);
            for (int part = 0; part < 4 && i + part < tiles; part++) {
                char* out = reinterpret_cast<char*>(to + (i + part) * 16);
                transpose16(small + size_t(part) * TILE, 64, out, KEY_TILE * 4);
            }
        }
    }

    // Write the weighted sums to[query][d] of 16 queries. Rows are padded(dim) numbers apart.
    void values(const Weight* weights, int, int, int, float* to) {
        int columns = tiles_.columns();
        for (int column = 0; column < columns; column += 4) {
            if (columns - column >= 4) {
                columns_of_values<4>(weights, column, to);
            } else {
                columns_of_values<2>(weights, column, to);
            }
        }
    }

  private:
    void four_turned(const char* rows, int i) const {
        const char* keys = tiles_.key_pairs(i);
        size_t next = size_t(tiles_.steps) * TILE;
        for (int step = 0; step < tiles_.steps; step++, rows += TILE, keys += TILE) {
            _tile_loadd(6, rows, 64);
            _tile_loadd(4, keys, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(5, keys + next, 64);
            _tile_dpbf16ps(1, 6, 5);
            _tile_loadd(4, keys + 2 * next, 64);
            _tile_dpbf16ps(2, 6, 4);
            _tile_loadd(5, keys + 3 * next, 64);
            _tile_dpbf16ps(3, 6, 5);
        }
    }

    // Key tiles after `last` are replaced by the last one; their scores are not read.
    void four_direct(const char* pairs, int i, int last) const {
        const char* keys[4];
        for (int part = 0; part < 4; part++) keys[part] = tiles_.keys[i + part < last ? i + part : last];
        for (int step = 0; step < tiles_.steps; step++, pairs += TILE) {
            _tile_loadd(6, pairs, 64);
            _tile_loadd(4, keys[0] + step * 64, tiles_.row);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, keys[1] + step * 64, tiles_.row);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, keys[2] + step * 64, tiles_.row);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3] + step * 64, tiles_.row);
            _tile_dpbf16ps(3, 5, 6);
        }
    }

    template <int COUNT>
    void columns_of_values(const Weight* weights, int column, float* to) const {
        int steps = ceil_div(tiles_.count, 32);
        size_t stride = size_t(padded(dim_)) * 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; step++) {
            const char* pairs = tiles_.value_pairs(step * tiles_.columns() + column);
            _tile_loadd(6, weights + step * 32, KEY_TILE * 2);
            _tile_loadd(4, pairs, 64);
            _tile_dpbf16ps(0, 6, 4);
            _tile_loadd(5, pairs + TILE, 64);
            _tile_dpbf16ps(1, 6, 5);
            if constexpr (COUNT > 2) {
                _tile_loadd(4, pairs + 2 * TILE, 64);
                _tile_dpbf16ps(2, 6, 4);
                _tile_loadd(5, pairs + 3 * TILE, 64);
                _tile_dpbf16ps(3, 6, 5);
            }
        }
        to += column * 16;
        _tile_stored(0, to, stride);
        _tile_stored(1, to + 16, stride);
        if constexpr (COUNT > 2) {
            _tile_stored(2, to + 32, stride);
            _tile_stored(3, to + 48, stride);
        }
    }

    PairTiles tiles_;
    int dim_;
    bool turned_ = false;
    char* query_pairs_;
    float* result_;
};

}  // namespace streamserve
#endif
