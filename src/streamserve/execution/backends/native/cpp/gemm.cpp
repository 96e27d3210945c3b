#include "gemm.h"

#include "elementwise.h"

namespace streamserve {

namespace {

constexpr size_t ROW_BLOCK_BYTES = 1 << 20;  // of x that stay in a core's L2 cache with the weights
constexpr int STRIP = 32;                    // rows at a time
constexpr int DEEP = 4096;                   // K from which two panels do not fit in L2

int rows_at_once(const Linear& linear, int rows) {
    size_t row = size_t(linear.k_padded) * size_of(linear.type);
    int fit = int(ROW_BLOCK_BYTES / row) / 32 * 32;
    fit = fit < 64 ? 64 : fit;
    // Blocks of about equal size: 510 rows are two blocks of up to 256 rows, not a block of 480 and one of 30.
    int blocks = ceil_div(rows, fit);
    return blocks == 1 ? rows : round_up(ceil_div(rows, blocks), 32);
}

void sums_of(const Linear& w, const Rows& x, int row, int rows, int tile, int tiles, const Prefetch& prefetch,
             Lines& lines, float* sums) {
    if (w.path != AMX) return sums_avx512_bf16(w, x, row, rows, tile, lines, sums);
    lines.fetch_rest();
    sums_amx(w, x, row, rows, tile, tiles, prefetch, sums);
}

}  // namespace

namespace {

// Return the prefetch of a unit's `tiles` column tiles from `tile` on.
Prefetch prefetch_of(const Linear& w, int tile, int tiles) {
    size_t stride = size_t(w.k_padded / CHUNK) * 1024;
    return {static_cast<const char*>(w.weight) + size_t(tile) * stride, stride, tiles};
}

// Multiply blocks of rows, whose x stays in L2, by panels, whose weights stay there for all strips of 32 rows. With
// AMX there is only one strip, and the last panels are divided into column tiles, so that threads end together.
void multiply_panels(Pool& pool, const Linear& linear, const Rows& x, int rows, const Finish& finish) {
    alignas(64) float sums[STRIP * PANEL];
    Lines lines;
    int panels = linear.n_padded / PANEL;
    int at_once = rows_at_once(linear, rows), blocks = ceil_div(rows, at_once);
    bool by_tiles = linear.path == AMX && finish.kind != Finish::GATE_MUL;
    int whole = panels * blocks;
    if (by_tiles) whole = panels > pool.threads() ? panels - pool.threads() : 0;
    int units = by_tiles ? whole + (panels - whole) * 4 : whole;
    // With a single row tile, the multiplier waits for memory anyway: prefetching would gain nothing.
    bool fetching = linear.path == AMX && rows > ROW_TILE && linear.k_padded <= DEEP;
    auto tile_of = [&](int unit) { return unit < whole ? unit % panels * 4 : whole * 4 + unit - whole; };
    for (int unit = pool.claim(), next; unit < units; unit = next) {
        next = pool.claim();
        int tile = tile_of(unit), tiles = unit < whole ? 4 : 1;
        int first = unit < whole ? unit / panels * at_once : 0;
        int last = rows < first + at_once ? rows : first + at_once;
        Prefetch prefetch;
        finish.lora.ahead(tile * 16, tiles * 16, linear.n_padded, lines);
        if (fetching && next < units) prefetch = prefetch_of(linear, tile_of(next), next < whole ? 4 : 1);
        for (int row = first; row < last; row += STRIP) {
            int count = last - row < STRIP ? last - row : STRIP;
            sums_of(linear, x, row, count, tile, tiles, prefetch, lines, sums);
            end(linear, finish, row, count, tile * 16, tiles * 16, sums);
        }
    }
}

}  // namespace

void multiply(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows, const Finish& finish) {
    if (linear.numbers == INTEGERS) {
        multiply_integers(pool, thread, linear, x, rows, finish);
    } else if (linear.numbers == E4M3) {
        multiply_float32(pool, thread, linear, x, rows, finish);
    } else if (linear.path == AMX && rows > STRIP) {
        multiply_blocks(pool, thread, linear, x, rows, finish);
    } else if (linear.path < AVX512_BF16) {
        multiply_float32(pool, thread, linear, x, rows, finish);
    } else {
        multiply_panels(pool, linear, x, rows, finish);
    }
}

bool light(int path, int rows, size_t weights) {
    constexpr size_t MAX_WEIGHTS = 1 << 20, MAX_PRODUCTS = 1 << 22;
    return weights <= MAX_WEIGHTS && weights * size_t(rows) <= (path == AMX ? 8 : 1) * MAX_PRODUCTS;
}

bool path_supported(int path, int type) {
    switch (path) {
        case PORTABLE: return true;
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return processor_has(HAS_AVX2) && processor_has(HAS_FMA);
#endif
#ifdef STREAMSERVE_AVX512
        case AVX512: return processor_has(HAS_AVX512BW) && processor_has(HAS_AVX512DQ);
#endif
#if defined(STREAMSERVE_AVX512) && defined(__AVX512BF16__)
        case AVX512_BF16: return type == BF16 && processor_has(HAS_AVX512_BF16);
#endif
#ifdef STREAMSERVE_AVX512
        case AMX: return type == BF16 && amx_supported();
#endif
        default: return false;
    }
}

}  // namespace streamserve
