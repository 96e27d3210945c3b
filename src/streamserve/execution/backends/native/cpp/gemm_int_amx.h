// Integer sums with AMX, of 16 rows × 64 columns over a group of K. Integer sums are exact, so they equal the
// sums of all other paths.
#pragma once

#include "gemm.h"
#include "vec.h"

#if defined(__AMX_INT8__) && defined(STREAMSERVE_AVX512)
#include <immintrin.h>

namespace streamserve {

// A tile register has the weights of 16 columns and 64 k: [k/4][16 columns][4]. In memory, the same lines of
// four tiles are adjacent.
struct IntegerTiles {
    static constexpr int K = 64, ROWS = 16;
    static constexpr size_t LINE = 4 * PANEL, BYTES = LINE * K / 4;  // bytes of a panel for four k and for 64 k

    // Return whether groups of `group` k are whole tiles.
    static bool fit(int group) { return group % K == 0; }

    // Write to `sums` [16][64] the products of 16 rows of x, `stride` bytes apart, with weights of 8 bits,
    // over `tiles` tiles of K.
    static void sums(const int8_t* x, size_t stride, const uint8_t* weight, int tiles, int32_t* sums) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int tile = 0; tile < tiles; tile++, x += K, weight += BYTES) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, weight, LINE);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, weight + 64, LINE);
            _tile_dpbsud(1, 4, 7);
            _tile_loadd(6, weight + 128, LINE);
            _tile_dpbsud(2, 4, 6);
            _tile_loadd(7, weight + 192, LINE);
            _tile_dpbsud(3, 4, 7);
        }
        _tile_stored(0, sums, PANEL * 4);
        _tile_stored(1, sums + 16, PANEL * 4);
        _tile_stored(2, sums + 32, PANEL * 4);
        _tile_stored(3, sums + 48, PANEL * 4);
    }
};

}  // namespace streamserve
#endif
