#include "gemm.h"

#include "elementwise.h"

namespace streamserve {

namespace {

constexpr size_t ROW_BLOCK_BYTES = 1 << 20;  // of x: what stays in a core's L2 cache beside the weights
constexpr int FEW = 64;                      // rows that one pass over the weights serves
constexpr int STRIP = 32;                    // rows at a time where there are more
constexpr int DEEP = 4096;                   // K from which fewer than 128 rows would fit

// Columns that lie together in a packed weight, and k that do.
struct Packing {
    int columns, group;
};

Packing packing(int path) {
    switch (path) {
        case AMX: return {16, 2};
        case AVX512_BF16: return {64, 2};
        case AVX512: return {64, 1};
        default: return {16, 1};
    }
}

template <class T>
void pack_panel(const Linear& linear, const void* from, const int32_t* source_rows, int panel, void* to) {
    auto [columns, group] = packing(linear.path);
    for (int i = 0; i < PANEL; i++) {
        int output = panel * PANEL + i;
        int source = source_rows[output];
        const T* row = static_cast<const T*>(from) + size_t(source < 0 ? 0 : source) * linear.k;
        T* stream = static_cast<T*>(to) + size_t(output / columns) * columns * linear.k_padded;
        int column = output % columns;
        for (int k = 0; k < linear.k_padded; k++) {
            T value{};
            if (source >= 0 && k < linear.k) value = row[k];
            stream[(size_t(k / group) * columns + column) * group + k % group] = value;
        }
    }
}

int rows_at_once(const Linear& linear, int rows) {
    size_t row = size_t(linear.k_padded) * size_of(linear.type);
    int fit = int(ROW_BLOCK_BYTES / row) / 32 * 32;
    fit = fit < 64 ? 64 : fit;
    // Blocks of equal size: 510 rows are two of 256, not one of 480 and one of 30.
    int blocks = ceil_div(rows, fit);
    return blocks == 1 ? rows : round_up(ceil_div(rows, blocks), 32);
}

void sums_of(const Linear& w, const Rows& x, int row, int rows, int tile, int tiles, int from, int until,
             const Ahead& ahead, float* sums) {
    switch (w.path) {
        case AMX: return sums_amx(w, x, row, rows, tile, tiles, from, until, ahead, sums);
        case AVX512_BF16: return sums_avx512_bf16(w, x, row, rows, tile, sums);
        case AVX512: return sums_avx512(w, x, row, rows, tile, sums);
        case AVX2: return sums_avx2(w, x, row, rows, tile, sums);
        default: return sums_portable(w, x, row, rows, tile, sums);
    }
}

}  // namespace

void pack(Pool& pool, const Linear& linear, const void* from, const int32_t* source_rows, void* to) {
    pool.run([&](int) {
        for (int panel; (panel = pool.claim()) < linear.n_padded / PANEL;) {
            if (linear.type == BF16) {
                pack_panel<bf16>(linear, from, source_rows, panel, to);
            } else {
                pack_panel<float>(linear, from, source_rows, panel, to);
            }
        }
    });
}

namespace {

// What strip number `strip` of `strips` fetches of the tiles that come next; all of it is fetched once.
Ahead share(const Linear& w, int tile, int tiles, int from, int strip, int strips) {
    if (w.path != AMX) return {};
    int begin = strips >= tiles ? (strip < tiles ? strip : tiles) : tiles * strip / strips;
    int end = strips >= tiles ? (strip < tiles ? strip + 1 : tiles) : tiles * (strip + 1) / strips;
    size_t stride = size_t(w.k_padded / CHUNK) * 1024;
    const char* first = static_cast<const char*>(w.weight) + size_t(from) * 1024;
    return {first + size_t(tile + begin) * stride, stride, end - begin};
}

// Rows in blocks whose x stays in L2, times a panel; strips of 32 rows find its weights there. Up to 64 rows
// are one pass over the weights: then, with AMX, the last panels go by tiles, so that threads end together.
void multiply_wide(Pool& pool, const Linear& linear, const Rows& x, int rows, const Finish& finish) {
    alignas(64) float sums[STRIP * PANEL];
    int panels = linear.n_padded / PANEL, chunks = linear.k_padded / CHUNK;
    int at_once = rows_at_once(linear, rows), blocks = ceil_div(rows, at_once);
    bool by_tiles = linear.path == AMX && finish.kind != Finish::SILU_MUL && rows <= FEW;
    int whole = panels * blocks;
    if (by_tiles) whole = panels > pool.threads() ? panels - pool.threads() : 0;
    int units = by_tiles ? whole + (panels - whole) * 4 : whole;
    // One row tile leaves the multiplier idle anyway, and two of the largest panels do not fit in L2.
    bool fetching = rows > ROW_TILE && linear.k_padded <= DEEP;
    auto tile_of = [&](int unit) { return unit < whole ? unit % panels * 4 : whole * 4 + unit - whole; };
    for (int unit = pool.claim(), next; unit < units; unit = next) {
        next = pool.claim();
        int tile = tile_of(unit), tiles = unit < whole ? 4 : 1;
        int first = unit < whole ? unit / panels * at_once : 0;
        int last = rows < first + at_once ? rows : first + at_once;
        int strips = ceil_div(last - first, STRIP);
        for (int row = first, strip = 0; row < last; row += STRIP, strip++) {
            int count = last - row < STRIP ? last - row : STRIP;
            Ahead ahead;
            if (fetching && next < units) {
                ahead = share(linear, tile_of(next), next < whole ? 4 : 1, 0, strip, strips);
            }
            sums_of(linear, x, row, count, tile, tiles, 0, chunks, ahead, sums);
            end(linear, finish, row, count, tile * 16, tiles * 16, sums);
        }
    }
}

// So large a K that few rows of x fit in L2: blocks of rows × 8 panels, a part of K after another, the sums
// put down and taken up again between two parts. So weights are fetched once for 256 rows, not for 64.
//
//           part 0      part 1   …            x part       256 rows × 1024 × 2 bytes    in L2 for 8 panels
//   rows  [ x x x x ] [ x x x x ]             sums         256 rows × 512 × 4 bytes     in L2 for all parts
void multiply_deep(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                   const Finish& finish) {
    constexpr int PART = 32, PANELS = 8, ROWS = 256;
    size_t bytes = size_t(PANELS) * ROWS * PANEL * sizeof(float);
    float* sums = reinterpret_cast<float*>(pool.scratch(thread, bytes));
    int panels = linear.n_padded / PANEL, groups = ceil_div(panels, PANELS), chunks = linear.k_padded / CHUNK;
    int at_once = round_up(ceil_div(rows, ceil_div(rows, ROWS)), STRIP);
    int units = groups * ceil_div(rows, at_once);
    for (int unit; (unit = pool.claim()) < units;) {
        int first = unit / groups * at_once, last = rows < first + at_once ? rows : first + at_once;
        int strips = ceil_div(last - first, STRIP);
        int begin = unit % groups * PANELS, behind = panels < begin + PANELS ? panels : begin + PANELS;
        for (int from = 0; from < chunks; from += PART) {
            int until = chunks < from + PART ? chunks : from + PART;
            for (int panel = begin; panel < behind; panel++) {
                for (int row = first; row < last; row += STRIP) {
                    float* own = sums + (size_t(panel - begin) * ROWS + size_t(row - first)) * PANEL;
                    int count = last - row < STRIP ? last - row : STRIP;
                    Ahead ahead;
                    if (panel + 1 < behind) {
                        ahead = share(linear, panel * 4 + 4, 4, from, (row - first) / STRIP, strips);
                    }
                    sums_of(linear, x, row, count, panel * 4, 4, from, until, ahead, own);
                    if (until == chunks) end(linear, finish, row, count, panel * PANEL, PANEL, own);
                }
            }
        }
    }
}

}  // namespace

void multiply(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows, const Finish& finish) {
    if (linear.path == AMX && rows > FEW && linear.k_padded > DEEP) {
        multiply_deep(pool, thread, linear, x, rows, finish);
    } else {
        multiply_wide(pool, linear, x, rows, finish);
    }
}

bool path_works(int path, int type) {
    switch (path) {
        case PORTABLE: return true;
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
#ifdef STREAMSERVE_AVX512
        case AVX512: return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq");
#endif
#if defined(STREAMSERVE_AVX512) && defined(__AVX512BF16__)
        case AVX512_BF16: return type == BF16 && __builtin_cpu_supports("avx512bf16");
#endif
#ifdef STREAMSERVE_AVX512
        case AMX: return type == BF16 && amx_works();
#endif
        default: return false;
    }
}

}  // namespace streamserve
