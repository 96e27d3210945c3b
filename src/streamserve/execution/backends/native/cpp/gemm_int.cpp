// Products of weights in 8 or 4 bits with activations that are rounded to 8 bits by row and group of K.
//
//   y[r, n] = Σ_g  sx[r, g] · (s[n, g] · Σ q·xq  +  m[n, g] · Σ xq)        groups in ascending order, float32
//
// q are unsigned, xq signed. Both sums over a group are exact in 32 bits, so no bit depends on the
// instructions, the number of rows or the number of threads. A group is 16, 32, 64, 128 or all of K, which is
// at most 66,311: 255 · 127 · K fits in 32 bits. Without m the weights are symmetric: q has an offset of 128
// or 8, which is subtracted as an integer. Products and sums of floats are rounded as written:
//
//   t = s · float(Σ q·xq - offset · Σ xq)   or   fma(s, float(Σ q·xq), m · float(Σ xq));      y = fma(sx, t, y)
//
// How a weight [n, k] is packed (k_padded: whole tiles of 64), so that a thread reads a panel of 64 columns
// from its first byte to its last:
//
//   8 bits   [n/64][k/4][64][4]            4 bits   [n/64][k/64][8][64][4]  low: k of the tile's first half,
//                                                                           high: k of its second half
//   s, m     [n/64][k/group][64] float32, or s in 16 bits and zero points in 8, or s in 8 bits (ScaleType)
//
// Numbers of 4 bits may be indices of a table of 16 numbers of 8 bits. Then q are the table's numbers, with
// the offset 128, and the results have the same bits as with a weight that stores them in 8 bits.
//
// If the inputs of a group are not adjacent in x, `order` has the place in x of each k.
#include <iterator>

#include "dot_products.h"
#include "elementwise.h"
#include "gemm.h"
#include "gemm_int_amx.h"
#include "vec.h"

namespace streamserve {

namespace {

constexpr int LINE = 4 * PANEL;  // bytes of a panel for four k
constexpr int TILE = 64;        // of K
constexpr int SMALL_GROUP = 16;  // the only group smaller than CHUNK
constexpr int BLOCK_ROWS = 96;  // maximum rows that a thread rounds at once
constexpr int AHEAD = 4096;     // distance of prefetching in bytes
constexpr int UNPACKED_K = 256;  // maximum size of groups whose 4-bit numbers are unpacked in L1
constexpr int ROW_GAP = 64;     // bytes between rows of x: rows do not compete for the same lines of L1
constexpr float SMALLEST = 1e-35f;  // smaller peaks count as zero: 127 / peak might not be finite

// A thread's rows of x, rounded to 8 bits by group.
class RoundedRows {
  public:
    RoundedRows(Pool& pool, int thread, const Linear& w, const Rows& x, int rows) : w_(w), x_(x) {
        groups_ = ceil_div(w.k_padded, w.group);
        size_t sums = size_t(rows) * PANEL, ordered = w.order ? size_t(w.k_padded) : 0;
        size_t numbers = size_t(rows) * size_t(groups_), bytes = size_t(round_up(rows, 16)) * stride();
        bool unpacks = w.bits == 4 && (w.group <= UNPACKED_K || w.path == AMX);
        size_t unpacked = unpacks ? size_t(w.group < TILE ? TILE : w.group) * PANEL : 0;
        size_t floats = sums + ordered + 2 * numbers;
        char* memory = pool.scratch(thread, floats * sizeof(float) + bytes + unpacked);
        unpacked_ = reinterpret_cast<uint8_t*>(memory);  // first, to be aligned to a cache line
        sums_ = reinterpret_cast<float*>(memory + unpacked);
        ordered_ = sums_ + sums;
        scales_ = ordered_ + ordered;
        totals_ = reinterpret_cast<int32_t*>(scales_ + numbers);
        x_rounded_ = reinterpret_cast<int8_t*>(totals_ + numbers);
    }

    // Round rows `first` to `first + rows`.
    template <class D>
    void take(int first, int rows) {
        rows_ = rows;
        for (int row = 0; row < rows; row++) {
            if (w_.type == BF16) {
                take_typed<D, bf16>(first + row, row);
            } else {
                take_typed<D, float>(first + row, row);
            }
        }
    }

    // Return the rows' products with a panel, [rows][PANEL]. A group's weights stay in L1 until all rows are
    // multiplied by them, unless all of K is one group. `next`: the thread's next panel, whose first weights
    // are prefetched at the end of this panel.
    template <class D>
    float* times(int panel, int next) {
#if defined(__AMX_INT8__) && defined(STREAMSERVE_AVX512)
        bool tiled = w_.path == AMX && !w_.table && IntegerTiles::fit(w_.group);
        if (tiled && rows_ >= IntegerTiles::ROWS) return tile_times(panel, next);
#endif
        if constexpr (D::at_once * D::lanes == PANEL) {
            if (rows_ == 1 && w_.group != SMALL_GROUP) return stream_panel<D, 1>(panel, next);
            if (rows_ == 2 && w_.group != SMALL_GROUP) return stream_panel<D, 2>(panel, next);
        }
        clear_sums();
        // With fewer rows, unpacking takes as much time as it saves.
        bool unpacks = w_.bits == 4 && w_.group <= UNPACKED_K && rows_ > 2 * D::rows;
        for (int g = 0; g < groups_; g++) {
            const uint8_t* unpacked = unpacks ? unpack<D>(panel, next, g) : nullptr;
            take_scales<D>(panel, next, g);
            for (int column = 0; column < PANEL; column += D::at_once * D::lanes) {
                Block block = block_of(panel, column, g);
                block.next = next;
                if (unpacks) block.weight = unpacked + size_t(column) * 4, block.fetched = true;
                for (int count; block.row < rows_; block.row += count, block.x += size_t(count) * stride()) {
                    count = rows_ - block.row < D::rows ? rows_ - block.row : D::rows;
                    if (w_.bits == 8 || (unpacks && w_.table)) {
                        block_for<D, 8>(count, block);
                    } else if (unpacks) {
                        block_for<D, UNPACKED>(count, block);
                    } else if (w_.table) {
                        block_for<D, INDICES>(count, block);
                    } else {
                        block_for<D, 4>(count, block);
                    }
                }
            }
        }
        return sums_;
    }

  private:
    size_t stride() const { return size_t(w_.k_padded + ROW_GAP); }

    // Further values of BITS, for numbers of 4 bits that are indices of a table, or that were unpacked.
    static constexpr int INDICES = 0, UNPACKED = 1;
    template <int BITS>
    static constexpr bool PACKED = BITS == 4 || BITS == INDICES;  // two numbers in a byte
    template <int BITS>
    static constexpr int WIDTH = BITS == 4 || BITS == UNPACKED ? 4 : 8;  // bits of the multiplied numbers

    // A block of rows from `row` on and of a panel's columns from `column` on, over group `g` of K, from
    // `begin` to `end`. `weight` and `x`: addresses of its first numbers.
    struct Block {
        int panel, next, column, row, g, begin, end;
        const uint8_t* weight;
        const int8_t* x;
        bool fetched = false;  // the weights are in L1
    };

    // Round row `from` of x to row `row`. If the weight has an order, the row is first copied in this order.
    template <class D, class T>
    void take_typed(int from, int row) {
        if (!w_.order) return take_row<D, T>(x_, from, row);
        for (int k = 0; k < w_.k_padded; k++) {
            int place = w_.order[k];
            ordered_[k] = widen(reinterpret_cast<const T*>(x_.at(from, place / CHUNK))[place % CHUNK]);
        }
        take_row<D, float>({reinterpret_cast<char*>(ordered_), 0, 0, CHUNK * sizeof(float)}, 0, row);
    }

    Block block_of(int panel, int column, int g) const {
        int begin = g * w_.group, end = begin + w_.group < w_.k_padded ? begin + w_.group : w_.k_padded;
        int lines = w_.bits == 8 ? begin / 4 : begin / TILE * (TILE / 8) + begin % (TILE / 2) / 4;
        const uint8_t* weight = weights_of(panel) + size_t(lines) * LINE + size_t(column) * 4;
        return {panel, panel, column, 0, g, begin, end, weight, x_rounded_ + begin};
    }

    const uint8_t* weights_of(int panel) const {
        return static_cast<const uint8_t*>(w_.weight) + size_t(panel) * panel_bytes();
    }
    size_t panel_bytes() const { return size_t(w_.k_padded) * size_t(PANEL * w_.bits / 8); }

    // Return a group's weights of 4 bits as bytes [k/4][64][4], unpacked once for all rows. If the group is
    // smaller than a tile, its whole tile is unpacked, for the tile's first group.
    template <class D>
    const uint8_t* unpack(int panel, int next, int g) {
        int begin = g * w_.group, rest = w_.k_padded - begin;
        typename D::Bytes table{};
        if (w_.table) table = D::table(w_.table);
        const uint8_t* weight = weights_of(panel) + size_t(begin / TILE) * size_t(TILE / 8 * LINE);
        uint8_t* to = unpacked_;
        int tiles = begin % TILE ? 0 : ceil_div(w_.group < rest ? w_.group : rest, TILE);
        for (; tiles > 0; tiles--, to += TILE / 8 * LINE) {
            const uint8_t* ahead = ahead_in(panel, next, weight);
            for (int i = 0; i < TILE / 8 * LINE; i += 4 * D::lanes, to += 4 * D::lanes, weight += 4 * D::lanes) {
                if (i % 64 == 0) __builtin_prefetch(ahead + i, 0, 2);
                typename D::Bytes both = D::load(weight), low = D::low(both), high = D::high(both);
                D::store(to, w_.table ? D::look_up(table, low) : low);
                D::store(to + TILE / 8 * LINE, w_.table ? D::look_up(table, high) : high);
            }
        }
        return unpacked_ + size_t(begin % TILE / 4) * LINE;
    }

    // Return the weights AHEAD bytes after `weight`, to be prefetched by the first rows of a block.
    const uint8_t* ahead_of(const Block& b, const uint8_t* weight) const {
        return b.row || b.fetched ? weight : ahead_in(b.panel, b.next, weight);
    }
    const uint8_t* ahead_in(int panel, int next, const uint8_t* weight) const {
        const uint8_t* end = weights_of(panel) + panel_bytes();
        return weight + AHEAD < end ? weight + AHEAD : weights_of(next) + (weight + AHEAD - end);
    }

    // Round a row. A group's largest magnitude determines its scale. Magnitudes are compared by their bits,
    // so a NaN is the largest; as with infinity, scale and sums are then not finite.
    template <class D, class T>
    void take_row(const Rows& x, int from, int row) {
        using V = typename D::V;
        int8_t* to = x_rounded_ + size_t(row) * stride();
        for (int g = 0; g < groups_; g++) {
            int begin = g * w_.group, end = begin + w_.group < w_.k_padded ? begin + w_.group : w_.k_padded;
            D most = D::all(0), total = D::all(0);
            each<V, T>(x, from, begin, end, [&](int, V v) { most = D::larger(most, D::magnitudes(v)); });
            int32_t bits = most.largest();
            float top;
            std::memcpy(&top, &bits, 4);
            V inverse = V::set(top >= SMALLEST ? 127.0f / top : 0.0f);
            each<V, T>(x, from, begin, end, [&](int k, V v) {
                D rounded = D::nearest(v * inverse);
                total.plus(rounded);
                rounded.narrow(to + k);
            });
            scales_[size_t(row) * size_t(groups_) + size_t(g)] = top / 127.0f;
            totals_[size_t(row) * size_t(groups_) + size_t(g)] = total.total();
        }
    }

    template <class V, class T, class F>
    void each(const Rows& x, int row, int begin, int end, F&& f) {
        for (int k = begin; k < end; k += CHUNK) {
            const T* chunk = reinterpret_cast<const T*>(x.at(row, k / CHUNK)) + k % CHUNK;
            if (end - k >= CHUNK) {
                for (int i = 0; i < CHUNK; i += V::lanes) f(k + i, V::load(chunk + i));
            } else {
                for (int i = 0; i < SMALL_GROUP; i += V::lanes) f(k + i, V::load(chunk + i));
            }
        }
    }

    template <class D, int BITS>
    void block_for(int count, const Block& b) {
        switch (count) {
            case 1: return block<D, BITS, 1>(b);
            case 2: return block<D, BITS, 2>(b);
            case 3: return block<D, BITS, D::rows < 3 ? D::rows : 3>(b);
            case 4: return block<D, BITS, D::rows < 4 ? D::rows : 4>(b);
            case 5: return block<D, BITS, D::rows < 5 ? D::rows : 5>(b);
            default: return block<D, BITS, D::rows>(b);
        }
    }

#if defined(__AMX_INT8__) && defined(STREAMSERVE_AVX512)
    // Do the work of `times` with AMX.
    float* tile_times(int panel, int next) {
        alignas(64) int32_t sums[IntegerTiles::ROWS * PANEL];
        clear_sums();
        for (int g = 0; g < groups_; g++) {
            take_scales<Dot512>(panel, next, g);
            Block block = block_of(panel, 0, g);
            int tiles = (block.end - block.begin) / IntegerTiles::K;
            const uint8_t* weight = block.weight;
            if (w_.bits == 4) {
                weight = unpack<Dot512>(panel, next, g);
                asm volatile("" ::: "memory");  // the compiler does not know which memory tile loads read
            }
            for (; block.row < rows_; block.x += IntegerTiles::ROWS * stride()) {
                IntegerTiles::sums(block.x, stride(), weight, tiles, sums);
                for (const int32_t* row = sums; row < std::end(sums) && block.row < rows_; row += PANEL) {
                    scale_row(block, row);
                    block.row++;
                }
            }
        }
        return sums_;
    }

    // Scale a row's integer sums [64], and add them to y.
    void scale_row(const Block& b, const int32_t* sums) {
        int32_t offset = w_.offsets ? 0 : w_.bits == 8 ? 128 : 8;
        Dot512 dot[1][Dot512::at_once];
        UNROLLED for (int i = 0; i < Dot512::at_once; i++) {
            dot[0][i] = Dot512::all(-offset * totals_[size_t(b.row) * size_t(groups_) + size_t(b.g)]);
            dot[0][i].plus(Dot512::load(sums + i * Dot512::lanes));
        }
        if (w_.offsets) {
            scale<Dot512, 1, true>(b, dot);
        } else {
            scale<Dot512, 1, false>(b, dot);
        }
    }
#endif

    // Do the work of `times` for one or two rows, as fast as weights are read: registers hold y over all
    // groups, and two integer sums for each number of y, which do not wait for each other.
    template <class D, int ROWS>
    float* stream_panel(int panel, int next) {
        if (w_.bits == 8) return stream_numbers<D, 8, ROWS>(panel, next);
        return w_.table ? stream_numbers<D, INDICES, ROWS>(panel, next) : stream_numbers<D, 4, ROWS>(panel, next);
    }

    template <class D, int BITS, int ROWS>
    float* stream_numbers(int panel, int next) {
        return w_.offsets ? stream<D, BITS, ROWS, true>(panel, next) : stream<D, BITS, ROWS, false>(panel, next);
    }

    // With 4 bits, `even` sums the low halves of bytes and `odd` the high halves: in groups of 32, these are
    // two adjacent groups. With 8 bits and larger groups, they sum every other line.
    template <class D, int BITS, int ROWS, bool ZEROS>
    float* stream(int panel, int next) {
        using V = typename D::V;
        constexpr int LINES = BITS == 8 ? TILE / 4 : TILE / 8;  // of a tile
        bool halves = w_.group < TILE;
        int first = -((w_.offsets ? 0 : BITS == 4 ? 8 : 128));
        V y[ROWS][D::at_once];
        UNROLLED for (auto& row : y) UNROLLED for (V& one : row) one = V::set(0.0f);
        D even[ROWS][D::at_once], odd[ROWS][D::at_once];
        typename D::Bytes table{};
        if constexpr (BITS == INDICES) table = D::table(w_.table);
        const uint8_t* weight = weights_of(panel);
        const int8_t* x = x_rounded_;
        int tiles_of_group = halves ? 1 : w_.group / TILE, tiles = w_.k_padded / TILE;
        for (int g = 0; tiles > 0; tiles -= tiles_of_group, g += 1 + halves) {
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const int32_t* total = totals_ + size_t(r) * size_t(groups_) + size_t(g);
                UNROLLED for (int i = 0; i < D::at_once; i++) {
                    even[r][i] = D::all(first * total[0]), odd[r][i] = D::all(halves ? first * total[1] : 0);
                }
            }
            int count = tiles < tiles_of_group ? tiles : tiles_of_group;
            for (int tile = 0; tile < count; tile++, weight += LINES * LINE, x += TILE) {
                stream_tile<D, BITS, ROWS>(weight, ahead_in(panel, next, weight), x, table, halves, even, odd);
            }
            if (!halves) {
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    UNROLLED for (int i = 0; i < D::at_once; i++) even[r][i].plus(odd[r][i]);
                }
            }
            add_scaled<D, ROWS, ZEROS>(panel, next, g, even, y);
            if (halves) add_scaled<D, ROWS, ZEROS>(panel, next, g + 1, odd, y);
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            UNROLLED for (int i = 0; i < D::at_once; i++) y[r][i].store(sums_ + r * PANEL + i * D::lanes);
        }
        return sums_;
    }

    // Add a tile of 64 k to the sums. With 8 bits and groups of 32, the sums are of the tile's two halves.
    template <class D, int BITS, int ROWS>
    __attribute__((always_inline)) void stream_tile(const uint8_t* weight, const uint8_t* ahead, const int8_t* x,
                                                    typename D::Bytes table, bool halves, D (&even)[ROWS][D::at_once],
                                                    D (&odd)[ROWS][D::at_once]) {
        int second = BITS != 8 || halves ? TILE / 2 : 4;  // where in x the second sum's numbers are
        int step = BITS == 8 && !halves ? 8 : 4;
        size_t gap = BITS != 8 ? 0 : halves ? size_t(TILE / 8 * LINE) : size_t(LINE), jump = size_t(step / 4 * LINE);
        for (int j = 0; j < TILE / 8; j++, weight += jump, ahead += jump, x += step) {
            typename D::Bytes low[D::at_once], high[D::at_once];
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                const uint8_t* at = weight + size_t(i) * 4 * D::lanes;
                __builtin_prefetch(ahead + i * 4 * D::lanes, 0, 2);
                low[i] = D::load(at);
                if constexpr (BITS == 8) {
                    __builtin_prefetch(ahead + gap + size_t(i) * 4 * D::lanes, 0, 2);
                    high[i] = D::load(at + gap);
                } else {
                    high[i] = looked_up<D, BITS>(table, D::high(low[i]));
                    low[i] = looked_up<D, BITS>(table, D::low(low[i]));
                }
            }
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const int8_t* row = x + size_t(r) * stride();
                auto one = D::broadcast(row), two = D::broadcast(row + second);
                UNROLLED for (int i = 0; i < D::at_once; i++) {
                    even[r][i].template add<WIDTH<BITS>>(low[i], one);
                    odd[r][i].template add<WIDTH<BITS>>(high[i], two);
                }
            }
        }
    }

    // Scale a group's integer sums, and add them to y.
    template <class D, int ROWS, bool ZEROS>
    __attribute__((always_inline)) void add_scaled(int panel, int next, int g, const D (&dot)[ROWS][D::at_once],
                                                   typename D::V (&y)[ROWS][D::at_once]) {
        using V = typename D::V;
        size_t at = (size_t(panel) * size_t(groups_) + size_t(g)) * PANEL;
        V s[D::at_once], m[D::at_once];
        load_tables<D, ZEROS>(at, (size_t(next) * size_t(groups_) + size_t(g)) * PANEL, s, m);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            size_t of = size_t(r) * size_t(groups_) + size_t(g);
            V scale_of_row = V::set(scales_[of]), sum_of_row = V::set(float(totals_[of]));
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                y[r][i] = fused(scale_of_row, scaled<D, ZEROS>(s[i], m[i], dot[r][i], sum_of_row), y[r][i]);
            }
        }
    }

    // Multiply ROWS rows by the columns of `at_once` vectors: registers hold the integer sums, y is in L1.
    // Sums begin with minus the weights' offset times Σ xq, so that the offset is subtracted.
    template <class D, int BITS, int ROWS>
    void block(const Block& b) {
        const uint8_t* weight = b.weight;
        const int8_t* x = b.x;
        D dot[ROWS][D::at_once];
        const int32_t* total = totals_ + size_t(b.row) * size_t(groups_) + size_t(b.g);
        int32_t offset = (w_.offsets ? 0 : WIDTH<BITS> == 4 ? 8 : 128) - (D::signed8 && WIDTH<BITS> == 8 ? 128 : 0);
        typename D::Bytes table{};
        if constexpr (BITS == INDICES) table = D::table(w_.table);
        UNROLLED for (int r = 0; r < ROWS; r++, total += groups_) {
            UNROLLED for (int i = 0; i < D::at_once; i++) dot[r][i] = D::all(-offset * *total);
        }
        if (w_.group == SMALL_GROUP) {
            lines<D, BITS, ROWS, SMALL_GROUP / 4>(weight, ahead_of(b, weight), b.begin, x, table, dot);
        } else {
            int k = b.begin;
            if constexpr (PACKED<BITS> && ROWS <= D::rows / 3) {
                for (; b.end - k >= TILE; k += TILE, x += TILE, weight += 8 * LINE) {
                    tile<D, BITS, ROWS>(weight, ahead_of(b, weight), x, table, dot);
                }
            }
            for (; k < b.end; k += TILE / 2, x += TILE / 2) {
                lines<D, BITS, ROWS, TILE / 8>(weight, ahead_of(b, weight), k, x, table, dot);
                if (!PACKED<BITS> || k % TILE) weight += 8 * LINE;
            }
        }
        if (w_.offsets) {
            scale<D, ROWS, true>(b, dot);
        } else {
            scale<D, ROWS, false>(b, dot);
        }
    }

    // The bits of the weights' bytes that `add` multiplies.
    static constexpr int LOW = 0, HIGH = 4, WHOLE = 8;

    template <class D, int BITS>
    static typename D::Bytes looked_up(typename D::Bytes table, typename D::Bytes w) {
        if constexpr (BITS == INDICES) return D::look_up(table, w);
        return w;
    }

    // Add COUNT lines from k on: gcc keeps sums in registers if it knows a loop's length. With 4 bits, low halves of
    // a tile's bytes are added before high halves: both at once would need more registers.
    template <class D, int BITS, int ROWS, int COUNT>
    __attribute__((always_inline)) void lines(const uint8_t* weight, const uint8_t* ahead, int k, const int8_t* x,
                                              typename D::Bytes table, D (&dot)[ROWS][D::at_once]) {
        if constexpr (!PACKED<BITS>) {
            for (int j = 0; j < COUNT; j++) {
                add<D, BITS, WHOLE, ROWS>(weight + j * LINE, ahead + j * LINE, x + 4 * j, table, dot);
            }
        } else if (k % TILE < TILE / 2) {
            for (int j = 0; j < COUNT; j++) {
                add<D, BITS, LOW, ROWS>(weight + j * LINE, ahead + j * LINE, x + 4 * j, table, dot);
            }
        } else {
            for (int j = 0; j < COUNT; j++) {
                add<D, BITS, HIGH, ROWS>(weight + j * LINE, weight, x + 4 * j, table, dot);
            }
        }
    }

    // Add a whole tile of 4 bits at once. Used for few rows, where reading weights dominates the time.
    template <class D, int BITS, int ROWS>
    __attribute__((always_inline)) void tile(const uint8_t* weight, const uint8_t* ahead, const int8_t* x,
                                             typename D::Bytes table, D (&dot)[ROWS][D::at_once]) {
        for (int j = 0; j < TILE / 8; j++, weight += LINE, ahead += LINE, x += 4) {
            typename D::Bytes w[D::at_once];
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                __builtin_prefetch(ahead + i * 4 * D::lanes, 0, 2);
                w[i] = D::load(weight + i * 4 * D::lanes);
            }
            UNROLLED for (int r = 0; r < ROWS; r++) {
                const int8_t* row = x + size_t(r) * stride();
                auto low = D::broadcast(row), high = D::broadcast(row + TILE / 2);
                UNROLLED for (int i = 0; i < D::at_once; i++) {
                    dot[r][i].template add<WIDTH<BITS>>(looked_up<D, BITS>(table, D::low(w[i])), low);
                    dot[r][i].template add<WIDTH<BITS>>(looked_up<D, BITS>(table, D::high(w[i])), high);
                }
            }
        }
    }

    template <class D, int BITS, int PART, int ROWS>
    __attribute__((always_inline)) void add(const uint8_t* weight, const uint8_t* ahead, const int8_t* x,
                                            typename D::Bytes table, D (&dot)[ROWS][D::at_once]) {
        typename D::Bytes w[D::at_once];
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            const uint8_t* at = weight + size_t(i) * 4 * D::lanes;
            if (PART != HIGH && BITS != UNPACKED) __builtin_prefetch(ahead + i * 4 * D::lanes, 0, 2);
            w[i] = D::load(at);
            if constexpr (PART == LOW) w[i] = D::low(w[i]);
            if constexpr (PART == HIGH) w[i] = D::high(w[i]);
            w[i] = looked_up<D, BITS>(table, w[i]);
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            auto four = D::broadcast(x + size_t(r) * stride());
            UNROLLED for (int i = 0; i < D::at_once; i++) dot[r][i].template add<WIDTH<BITS>>(w[i], four);
        }
    }

    // Load the scales and offsets of a panel's group from `at` on. Prefetches the tables from `ahead` on.
    template <class D, bool ZEROS>
    __attribute__((always_inline)) void load_tables(size_t at, size_t ahead, typename D::V (&s)[D::at_once],
                                                    typename D::V (&m)[D::at_once]) const {
        switch (w_.scale_type) {
            case SCALE_BF16: return load_tables_of<D, ZEROS, bf16, int8_t>(at, ahead, s, m);
            case SCALE_F16: return load_tables_of<D, ZEROS, f16, int8_t>(at, ahead, s, m);
            case SCALE_E8M0: return load_tables_of<D, false, e8m0, int8_t>(at, ahead, s, m);
            default: return load_tables_of<D, ZEROS, float, float>(at, ahead, s, m);
        }
    }
    template <class D, bool ZEROS, class S, class M>
    __attribute__((always_inline)) void load_tables_of(size_t at, size_t ahead, typename D::V (&s)[D::at_once],
                                                       typename D::V (&m)[D::at_once]) const {
        using V = typename D::V;
        const S* scales = static_cast<const S*>(w_.scales);
        const M* offsets = static_cast<const M*>(w_.offsets);
        UNROLLED for (size_t i = 0; i < PANEL * sizeof(S); i += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(scales + ahead) + i, 0, 2);
        }
        if (ZEROS) UNROLLED for (size_t i = 0; i < PANEL * sizeof(M); i += 64) {
            __builtin_prefetch(reinterpret_cast<const char*>(offsets + ahead) + i, 0, 2);
        }
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            s[i] = V::load(scales + at + size_t(i * D::lanes));
            m[i] = V::set(0.0f);
            if constexpr (ZEROS) {
                m[i] = V::load(offsets + at + size_t(i * D::lanes));
                if constexpr (sizeof(M) == 1) m[i] = m[i] * (V::set(-0.0f) - s[i]);
            }
        }
    }

    void clear_sums() { std::memset(sums_, 0, size_t(rows_) * PANEL * sizeof *sums_); }

    // Load the scales and offsets of a panel's group, for all rows. Prefetches the tables of group g + 2.
    template <class D>
    void take_scales(int panel, int next, int g) {
        int later = g + 2 < groups_ ? g + 2 : g + 2 < 2 * groups_ ? g + 2 - groups_ : 0;
        size_t at = (size_t(panel) * size_t(groups_) + size_t(g)) * PANEL;
        size_t ahead = (size_t(later > g ? panel : next) * size_t(groups_) + size_t(later)) * PANEL;
        for (int column = 0; column < PANEL; column += D::at_once * D::lanes, at += size_t(D::at_once * D::lanes)) {
            typename D::V s[D::at_once], m[D::at_once];
            if (w_.offsets) {
                load_tables<D, true>(at, ahead, s, m);
            } else {
                load_tables<D, false>(at, ahead, s, m);
            }
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                s[i].store(group_scales_ + column + i * D::lanes);
                m[i].store(group_offsets_ + column + i * D::lanes);
            }
        }
    }

    // Scale the sums of the block, and add them to y.
    template <class D, int ROWS, bool ZEROS>
    __attribute__((always_inline)) void scale(const Block& b, const D (&dot)[ROWS][D::at_once]) {
        using V = typename D::V;
        V s[D::at_once], m[D::at_once];
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            s[i] = V::load(group_scales_ + b.column + i * D::lanes);
            m[i] = V::load(group_offsets_ + b.column + i * D::lanes);
        }
        float* y = sums_ + b.row * PANEL + b.column;
        size_t of = size_t(b.row) * size_t(groups_) + size_t(b.g), groups = size_t(groups_);
        const float* sx = scales_ + of;
        const int32_t* total = totals_ + of;
        UNROLLED for (int r = 0; r < ROWS; r++, y += PANEL, sx += groups, total += groups) {
            V scale_of_row = V::set(*sx), sum_of_row = V::set(float(*total));
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                V t = scaled<D, ZEROS>(s[i], m[i], dot[r][i], sum_of_row);
                fused(scale_of_row, t, V::load(y + i * D::lanes)).store(y + i * D::lanes);
            }
        }
    }

    template <class D, bool ZEROS>
    static __attribute__((always_inline)) typename D::V scaled(typename D::V s, typename D::V m, D dot,
                                                               typename D::V sum_of_row) {
        if constexpr (ZEROS) return fused(s, dot.floats(), m * sum_of_row);
        return s * dot.floats();
    }

    const Linear& w_;
    const Rows& x_;
    int groups_, rows_ = 0;
    float *sums_, *ordered_, *scales_;
    int32_t* totals_;
    int8_t* x_rounded_;
    alignas(64) float group_scales_[PANEL], group_offsets_[PANEL];
    uint8_t* unpacked_;  // a group's weights of 4 bits, one in each byte
};

template <class D>
void multiply_by(Pool& pool, int thread, const Linear& w, const Rows& x, int rows, const Finish& finish) {
    int panels = w.n_padded / PANEL, blocks = ceil_div(rows, BLOCK_ROWS);
    int at_once = ceil_div(rows, blocks);
    RoundedRows some(pool, thread, w, x, at_once);
    Lines lines;
    for (int unit = pool.claim(), next, held = -1; unit < panels * blocks; unit = next) {
        next = pool.claim();
        finish.lora.ahead(unit % panels * PANEL, PANEL, w.n_padded, lines);
        lines.fetch_rest();
        int first = unit / panels * at_once, count = rows - first < at_once ? rows - first : at_once;
        float* sums;
        {
            FlushTiny exact(false);  // scales may be below the smallest normal float32
            if (first != held) some.take<D>(first, count);
            held = first;
            sums = some.times<D>(unit % panels, (next < panels * blocks ? next : unit) % panels);
        }
        end(w, finish, first, count, unit % panels * PANEL, PANEL, sums);
    }
}

}  // namespace

void multiply_integers(Pool& pool, int thread, const Linear& w, const Rows& x, int rows, const Finish& finish) {
    if (rows <= 0) return;
#if defined(STREAMSERVE_AVX512) && defined(__AVX512VNNI__)
    if (w.path >= AVX512) return multiply_by<Dot512>(pool, thread, w, x, rows, finish);
#endif
#if defined(__AVX2__) && defined(__FMA__)
    if (w.path >= AVX2) return multiply_by<Dot256>(pool, thread, w, x, rows, finish);
#endif
    multiply_by<DotPortable>(pool, thread, w, x, rows, finish);
}

}  // namespace streamserve
