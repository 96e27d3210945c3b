// Integer sums with AMX: 16 rows × 64 columns over a group of K at once. They are exact, as those of the other
// paths, so all give the same bits.
#pragma once

#include "gemm.h"
#include "vec.h"

#if defined(__AMX_INT8__) && defined(STREAMSERVE_AVX512)
#include <immintrin.h>

namespace streamserve {

// A strip's weights of 64 k are a tile register: [k/4][16 columns][4].
struct IntegerTiles {
    static constexpr int K = 64, ROWS = 16, STRIPS = PANEL / 16;
    static constexpr size_t BYTES = 1024;

    // Whether groups of so many k are whole tiles.
    static bool fit(int group) { return group % K == 0; }

    // 4-bit weights, `tiles` of each strip, as those of 8 bits: to[strip][tile][1024]. `apart`: bytes between
    // strips, whose tiles have half the bytes: in the low halves of them are the first eight lines.
    static void unpack(const uint8_t* weight, size_t apart, int tiles, uint8_t* to) {
        const __m512i low = _mm512_set1_epi8(15);
        for (int strip = 0; strip < STRIPS; strip++, weight += apart) {
            for (int line = 0; line < tiles * 8; line++) {
                __m512i both = _mm512_loadu_si512(weight + line * 64);
                uint8_t* tile = to + size_t(strip * tiles + line / 8) * BYTES + line % 8 * 64;
                _mm512_storeu_si512(tile, _mm512_and_si512(both, low));
                _mm512_storeu_si512(tile + BYTES / 2, _mm512_and_si512(_mm512_srli_epi16(both, 4), low));
            }
        }
    }

    // sums[16][64] of 16 rows of x, `stride` bytes apart, with weights of 8 bits, strips `apart` bytes.
    static void sums(const int8_t* x, size_t stride, const uint8_t* weight, size_t apart, int tiles,
                     int32_t* sums) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
        for (int tile = 0; tile < tiles; tile++, x += K, weight += BYTES) {
            _tile_loadd(4, x, stride);
            _tile_loadd(6, weight, 64);
            _tile_dpbsud(0, 4, 6);
            _tile_loadd(7, weight + apart, 64);
            _tile_dpbsud(1, 4, 7);
            _tile_loadd(6, weight + 2 * apart, 64);
            _tile_dpbsud(2, 4, 6);
            _tile_loadd(7, weight + 3 * apart, 64);
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
