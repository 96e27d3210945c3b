// Products on the paths that multiply in float32 (AVX512, AVX2 and plain C++), with bf16 or float32 weights.
//
//                  K in parts
//               ┌──────┬──────┐        ┌──┬──┬──┬──┐  A part of a weight tile stays in L1 while all rows of the
//   up to 6     │ ▒▒▒▒ │      │        │▒▒│  │  │  │  block are multiplied by it. bf16 becomes float32 in
//   rows        ├──────┼──────┤    ×   ├──┼──┼──┼──┤  registers, once for up to 6 rows, or, with many rows,
//   of a block  │      │      │        │  │  │  │  │  in memory, once for all rows.
//   of 96       └──────┴──────┘        └──┴──┴──┴──┘  Sums are stored between parts, unrounded.
//             float32, in L2, laid      a panel
//             out part by part
//
// e4m3 weights are exact in float32 too. They have a scale for each output and group of K, which is 32, 64, 128 or
// all of K. A group's sum is scaled when it is complete; groups are added in ascending order, in float32:
//
//   y[r, n] = Σ_g  s[n, g] · Σ x·w        y = fma(s, Σ, y);  s [n/64][k/group][64] float32
#include <algorithm>
#include <type_traits>

#include "elementwise.h"
#include "gemm.h"
#include "vec.h"

namespace streamserve {

namespace {

constexpr int MAX_ROWS = 6;        // maximum rows with sums in registers at the same time
constexpr int BLOCK_ROWS = 96;     // maximum rows of a block, which are in L2
constexpr int PART = 256;          // maximum size of a part of K, with more than MAX_ROWS rows
constexpr int WIDENED_ROWS = 64;   // rows from which on bf16 weights become float32 in memory
constexpr int WIDENED = 32 << 10;  // bytes of such weights at a time, in L1 or close to it
constexpr int AHEAD = 2048;        // distance of prefetching in bytes, with a single group of rows
constexpr int ROW_GAP = 16;        // floats between rows of x: rows do not compete for the same lines of L1

// Return the number of weight tiles (of two vectors each) that `rows` rows are multiplied by at once: 16 or
// 32 registers hold their sums, the weights and a number of x.
template <class V>
constexpr int tiles_at_once(int rows) {
    return 4 * (rows + 1) < (V::lanes == 16 ? 32 : 16) ? 2 : 1;
}

// Return the number of cache lines that four k of a weight tile take.
template <class V, class T>
constexpr int lines() {
    return 4 * 2 * V::lanes * int(sizeof(T)) / 64;
}

// Weights to prefetch during a multiplication: in tiles `tile_stride` bytes apart, lines `step` bytes apart.
// Every four k, one line is prefetched for each line that is read.
struct Fetch {
    const char* at;
    size_t step, tile_stride;
};

// The arguments of `block`. Distances are in numbers: `tile_stride` between tiles, `x_stride` between rows of
// x, PANEL between rows of sums.
template <class T>
struct Block {
    const T* weight;
    size_t tile_stride;
    const float* x;
    size_t x_stride;
    int depth;   // a multiple of 4
    bool first;  // sums begin at zero
    float* sums;
    Fetch fetch;
    Lines* lines;  // further lines to prefetch, one every four k
};

// Compute sums of ROWS rows × TILES tiles over a part of K. The weights to prefetch are of type M, as in memory.
template <class V, class T, class M, int ROWS, int TILES>
void block(const Block<T>& b) {
    constexpr int WIDE = 2 * TILES;
    V sum[ROWS][WIDE];
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < WIDE; i++) {
            sum[row][i] = b.first ? V::set(0.0f) : V::load(b.sums + row * PANEL + i * V::lanes);
        }
    }
    const T* weight = b.weight;
    const float *x = b.x, *lower = b.x + 3 * b.x_stride;  // two pointers and one distance address six rows
    const size_t x_stride = b.x_stride, tile_stride = b.tile_stride;
    const char* fetch = b.fetch.at;
    for (int k = 0; k < b.depth; k += 4, weight += 4 * 2 * V::lanes, x += 4, lower += 4) {
        b.lines->fetch_one();
        for (int line = 0; line < lines<V, M>(); line++, fetch += b.fetch.step) {
            for (int tile = 0; tile < TILES; tile++) __builtin_prefetch(fetch + size_t(tile) * b.fetch.tile_stride);
        }
#pragma GCC unroll 4
        for (int one : {1, 0, 3, 2}) {
            V column[WIDE];
            for (int tile = 0; tile < TILES; tile++) {
                V::load_tile(weight + one * 2 * V::lanes + size_t(tile) * tile_stride, column[2 * tile],
                             column[2 * tile + 1]);
            }
            for (int row = 0; row < ROWS; row++) {
                V value = V::set(row < 3 ? x[size_t(row) * x_stride + one] : lower[size_t(row - 3) * x_stride + one]);
                for (int i = 0; i < WIDE; i++) accumulate(sum[row][i], value, column[i]);
            }
        }
    }
    for (int row = 0; row < ROWS; row++) {
        for (int i = 0; i < WIDE; i++) sum[row][i].store(b.sums + row * PANEL + i * V::lanes);
    }
}

template <class V, class T, class M, int ROWS>
void block_of(int tiles, const Block<T>& b) {
    if constexpr (tiles_at_once<V>(ROWS) == 2) {
        if (tiles == 2) return block<V, T, M, ROWS, 2>(b);
    }
    block<V, T, M, ROWS, 1>(b);
}

template <class V, class T, class M>
void block_for(int rows, int tiles, const Block<T>& b) {
    switch (rows) {
        case 1: return block_of<V, T, M, 1>(tiles, b);
        case 2: return block_of<V, T, M, 2>(tiles, b);
        case 3: return block_of<V, T, M, 3>(tiles, b);
        case 4: return block_of<V, T, M, 4>(tiles, b);
        case 5: return block_of<V, T, M, 5>(tiles, b);
        default: return block_of<V, T, M, 6>(tiles, b);
    }
}

// A thread's rows of x in float32, and their products with a panel of weights of type T.
template <class V, class T>
class Rows32 {
  public:
    Rows32(Pool& pool, int thread, const Linear& w, const Rows& x, int rows) : w_(w), x_(x) {
        constexpr int columns = 2 * 2 * V::lanes;  // of the two tiles that may be multiplied at once
        group_ = SCALED ? std::min(w.group, w.k_padded) : w.k_padded;
        widen_ = sizeof(T) < sizeof(float) && rows >= WIDENED_ROWS;
        int part = widen_ ? std::min(PART, WIDENED / (columns * int(sizeof(float)))) : PART;
        int parts = rows > MAX_ROWS ? ceil_div(w.k_padded, part) : 1;
        depth_ = group_ < w.k_padded ? group_ : round_up(ceil_div(w.k_padded, parts), CHUNK);
        size_t floats = size_t(ceil_div(w.k_padded, depth_)) * size_t(rows) * size_t(depth_ + ROW_GAP);
        size_t sums = size_t(rows) * PANEL, widened = widen_ ? size_t(columns) * size_t(depth_) : 0;
        size_t scaled = SCALED ? sums : 0;
        float* memory =
            reinterpret_cast<float*>(pool.scratch(thread, (scaled + sums + widened + floats) * sizeof(float)));
        scaled_ = memory;
        sums_ = scaled_ + scaled;
        widened_ = sums_ + sums;
        floats_ = widened_ + widened;
    }

    // Convert rows `first` to `first + rows` to float32.
    void take(int first, int rows) {
        rows_ = rows;
        for (int row = 0; row < rows; row++) {
            if (w_.type == BF16) {
                take_row<bf16>(first + row, row);
            } else {
                take_row<float>(first + row, row);
            }
        }
    }

    // Return the products [rows][PANEL] of the rows with `tiles` tiles of the weight from `tile` on.
    // Prefetches `lines`.
    float* times(int tile, int tiles, Lines& lines) {
        constexpr int width = 2 * V::lanes;
        int groups = 0, count = 0;
        for (int row = 0; row < rows_; row += count, groups++) count = group(rows_ - row);
        int at_once = tiles_at_once<V>(count) < tiles ? tiles_at_once<V>(count) : tiles;
        size_t tile_stride = size_t(width) * size_t(w_.k_padded);
        const T* weight = static_cast<const T*>(w_.weight) + size_t(tile) * tile_stride;
        for (int k = 0; k < w_.k_padded; k += depth_) {
            int depth = w_.k_padded - k < depth_ ? w_.k_padded - k : depth_;
            for (int i = 0; i < tiles; i += at_once) {
                const T* from = weight + size_t(i) * tile_stride + size_t(k) * width;
                const T* next =
                    k + depth_ < w_.k_padded ? from + depth * width : from + size_t(at_once) * tile_stride;
                Fetch fetch{reinterpret_cast<const char*>(groups == 1 ? from + AHEAD / sizeof(T) : next),
                            64 / size_t(groups), tile_stride * sizeof(T)};
                auto block_with = [&](auto* tiles_from, size_t stride_of_tiles) {
                    using N = std::remove_const_t<std::remove_pointer_t<decltype(tiles_from)>>;
                    meet(Block<N>{tiles_from, stride_of_tiles, part(k / depth_), stride(), depth,
                                  k % group_ == 0, sums_ + i * width, fetch, &lines}, at_once);
                };
                if (widen_) {
                    widen_part(from, tile_stride, at_once, depth);
                    block_with(static_cast<const float*>(widened_), size_t(width) * size_t(depth));
                } else {
                    block_with(from, tile_stride);
                }
            }
            if constexpr (SCALED) {
                if ((k + depth) % group_ == 0 || k + depth == w_.k_padded) scale(tile, tiles, k / group_);
            }
        }
        lines.fetch_rest();
        return SCALED ? scaled_ : sums_;
    }

  private:
    static constexpr bool SCALED = std::is_same_v<T, e4m3>;

    template <class X>
    void take_row(int from, int row) {
        for (int k = 0; k < w_.k_padded; k += CHUNK) {
            const X* chunk = reinterpret_cast<const X*>(x_.at(from, k / CHUNK));
            float* to = part(k / depth_) + size_t(row) * stride() + k % depth_;
            for (int i = 0; i < CHUNK; i += V::lanes) V::load(chunk + i).store(to + i);
        }
    }

    // Scale the sums over a group of K, and add them to the scaled sums.
    void scale(int tile, int tiles, int group) {
        constexpr int width = 2 * V::lanes;
        int column = tile * width, groups = ceil_div(w_.k_padded, group_);
        const float* scales = static_cast<const float*>(w_.scales) + (column / PANEL * groups + group) * PANEL + column % PANEL;
        for (int i = 0; i < tiles * width; i += V::lanes) {
            V s = V::load(scales + i);
            for (int row = 0; row < rows_; row++) {
                float* to = scaled_ + row * PANEL + i;
                V sum = V::load(sums_ + row * PANEL + i);
                (group ? fma(s, sum, V::load(to)) : s * sum).store(to);
            }
        }
    }

    // Return the number of rows, of `left`, that are multiplied together. With 3 or 4 rows there are too few sums to
    // keep the multipliers busy: so 8 rows are 6 and 2, and the 2 are multiplied by two tiles at once.
    static int group(int left) {
        int over = left % MAX_ROWS;
        return left < MAX_ROWS ? left : over == 1 || over == 3 || over == 4 ? MAX_ROWS - 1 : MAX_ROWS;
    }

    // Convert a part of `tiles` tiles to float32.
    void widen_part(const T* from, size_t tile_stride, int tiles, int depth) {
        constexpr int width = 2 * V::lanes;
        float* to = widened_;
        for (int tile = 0; tile < tiles; tile++, from += tile_stride) {
            for (int k = 0; k < depth; k++, to += width) {
                V low, high;
                V::load_tile(from + k * width, low, high);
                low.store(to);
                high.store(to + V::lanes);
            }
        }
    }

    // Multiply all rows by a part of `tiles` tiles. A single group of rows prefetches weights AHEAD bytes
    // further on; several groups share the prefetching of the next part.
    template <class N>
    void meet(Block<N> b, int tiles) {
        for (int row = 0, count; row < rows_; row += count) {
            count = group(rows_ - row);
            int together = tiles_at_once<V>(count) < tiles ? tiles_at_once<V>(count) : tiles;
            Block<N> part = b;
            for (int tile = 0; tile < tiles; tile += together) {
                block_for<V, N, T>(count, together, part);
                part.weight += b.tile_stride;
                part.fetch.at += b.fetch.tile_stride;
                part.sums += 2 * V::lanes;
            }
            b.x += size_t(count) * b.x_stride;
            b.sums += count * PANEL;
            b.fetch.at += b.fetch.step * size_t(lines<V, T>() * b.depth / 4);
        }
    }

    size_t stride() const { return size_t(depth_ + ROW_GAP); }
    float* part(int number) const { return floats_ + size_t(number) * size_t(rows_) * stride(); }

    const Linear& w_;
    const Rows& x_;
    bool widen_;
    int group_, depth_, rows_ = 0;
    float *scaled_, *sums_, *widened_, *floats_;
};

// Multiply panels, which threads claim one by one. The last panels are claimed by tiles, so that threads end
// together.
template <class V, class T>
void multiply_typed(Pool& pool, int thread, const Linear& w, const Rows& x, int rows, const Finish& finish) {
    constexpr int width = 2 * V::lanes, tiles = PANEL / width;
    int panels = w.n_padded / PANEL, blocks = ceil_div(rows, BLOCK_ROWS);
    int at_once = round_up(ceil_div(rows, blocks), rows > MAX_ROWS ? MAX_ROWS : 1);
    blocks = ceil_div(rows, at_once);
    int whole = panels * blocks, cut = finish.kind == Finish::GATE_MUL ? 0 : whole % pool.threads();
    if (pool.threads() == 1 || panels <= cut) cut = 0;
    int units = whole - cut + cut * tiles;
    Rows32<V, T> some(pool, thread, w, x, at_once);
    Lines lines;
    for (int unit, held = -1; (unit = pool.claim()) < units;) {
        bool part = unit >= whole - cut;
        int number = part ? whole - cut + (unit - whole + cut) / tiles : unit;
        int first = number / panels * at_once, count = rows - first < at_once ? rows - first : at_once;
        if (first != held) some.take(first, count);
        held = first;
        int tile = number % panels * tiles + (part ? (unit - whole + cut) % tiles : 0);
        finish.lora.ahead(tile * width, part ? width : PANEL, w.n_padded, lines);
        float* sums = some.times(tile, part ? 1 : tiles, lines);
        end(w, finish, first, count, tile * width, part ? width : PANEL, sums);
    }
}

template <class V>
void multiply_by(Pool& pool, int thread, const Linear& w, const Rows& x, int rows, const Finish& finish) {
    if (w.numbers == E4M3) {
        multiply_typed<V, e4m3>(pool, thread, w, x, rows, finish);
    } else if (w.type == BF16) {
        multiply_typed<V, bf16>(pool, thread, w, x, rows, finish);
    } else {
        multiply_typed<V, float>(pool, thread, w, x, rows, finish);
    }
}

}  // namespace

void multiply_float32(Pool& pool, int thread, const Linear& w, const Rows& x, int rows, const Finish& finish) {
    if (rows <= 0) return;
#ifdef STREAMSERVE_AVX512
    if (w.path >= AVX512) return multiply_by<Vec512>(pool, thread, w, x, rows, finish);
#endif
#if defined(__AVX2__) && defined(__FMA__)
    if (w.path >= AVX2) return multiply_by<Vec256>(pool, thread, w, x, rows, finish);
#endif
    multiply_by<VecPortable>(pool, thread, w, x, rows, finish);
}

}  // namespace streamserve
