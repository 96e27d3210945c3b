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
// Scales of two levels are products of a number of 8 bits and a scale in 16 bits that 256 k share. Of these k, [n/64]
// [k/256] has [64] scales in 16 bits and then [256/group][64] numbers in 8 bits; likewise for m. A product has at most
// 19 bits, so it is exact in float32, and the results have the same bits as with scales in float32.
//
// Numbers of 4 bits may be indices of a table of 16 numbers of 8 bits. Then q are the table's numbers, with
// the offset 128, and the results have the same bits as with a weight that stores them in 8 bits.
//
// If the inputs of a group are not adjacent in x, `order` has the place in x of each k.
#include <algorithm>
#include <iterator>
#include <type_traits>

#include "dot_products.h"
#include "elementwise.h"
#include "gemm.h"
#include "gemm_int_amx.h"
#include "gemm_int_avx2.h"
#include "scale_tables.h"
#include "vec.h"

namespace streamserve {

namespace {

constexpr int LINE = 4 * PANEL;  // bytes of a panel for four k
constexpr int TILE = 64;        // of K
constexpr int SMALL_GROUP = 16;  // the only group smaller than CHUNK
constexpr int BLOCK_ROWS = 96;  // maximum rows that a thread rounds at once
constexpr int AHEAD = 4096;     // distance of prefetching in bytes
constexpr int UNPACKED_K = 256;  // maximum size of groups whose 4-bit numbers are unpacked in L1
constexpr int PART = 128;       // of K that AVX2 multiplies by PART_ROWS rows before other rows, if groups are not larger
constexpr int PART_ROWS = 16;   // whose y stays in L1 with the part's weights
constexpr int ROW_GAP = 64;     // bytes between rows of x: rows do not compete for the same lines of L1
constexpr float SMALLEST = 1e-35f;  // smaller peaks count as zero: 127 / peak might not be finite

// A thread's rows of x, rounded to 8 bits by group.
class RoundedRows {
  public:
    RoundedRows(Pool& pool, int thread, const Linear& w, const Rows& x, int rows)
        : w_(w), x_(x), groups_(ceil_div(w.k_padded, w.group)), tables_(w, groups_) {
        size_t sums = size_t(rows) * PANEL, ordered = w.order ? size_t(w.k_padded) : 0;
        size_t numbers = size_t(rows) * size_t(groups_), bytes = size_t(round_up(rows, 16)) * stride();
        bool unpacks = w.bits == 4 && (w.group <= UNPACKED_K || w.path == AMX);
        size_t unpacked = unpacks ? size_t(w.group < PART ? PART : w.group) * PANEL : 0;
        size_t floats = sums + ordered + 3 * numbers;
        char* memory = pool.scratch(thread, floats * sizeof(float) + bytes + unpacked);
        unpacked_ = reinterpret_cast<uint8_t*>(memory);  // first, to be aligned to a cache line
        sums_ = reinterpret_cast<float*>(memory + unpacked);
        ordered_ = sums_ + sums;
        scales_ = ordered_ + ordered;
        row_sums_ = scales_ + numbers;
        starts_ = reinterpret_cast<int32_t*>(row_sums_ + numbers);
        x_rounded_ = reinterpret_cast<int8_t*>(starts_ + numbers);
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
#if defined(__AVX2__) && defined(__FMA__)
        if constexpr (std::is_same_v<D, Dot256>) {
            if (rows_ == 1) return row_times(panel, next);
            if (w_.bits == 8 || w_.group <= UNPACKED_K) return rows_times(panel, next);
        }
#endif
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

    // Return what is subtracted from the numbers that `add` multiplies: the symmetric weights' number for zero. `add` may
    // have subtracted 128 already.
    template <class D>
    int32_t offset_of() const {
        bool bytes = w_.bits == 8 || w_.table;
        return (w_.offsets ? 0 : bytes ? 128 : 8) - (bytes && D::signed8 ? 128 : 0);
    }

    size_t panel_bytes() const { return size_t(w_.k_padded) * size_t(PANEL * w_.bits / 8); }

    // Return a group's weights of 4 bits as bytes [k/4][64][4], unpacked once for all rows. If the group is
    // smaller than a tile, its whole tile is unpacked, for the tile's first group.
    template <class D>
    const uint8_t* unpack(int panel, int next, int g) {
        int begin = g * w_.group, rest = w_.k_padded - begin;
        if (begin % TILE == 0) unpack_tiles<D>(panel, next, begin, begin + (w_.group < rest ? w_.group : rest));
        return unpacked_ + size_t(begin % TILE / 4) * LINE;
    }

    // Unpack the tiles of K from `begin` to `end`. FETCH: prefetch weights.
    template <class D, bool FETCH = true>
    void unpack_tiles(int panel, int next, int begin, int end) {
        if (!w_.table) return unpack_tiles_by<D, FETCH>(panel, next, begin, end, [](auto numbers) { return numbers; });
        auto table = D::table(w_.table);
        unpack_tiles_by<D, FETCH>(panel, next, begin, end, [&](auto numbers) { return D::look_up(table, numbers); });
    }
    template <class D, bool FETCH, class F>
    void unpack_tiles_by(int panel, int next, int begin, int end, F&& number) {
        constexpr int HALF = TILE / 8 * LINE, LOAD = 4 * D::lanes;
        const uint8_t* weight = weights_of(panel) + size_t(begin / TILE) * HALF;
        uint8_t* to = unpacked_;
        for (int k = begin; k < end; k += TILE, to += 2 * HALF, weight += HALF) {
            const uint8_t* ahead = ahead_in(panel, next, weight);
            for (int i = 0; i < HALF; i += 64) {
                if (FETCH) __builtin_prefetch(ahead + i, 0, 2);
                UNROLLED for (int j = i; j < i + 64; j += LOAD) {
                    typename D::Bytes both = D::load(weight + j);
                    D::store(to + j, number(D::low(both)));
                    D::store(to + HALF + j, number(D::high(both)));
                }
            }
        }
    }

    // Return the weights AHEAD bytes after `weight`, to be prefetched by the first rows of a block.
    const uint8_t* ahead_of(const Block& b, const uint8_t* weight) const {
        return b.row || b.fetched ? weight : ahead_in(b.panel, b.next, weight);
    }
    const uint8_t* ahead_in(int panel, int next, const uint8_t* weight, size_t distance = AHEAD) const {
        const uint8_t* end = weights_of(panel) + panel_bytes();
        if (weight + distance < end) return weight + distance;
        size_t beyond = size_t(weight + distance - end);
        return weights_of(next) + (beyond < panel_bytes() ? beyond : 0);
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
            size_t of = size_t(row) * size_t(groups_) + size_t(g);
            scales_[of] = top / 127.0f;
            int32_t sum = total.total();
            row_sums_[of] = float(sum);
            starts_[of] = -offset_of<D>() * sum;
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
        Dot512 dot[1][Dot512::at_once];
        UNROLLED for (int i = 0; i < Dot512::at_once; i++) {
            dot[0][i] = Dot512::all(starts_[size_t(b.row) * size_t(groups_) + size_t(b.g)]);
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
                const int32_t* start = starts_ + size_t(r) * size_t(groups_) + size_t(g);
                UNROLLED for (int i = 0; i < D::at_once; i++) {
                    even[r][i] = D::all(start[0]), odd[r][i] = D::all(halves ? start[1] : 0);
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

#if defined(__AVX2__) && defined(__FMA__)
    // Do the work of `times` for one row with AVX2.
    float* row_times(int panel, int next) {
        if (w_.bits == 8) return w_.offsets ? row_bytes<true>(panel, next) : row_bytes<false>(panel, next);
        return w_.offsets ? row_halves<true>(panel, next) : row_halves<false>(panel, next);
    }

    template <bool ZEROS>
    float* row_bytes(int panel, int next) {
        const uint8_t* weight = weights_of(panel);
        for (int k = 0, g = 0; k < w_.k_padded; k += w_.group, g++) {
            int lines = (w_.group < w_.k_padded - k ? w_.group : w_.k_padded - k) / 4;
            Dot256 sums[PANEL / Dot256::lanes];
            UNROLLED for (Dot256& sum : sums) sum = Dot256::all(starts_[g]);
            RowSums::add_bytes(weight, ahead_in(panel, next, weight, RowSums::AHEAD), x_rounded_ + k, lines, sums);
            weight += lines * LINE;
            scale_group<ZEROS>(panel, next, g, [&](int i) { return sums[i]; });
        }
        return sums_;
    }

    template <bool ZEROS>
    float* row_halves(int panel, int next) {
        alignas(64) int32_t sums[TILE / SMALL_GROUP * PANEL];
        int in_tile = w_.group < TILE ? TILE / w_.group : 1, depth = w_.group < TILE ? TILE : w_.group;
        RowSums::Places places = RowSums::places(w_.group, sums);
        const uint8_t* weight = weights_of(panel);
        for (int k = 0, g = 0; k < w_.k_padded; g += in_tile) {
            for (int i = 0; i < in_tile; i++) std::fill_n(sums + i * PANEL, PANEL, starts_[g + i]);
            for (int end = depth < w_.k_padded - k ? k + depth : w_.k_padded; k < end; k += TILE) {
                add_tile(weight, ahead_in(panel, next, weight, RowSums::AHEAD), x_rounded_ + k, places);
                weight += TILE * PANEL / 2;
            }
            for (int i = 0; i < in_tile; i++) {
                const int32_t* own = sums + i * PANEL;
                scale_group<ZEROS>(panel, next, g + i, [own](int j) { return Dot256::load(own + j * Dot256::lanes); });
            }
        }
        return sums_;
    }

    void add_tile(const uint8_t* weight, const uint8_t* ahead, const int8_t* x, const RowSums::Places& places) const {
        bool small = w_.group == SMALL_GROUP;
        if (w_.table) {
            return small ? RowSums::add_indices<4>(weight, ahead, x, w_.table, places)
                         : RowSums::add_indices<8>(weight, ahead, x, w_.table, places);
        }
        return small ? RowSums::add_halves<4>(weight, ahead, x, places)
                     : RowSums::add_halves<8>(weight, ahead, x, places);
    }

    // Scale a group's integer sums of one row, and add them to y. `sums(i)` returns the sums of vector i of the columns.
    template <bool ZEROS, class Sums>
    __attribute__((always_inline)) void scale_group(int panel, int next, int g, Sums&& sums) {
        using D = Dot256;
        using V = D::V;
        V scale_of_row = V::set(scales_[g]), sum_of_row = V::set(row_sums_[g]);
        tables_.fetch(next, g);
        if (tables_.starts_level(g)) tables_.widen_level<D>(panel, g, group_scales_, group_offsets_);
        UNROLLED for (int column = 0; column < PANEL; column += D::at_once * D::lanes) {
            V s[D::at_once], m[D::at_once];
            if (w_.scale_type == SCALE_LEVELS) {
                tables_.load_numbers<D, ZEROS>(panel, g, column, group_scales_, group_offsets_, s, m);
            } else {
                tables_.load<D, ZEROS>(panel, g, column, s, m);
            }
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                float* y = sums_ + column + i * D::lanes;
                V t = scaled<D, ZEROS>(s[i], m[i], sums(column / D::lanes + i), sum_of_row);
                fused(scale_of_row, t, V::load(y)).store(y);
            }
        }
    }

    // Do the work of `times` for several rows with AVX2: a part of K by some rows, whose y then is in L1, by the next
    // rows, and so on.
    float* rows_times(int panel, int next) {
        int depth = w_.group < PART ? PART : w_.group;
        for (int begin = 0, g = 0; begin < w_.k_padded; begin += depth) {
            int end = depth < w_.k_padded - begin ? begin + depth : w_.k_padded, first = g;
            const uint8_t* weight = w_.bits == 4 ? unpacked_ : weights_of(panel) + size_t(begin / 4) * LINE;
            if (w_.bits == 4) unpack_tiles<Dot256, false>(panel, next, begin, end);
            for (int k = begin; k < end; k += w_.group, g++) take_scales<Dot256>(panel, next, g, (g - first) * PANEL);
            for (int row = 0; row < rows_; row += PART_ROWS) {
                for (int i = first; i < g; i++) {
                    group_times(panel, next, i, row, weight + size_t((i - first) * w_.group / 4) * LINE, i - first);
                }
            }
        }
        return sums_;
    }

    // Multiply up to PART_ROWS rows from `row` on by a panel's group of weights, one in each byte. `place`: where in
    // group_scales_ the group is.
    void group_times(int panel, int next, int g, int row, const uint8_t* weight, int place) {
        int begin = g * w_.group, end = w_.group < w_.k_padded - begin ? begin + w_.group : w_.k_padded;
        size_t of = size_t(row) * size_t(groups_) + size_t(g);
        RowBlock::Ahead ahead{};
        if (row == 0) ahead = ahead_of_part(panel, next, begin, end);
        RowBlock block{weight, ahead, (end - begin) / 4, x_rounded_ + size_t(row) * stride() + begin, stride(),
                       group_scales_ + place * PANEL, group_offsets_ + place * PANEL, scales_ + of, row_sums_ + of,
                       starts_ + of, size_t(groups_), sums_ + row * PANEL};
        int rows = rows_ - row < PART_ROWS ? rows_ - row : PART_ROWS;
        bool bytes = w_.bits == 8 || w_.table;
        if (w_.offsets) return bytes ? multiply_group<8, true>(block, rows) : multiply_group<4, true>(block, rows);
        return bytes ? multiply_group<8, false>(block, rows) : multiply_group<4, false>(block, rows);
    }

    // What a group from `begin` to `end` prefetches: its place in the next part, or in a large group the columns' lines.
    RowBlock::Ahead ahead_of_part(int panel, int next, int begin, int end) const {
        size_t row = size_t(PANEL * w_.bits / 8);  // bytes of a panel for one k
        const uint8_t* weight = weights_of(panel) + size_t(begin) * row;
        if (w_.bits == 8 && w_.group > PART) return {ahead_in(panel, next, weight), (end - begin) / 4, LINE};
        return {ahead_in(panel, next, weight, PART * row), int(size_t(end - begin) * row / 256), 64};
    }

    template <int BITS, bool ZEROS>
    static void multiply_group(const RowBlock& block, int rows) {
        if (block.lines < 8) return RowBlock::multiply<BITS, ZEROS, SMALL_GROUP / 4>(block, rows);
        RowBlock::multiply<BITS, ZEROS, 8>(block, rows);
    }
#endif

    // Scale a group's integer sums, and add them to y.
    template <class D, int ROWS, bool ZEROS>
    __attribute__((always_inline)) void add_scaled(int panel, int next, int g, const D (&dot)[ROWS][D::at_once],
                                                   typename D::V (&y)[ROWS][D::at_once]) {
        using V = typename D::V;
        V s[D::at_once], m[D::at_once];
        tables_.fetch(next, g);
        tables_.load<D, ZEROS>(panel, g, 0, s, m);
        UNROLLED for (int r = 0; r < ROWS; r++) {
            size_t of = size_t(r) * size_t(groups_) + size_t(g);
            V scale_of_row = V::set(scales_[of]), sum_of_row = V::set(row_sums_[of]);
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
        const int32_t* start = starts_ + size_t(b.row) * size_t(groups_) + size_t(b.g);
        typename D::Bytes table{};
        if constexpr (BITS == INDICES) table = D::table(w_.table);
        UNROLLED for (int r = 0; r < ROWS; r++, start += groups_) {
            UNROLLED for (int i = 0; i < D::at_once; i++) dot[r][i] = D::all(*start);
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

    void clear_sums() { std::memset(sums_, 0, size_t(rows_) * PANEL * sizeof *sums_); }

    // Load the scales and offsets of a panel's group, for all rows, to index `to` on. Prefetches the tables of group
    // g + 2.
    template <class D>
    void take_scales(int panel, int next, int g, int to = 0) {
        int later = g + 2 < groups_ ? g + 2 : g + 2 < 2 * groups_ ? g + 2 - groups_ : 0;
        tables_.fetch(later > g ? panel : next, later);
        for (int column = 0; column < PANEL; column += D::at_once * D::lanes) {
            typename D::V s[D::at_once], m[D::at_once];
            if (w_.offsets) {
                tables_.load<D, true>(panel, g, column, s, m);
            } else {
                tables_.load<D, false>(panel, g, column, s, m);
            }
            UNROLLED for (int i = 0; i < D::at_once; i++) {
                s[i].store(group_scales_ + to + column + i * D::lanes);
                m[i].store(group_offsets_ + to + column + i * D::lanes);
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
        const float* total = row_sums_ + of;
        UNROLLED for (int r = 0; r < ROWS; r++, y += PANEL, sx += groups, total += groups) {
            V scale_of_row = V::set(*sx), sum_of_row = V::set(*total);
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
    ScaleTables tables_;
    float *sums_, *ordered_, *scales_, *row_sums_;  // of the rows' groups: scales, and sums of the integers
    int32_t* starts_;                               // minus the weights' offset times the sum of the integers
    int8_t* x_rounded_;
    alignas(64) float group_scales_[PART / SMALL_GROUP * PANEL], group_offsets_[PART / SMALL_GROUP * PANEL];
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
