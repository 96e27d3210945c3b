// The AMX engine. The same products in the same order whichever of two ways scores are made:
//
//   few queries    Sᵀ = K Qᵀ     keys as they lie in the cache, 16 × 32 numbers a tile register; the small
//                                result is turned. Nothing is done to the keys: decoding reads memory
//   many           S  = Q Kᵀ     keys turned into pairs once for all query tiles of the item
//
//   always         O  = P V      values interleaved in pairs of keys, weights rounded to bf16
#pragma once

#include "attention_engine.h"

#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
#include <immintrin.h>

namespace streamserve {

// A 16 × 16 matrix of 32-bit numbers turned: to[column][row] = from[row][column], rows `stride` bytes apart.
inline void transpose16(const char* from, size_t stride, char* to, size_t to_stride) {
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

// Numbers 0, 0', 1, 1', … of two vectors of 32 (those of the second are 32 and up).
struct PairOrder {
    uint16_t order[64];
    constexpr PairOrder() : order() {
        for (uint16_t i = 0; i < 32; i++) order[2 * i] = i, order[2 * i + 1] = uint16_t(32 + i);
    }
};
constexpr PairOrder PAIRS;
inline const uint16_t* const PAIR_ORDER = PAIRS.order;

class AmxEngine {
  public:
    using Weight = bf16;
    static constexpr size_t TILE = 1024;

    static size_t bytes(int dim) {
        size_t row = size_t(padded(dim)) * 2;
        return (2 * MAX_QUERIES + 3 * KEY_TILE) * row + 4 * TILE;
    }

    AmxEngine(char* memory, int dim) : dim_(dim), steps_(padded(dim) / CHUNK), row_(size_t(padded(dim)) * 2) {
        query_rows_ = memory;
        query_pairs_ = query_rows_ + MAX_QUERIES * row_;
        gathered_ = query_pairs_ + MAX_QUERIES * row_;
        key_pairs_ = gathered_ + KEY_TILE * row_;
        value_pairs_ = key_pairs_ + KEY_TILE * row_;
        result_ = reinterpret_cast<float*>(value_pairs_ + KEY_TILE * row_);
    }

    // Query tiles of 16: tiles of 32 numbers each, zero where there is none.
    void queries(const bf16* const* from, int count) {
        int tiles = ceil_div(count, QUERY_TILE);
        std::memset(query_rows_, 0, size_t(tiles) * QUERY_TILE * row_);
        for (int i = 0; i < count; i++) {
            size_t first = size_t(i / QUERY_TILE) * QUERY_TILE;
            char* tile = query_rows_ + first * row_ + size_t(i % QUERY_TILE) * 64;
            for (int step = 0; step < steps_; step++) {
                int left = dim_ - step * CHUNK;
                std::memcpy(tile + size_t(step) * TILE, from[i] + step * CHUNK, left < CHUNK ? left * 2 : 64);
            }
        }
        for (int tile = 0; tile < tiles * steps_; tile++) {
            transpose16(query_rows_ + size_t(tile) * TILE, 64, query_pairs_ + size_t(tile) * TILE, 64);
        }
    }

    // `prefetch` is fetched into L2 meanwhile: blocks are too short for the hardware prefetcher.
    void tile(const KeyTile<bf16>& tile, int query_tiles, const KeyTile<bf16>& prefetch) {
        count_ = tile.count;
        bool direct = tile.whole && dim_ % CHUNK == 0;
        for (int i = 0; i * 16 < count_; i++) {
            keys_[i] = direct ? reinterpret_cast<const char*>(tile.keys[i * 16]) : gather(tile, i);
        }
        turned_ = query_tiles > 2;
        for (int i = 0; turned_ && i * 16 < count_; i++) {
            for (int step = 0; step < steps_; step++) {
                transpose16(keys_[i] + step * 64, row_, key_pairs_ + size_t(i * steps_ + step) * TILE, 64);
            }
        }
        for (int pair = 0; pair < round_up(count_, 32) / 2; pair++) {
            fetch(prefetch, 2 * pair);
            interleave(tile, pair);
        }
        for (int key = round_up(count_, 32); key < prefetch.count; key += 2) fetch(prefetch, key);
    }

    // Four tiles of scores at a time, so that the multiplier need not wait for its own results.
    void scores(int first, int, int, int, float* to) {
        const char* rows = query_rows_ + size_t(first) * row_;
        const char* pairs = query_pairs_ + size_t(first) * row_;
        int tiles = ceil_div(count_, 16);
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

    // to[i][d] for 16 queries, rows padded(dim) apart.
    void values(const Weight* weights, int, int, int, float* to) {
        size_t columns = size_t(padded(dim_) / 16);
        for (size_t column = 0; column < columns; column += 4) {
            if (columns - column >= 4) {
                columns_of_values<4>(weights, column, to);
            } else {
                columns_of_values<2>(weights, column, to);
            }
        }
    }

  private:
    void four_turned(const char* rows, int i) const {
        const char* keys = key_pairs_ + size_t(i * steps_) * TILE;
        size_t next = size_t(steps_) * TILE;
        for (int step = 0; step < steps_; step++, rows += TILE, keys += TILE) {
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

    // Key tiles after the `last` are the last again; their scores are not read.
    void four_direct(const char* pairs, int i, int last) const {
        const char* keys[4];
        for (int part = 0; part < 4; part++) keys[part] = keys_[i + part < last ? i + part : last];
        for (int step = 0; step < steps_; step++, pairs += TILE) {
            _tile_loadd(6, pairs, 64);
            _tile_loadd(4, keys[0] + step * 64, row_);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(5, keys[1] + step * 64, row_);
            _tile_dpbf16ps(1, 5, 6);
            _tile_loadd(4, keys[2] + step * 64, row_);
            _tile_dpbf16ps(2, 4, 6);
            _tile_loadd(5, keys[3] + step * 64, row_);
            _tile_dpbf16ps(3, 5, 6);
        }
    }

    template <int COUNT>
    void columns_of_values(const Weight* weights, size_t column, float* to) const {
        int steps = ceil_div(count_, 32);
        size_t columns = size_t(padded(dim_) / 16), stride = size_t(padded(dim_)) * 4;
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int step = 0; step < steps; step++) {
            const char* pairs = value_pairs_ + (size_t(step) * columns + column) * TILE;
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

    const char* gather(const KeyTile<bf16>& tile, int i) {
        char* to = gathered_ + size_t(i) * 16 * row_;
        std::memset(to, 0, 16 * row_);
        for (int key = i * 16; key < count_ && key < i * 16 + 16; key++) {
            std::memcpy(to + size_t(key % 16) * row_, tile.keys[key], size_t(dim_) * 2);
        }
        return to;
    }

    // Two keys and their values.
    void fetch(const KeyTile<bf16>& prefetch, int key) const {
        for (int i = key; i < key + 2 && i < prefetch.count; i++) {
            const char *k = reinterpret_cast<const char*>(prefetch.keys[i]);
            const char *v = reinterpret_cast<const char*>(prefetch.values[i]);
            for (int byte = 0; byte < prefetch.bytes; byte += 64) {
                _mm_prefetch(k + byte, _MM_HINT_T1);
                _mm_prefetch(v + byte, _MM_HINT_T1);
            }
        }
    }

    // Values of keys 2 · pair and 2 · pair + 1, number by number; zero after the last key and dimension.
    void interleave(const KeyTile<bf16>& tile, int pair) {
        const bf16* first = 2 * pair < count_ ? tile.values[2 * pair] : nullptr;
        const bf16* second = 2 * pair + 1 < count_ ? tile.values[2 * pair + 1] : nullptr;
        size_t columns = size_t(padded(dim_) / 16);
        char* to = value_pairs_ + size_t(pair / 16) * columns * TILE + size_t(pair % 16) * 64;
        if (first && second && dim_ % 32 == 0) {  // the usual case: two vectors of 32 shuffled into two
            const __m512i low = _mm512_loadu_si512(PAIR_ORDER), high = _mm512_loadu_si512(PAIR_ORDER + 32);
            for (int d = 0; d < dim_; d += 32, to += 2 * TILE) {
                __m512i one = _mm512_loadu_si512(first + d), other = _mm512_loadu_si512(second + d);
                _mm512_storeu_si512(to, _mm512_permutex2var_epi16(one, low, other));
                _mm512_storeu_si512(to + TILE, _mm512_permutex2var_epi16(one, high, other));
            }
            return;
        }
        for (int d = 0; d < padded(dim_); d += 16, to += TILE) {
            __mmask16 inside = d + 16 <= dim_ ? 0xffff : d >= dim_ ? 0 : (1 << (dim_ - d)) - 1;
            __m512i low = _mm512_setzero_si512(), high = low;
            if (first) low = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, first + d));
            if (second) high = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(inside, second + d));
            _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
        }
    }

    int dim_, steps_, count_ = 0;
    size_t row_;
    bool turned_ = false;
    char *query_rows_, *query_pairs_, *gathered_, *key_pairs_, *value_pairs_;
    float* result_;
    const char* keys_[KEY_TILE / 16] = {};
};

}  // namespace streamserve
#endif
