// Products with AMX of up to 32 rows. Their speed is bound by reading the weights from memory.
//
//   registers    rows × columns of tiles
//   C C C C      1 × 4   up to 16 rows
//   C C / C C    2 × 2   up to 32 rows (more rows: gemm_blocks.cpp)
//
// While a panel is multiplied by 32 rows, the thread's next panel is prefetched to L2: memory and multiplier
// work at the same time.
#include "gemm.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__)
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#define STREAMSERVE_AMX
#endif

namespace streamserve {

#ifdef STREAMSERVE_AMX
namespace {

constexpr size_t TILE = 1024;

struct alignas(64) TileConfig {
    uint8_t palette = 1, start_row = 0, reserved[14] = {};
    uint16_t bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
    uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

// Return whether AMX can be used. Linux grants the tile registers only to processes that request them.
bool request_amx() {
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return processor_has(HAS_AMX_BF16) && processor_has(HAS_AMX_TILE) &&
           syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

// Tile registers are named by constants: 0 to 3 are sums, 4 and 5 rows of x, 6 and 7 weights.

// Prefetch the tiles of one step of K to L2.
inline void fetch(const Prefetch& prefetch, int k) {
    const char* tile = prefetch.tiles + size_t(k) * TILE;
    for (int i = 0; i < prefetch.count; i++, tile += prefetch.stride) {
        for (size_t line = 0; line < TILE; line += 64) _mm_prefetch(tile + line, _MM_HINT_T1);
    }
}

// Sums of 16 rows × 1 to 4 column tiles.
template <int COLUMNS>
void one_by(const char* a, const char* b, size_t b_stride, int depth, const Prefetch& prefetch, float* sums) {
    _tile_zero(0);
    if constexpr (COLUMNS > 1) _tile_zero(1);
    if constexpr (COLUMNS > 2) _tile_zero(2);
    if constexpr (COLUMNS > 3) _tile_zero(3);
    for (int k = 0; k < depth; k++, a += TILE, b += TILE) {
        fetch(prefetch, k);
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        if constexpr (COLUMNS > 1) {
            _tile_loadd(7, b + b_stride, 64);
            _tile_dpbf16ps(1, 4, 7);
        }
        if constexpr (COLUMNS > 2) {
            _tile_loadd(6, b + 2 * b_stride, 64);
            _tile_dpbf16ps(2, 4, 6);
        }
        if constexpr (COLUMNS > 3) {
            _tile_loadd(7, b + 3 * b_stride, 64);
            _tile_dpbf16ps(3, 4, 7);
        }
    }
    _tile_stored(0, sums, PANEL * 4);
    if constexpr (COLUMNS > 1) _tile_stored(1, sums + 16, PANEL * 4);
    if constexpr (COLUMNS > 2) _tile_stored(2, sums + 32, PANEL * 4);
    if constexpr (COLUMNS > 3) _tile_stored(3, sums + 48, PANEL * 4);
}

// Sums of 32 rows × 2 column tiles.
void two_by_two(const char* a, size_t a_stride, const char* b, size_t b_stride, int depth,
                const Prefetch& prefetch, float* sums) {
    float* below = sums + 16 * PANEL;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int k = 0; k < depth; k++, a += TILE, b += TILE) {
        fetch(prefetch, k);
        _tile_loadd(4, a, 64);
        _tile_loadd(6, b, 64);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + b_stride, 64);
        _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + a_stride, 64);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, sums, PANEL * 4);
    _tile_stored(1, sums + 16, PANEL * 4);
    _tile_stored(2, below, PANEL * 4);
    _tile_stored(3, below + 16, PANEL * 4);
}

}  // namespace

bool amx_supported() {
    static const bool works = request_amx();
    return works;
}

void amx_begin() {
    static const TileConfig config;
    if (amx_supported()) _tile_loadconfig(&config);
}

void amx_end() {
    if (amx_supported()) _tile_release();
}

void sums_amx(const Linear& w, const Rows& x, int row, int rows, int tile, int tiles, const Prefetch& prefetch,
              float* sums) {
    int depth = w.k_padded / CHUNK;
    size_t b_stride = size_t(depth) * TILE, a_stride = x.tile_stride;
    const char* a = x.at(row, 0);
    const char* b = static_cast<const char*>(w.weight) + size_t(tile) * b_stride;
    if (tiles == 1) {
        one_by<1>(a, b, b_stride, depth, prefetch, sums);
        if (rows > ROW_TILE) one_by<1>(a + a_stride, b, b_stride, depth, {}, sums + 16 * PANEL);
    } else if (rows <= ROW_TILE) {
        one_by<4>(a, b, b_stride, depth, prefetch, sums);
    } else {
        auto [first, second] = prefetch.halves();
        two_by_two(a, a_stride, b, b_stride, depth, first, sums);
        two_by_two(a, a_stride, b + 2 * b_stride, b_stride, depth, second, sums + 32);
    }
}

#else

bool amx_supported() { return false; }
void amx_begin() {}
void amx_end() {}
void sums_amx(const Linear&, const Rows&, int, int, int, int, const Prefetch&, float*) {}

#endif

}  // namespace streamserve
