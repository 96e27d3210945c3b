// Packing of a weight's panels, which are shared among threads, and the order of the numbers in a panel.
#pragma once

#include <algorithm>
#include <atomic>

#include "common.h"
#include "pool.h"
#include "processor.h"

namespace streamserve {

constexpr int TILE = 64;  // of K; integers are packed in whole tiles

// Transpose words of 32 bits: to[word][column] = from[column][word]. Reads one cache line of each column at a time.
inline void turn_words(const char* from, size_t stride, int columns, int words, char* to) {
    constexpr int LINE = 16;
    for (int first = 0; first < words; first += LINE) {
        int last = std::min(first + LINE, words);
        for (int word = first; word < last; word++) {
            uint32_t* line = reinterpret_cast<uint32_t*>(to) + size_t(word) * size_t(columns);
            const char* at = from + size_t(word) * 4;
            for (int column = 0; column < columns; column++) std::memcpy(line + column, at + size_t(column) * stride, 4);
        }
    }
}

// Join a row's numbers of 4 bits, one in each byte, in the layout of a panel's column: byte i of a tile has
// number i of the tile's first half (low bits) and number i of its second half (high bits).
inline void join_halves(const Linear& linear, const uint8_t* numbers, uint8_t* to) {
    for (int k = 0; k < linear.k_padded; k += TILE, numbers += TILE, to += TILE / 2) {
        for (int i = 0; i < TILE / 2; i++) to[i] = uint8_t(numbers[i] | numbers[i + TILE / 2] << 4);
    }
}

inline size_t row_bytes(const Linear& linear) { return size_t(linear.k_padded) * size_t(linear.bits) / 8; }

// Bytes between the columns of a panel before they are placed. The padding avoids powers of two: columns
// would compete for the same lines of L1.
inline size_t column_stride(const Linear& linear) { return row_bytes(linear) + 64; }

inline void place_columns(const Linear& linear, int panel, const uint8_t* columns, void* to) {
    size_t row = row_bytes(linear);
    turn_words(reinterpret_cast<const char*>(columns), column_stride(linear), PANEL, int(row / 4),
               static_cast<char*>(to) + size_t(panel) * PANEL * row);
}

// Call f(thread, panel) for all panels. Return whether all calls returned true.
template <class F>
bool for_panels(Pool& pool, const Linear& linear, F&& f) {
    std::atomic<bool> all{true};
    pool.run([&](int thread) {
        FlushTiny exact(false);
        for (int panel; (panel = pool.claim()) < linear.n_padded / PANEL;) {
            if (!f(thread, panel)) all = false;
        }
    });
    return all;
}

}  // namespace streamserve
