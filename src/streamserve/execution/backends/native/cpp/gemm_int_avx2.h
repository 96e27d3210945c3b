// Integer products on AVX2: of one row (RowSums) and of several rows (RowBlock).
#pragma once

#include "dot_products.h"

#if defined(__AVX2__) && defined(__FMA__)

namespace streamserve {

namespace {

// Integer sums of one row with a panel, from the panel's first byte to its last, as fast as weights are read. Registers
// hold a group's sums of 64 columns with 8 bits. With 4 bits, they would have to hold two groups' sums, of both halves of
// a byte: so a tile of 64 k is summed for 32 columns at a time, and sums over a group are in L1.
struct RowSums {
    using D = Dot256;
    static constexpr int LINE = 4 * PANEL;  // bytes of a panel for four k
    static constexpr int AHEAD = 2048;      // distance of prefetching in bytes

    // Where the sums of a tile's groups are: [groups of the tile][64]. Groups of whole tiles have one entry.
    struct Places {
        int32_t* sums;
        int half, run;  // distances between the tile's halves of K, and in groups of 16 between the groups of a half

        int32_t* at(int of_half, int of_run) const { return sums + of_half * half + of_run * run; }
    };

    static Places places(int group, int32_t* sums) {
        if (group == 16) return {sums, 2 * PANEL, PANEL};
        return {sums, group == 32 ? PANEL : 0, 0};
    }

    // Add a tile of 4-bit numbers to the sums. RUN: lines with the same sums, 8 or 4. `ahead`: weights to prefetch.
    template <int RUN>
    static void add_halves(const uint8_t* weight, const uint8_t* ahead, const int8_t* x, const Places& places) {
        for (int column = 0; column < PANEL; column += 32, weight += LINE / 2) {
            for (int run = 0; run < 8 / RUN; run++) {
                D::Run<4> low[4], high[4];
                const uint8_t *at = weight + run * RUN * LINE, *later = ahead + run * RUN * LINE;
#pragma GCC unroll 8
                for (int j = 0; j < RUN; j++, at += LINE, later += LINE) {
                    const int8_t* four = x + 4 * (run * RUN + j);
                    auto x_low = D::broadcast(four), x_high = D::broadcast(four + 32);
                    if (column == 0) fetch_line(later);
                    UNROLLED for (int i = 0; i < 4; i++) {
                        D::Bytes both = D::load(at + 32 * i);
                        if (j == 0) {
                            low[i] = D::Run<4>::of(D::low(both), x_low), high[i] = D::Run<4>::of(D::high(both), x_high);
                        } else {
                            low[i].add(D::low(both), x_low), high[i].add(D::high(both), x_high);
                        }
                    }
                }
                add_to(places.at(0, run) + column, low);
                add_to(places.at(1, run) + column, high);
            }
        }
    }

    // Add a tile of indices of a table.
    template <int RUN>
    static void add_indices(const uint8_t* weight, const uint8_t* ahead, const int8_t* x, const uint8_t* table,
                            const Places& places) {
        D::Bytes numbers = D::table(table);
        for (int column = 0; column < PANEL; column += 32, weight += LINE / 2) {
            for (int run = 0; run < 8 / RUN; run++) {
                D::Run<8> low[4], high[4];
                const uint8_t *at = weight + run * RUN * LINE, *later = ahead + run * RUN * LINE;
                for (int j = 0; j < RUN; j++, at += LINE, later += LINE) {
                    const int8_t* four = x + 4 * (run * RUN + j);
                    auto x_low = D::broadcast(four), x_high = D::broadcast(four + 32);
                    if (column == 0) fetch_line(later);
                    UNROLLED for (int i = 0; i < 4; i++) {
                        D::Bytes both = D::load(at + 32 * i);
                        low[i].add(D::look_up(numbers, D::low(both)), x_low);
                        high[i].add(D::look_up(numbers, D::high(both)), x_high);
                    }
                }
                add_to(places.at(0, run) + column, low);
                add_to(places.at(1, run) + column, high);
            }
        }
    }

    // Add a group's `lines` lines of 8-bit numbers to its sums, which are in registers.
    static __attribute__((always_inline)) void add_bytes(const uint8_t* weight, const uint8_t* ahead, const int8_t* x,
                                                         int lines, D (&sums)[PANEL / D::lanes]) {
        for (int line = 0; line < lines; line++, weight += LINE, ahead += LINE, x += 4) {
            auto four = D::broadcast(x);
            fetch_line(ahead);
            UNROLLED for (int i = 0; i < 8; i++) sums[i].add<8>(D::load(weight + 32 * i), four);
        }
    }

  private:
    // Lines are prefetched in order, also where columns are not read in order: on Zen 3, weights of 4 bits are then read
    // from memory at 22 GB/s by one thread, otherwise at 12.
    static void fetch_line(const uint8_t* ahead) {
        UNROLLED for (int i = 0; i < LINE; i += 64) __builtin_prefetch(ahead + i);
    }

    template <int COUNT, class S>
    static void add_to(int32_t* to, const S (&sums)[COUNT]) {
        UNROLLED for (int i = 0; i < COUNT; i++) {
            D all = sums[i].total();
            all.plus(D::load(to + 8 * i));
            all.store(to + 8 * i);
        }
    }
};

// Products of rows with a panel over a group of K. Sixteen registers hold the sums of four rows and 16 columns.
struct RowBlock {
    using D = Dot256;
    using V = Vec256;
    static constexpr int LINE = 4 * PANEL, ROWS = 4, VECTORS = 2, COLUMNS = 8 * VECTORS;

    // Weights to prefetch: for each 16 columns, `count` cache lines that are `step` bytes apart.
    struct Ahead {
        const uint8_t* weight;
        int count, step;
        void fetch(int column) const {
            int first = column / COLUMNS * (step == 64 ? count * 64 : 64);
            for (int i = 0; i < count; i++) __builtin_prefetch(weight + first + i * step, 0, 2);
        }
    };

    const uint8_t* weight;  // the group's lines of numbers, one in each byte
    Ahead ahead;
    int lines;
    const int8_t* x;
    size_t stride;                       // bytes between rows of x
    const float *scales, *offsets;       // of the columns
    const float *row_scales, *row_sums;  // of the rows, `groups` numbers apart, as are the starts
    const int32_t* starts;               // minus the weights' offset times the sum of the row's integers
    size_t groups;
    float* y;  // [rows][PANEL]

    // Multiply, scale, and add to y. BITS: 8, or 4 for numbers up to 15. RUN: lines of a run, which divide `lines`.
    template <int BITS, bool ZEROS, int RUN>
    static void multiply(const RowBlock& whole, int rows) {
        for (int column = 0; column < PANEL; column += COLUMNS) {
            RowBlock b = whole;
            b.weight += column * 4, b.scales += column, b.offsets += column, b.y += column;
            b.ahead.fetch(column);
            int left = rows;
            for (; left >= ROWS; left -= ROWS, b.advance()) b.some<BITS, ZEROS, RUN, ROWS>();
            if (left == 3) b.some<BITS, ZEROS, RUN, 3>();
            if (left == 2) b.some<BITS, ZEROS, RUN, 2>();
            if (left == 1) b.some<BITS, ZEROS, RUN, 1>();
        }
    }

  private:
    void advance() {
        x += ROWS * stride, y += ROWS * PANEL;
        row_scales += ROWS * groups, row_sums += ROWS * groups, starts += ROWS * groups;
    }

    template <int BITS, bool ZEROS, int RUN, int COUNT>
    __attribute__((always_inline)) void some() const {
        D dot[COUNT][VECTORS];
        run<BITS, RUN, COUNT>(weight, x, dot);
        for (int line = RUN; line < lines; line += RUN) {
            asm("" : "+m"(dot));  // in memory: the registers are for the sums of the run
            D more[COUNT][VECTORS];
            run<BITS, RUN, COUNT>(weight + line * LINE, x + 4 * line, more);
            UNROLLED for (int r = 0; r < COUNT; r++) {
                UNROLLED for (int i = 0; i < VECTORS; i++) dot[r][i].plus(more[r][i]);
            }
        }
        scale<BITS, ZEROS, COUNT>(dot);
    }

    template <int BITS, int RUN, int COUNT>
    __attribute__((always_inline)) void run(const uint8_t* at, const int8_t* four, D (&dot)[COUNT][VECTORS]) const {
        D::Run<BITS> sums[COUNT][VECTORS];
        UNROLLED for (int line = 0; line < RUN; line++) {
            D::Bytes w[VECTORS];
            UNROLLED for (int i = 0; i < VECTORS; i++) w[i] = D::load(at + line * LINE + 32 * i);
            UNROLLED for (int r = 0; r < COUNT; r++) {
                auto x_four = D::broadcast(four + size_t(r) * stride + 4 * line);
                UNROLLED for (int i = 0; i < VECTORS; i++) {
                    if (line == 0) {
                        sums[r][i] = D::Run<BITS>::of(w[i], x_four);
                    } else {
                        sums[r][i].add(w[i], x_four);
                    }
                }
            }
        }
        UNROLLED for (int r = 0; r < COUNT; r++) {
            UNROLLED for (int i = 0; i < VECTORS; i++) dot[r][i] = sums[r][i].total();
        }
    }

    template <int BITS, bool ZEROS, int COUNT>
    __attribute__((always_inline)) void scale(D (&dot)[COUNT][VECTORS]) const {
        UNROLLED for (int r = 0; r < COUNT; r++) {
            size_t of = size_t(r) * groups;
            V scale_of_row = V::set(row_scales[of]), sum_of_row = V::set(ZEROS ? row_sums[of] : 0.0f);
            UNROLLED for (int i = 0; i < VECTORS; i++) {
                float* to = y + r * PANEL + 8 * i;
                if constexpr (BITS == 8 || !ZEROS) dot[r][i].plus(D::all(starts[of]));
                V s = V::load(scales + 8 * i), t = s * dot[r][i].floats();
                if constexpr (ZEROS) t = fused(s, dot[r][i].floats(), V::load(offsets + 8 * i) * sum_of_row);
                fused(scale_of_row, t, V::load(to)).store(to);
            }
        }
    }
};

}  // namespace

}  // namespace streamserve

#endif
