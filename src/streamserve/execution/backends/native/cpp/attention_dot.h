// The engine for processors with a dot product of bf16 pairs. Sums of up to 6 queries × 64 columns are in registers.
#pragma once

#include "attention_pairs.h"

#if defined(__AVX512BF16__) && defined(STREAMSERVE_AVX512)

namespace streamserve {

class DotEngine {
  public:
    using Weight = bf16;

    static size_t bytes(int dim) { return PairTiles::bytes(dim); }
    DotEngine(char* memory, int dim) : tiles_(memory, dim), dim_(dim) {}

    void queries(const bf16* const* from, int count) { tiles_.take_queries(from, count); }

    void tile(const KeyTile<bf16>& tile, int query_tiles, Ahead& ahead) {
        tile_ = &tile;
        ahead_ = &ahead;
        direct_ = query_tiles == 1 && dim_ % CHUNK == 0;
        tiles_.take(tile, true, !direct_, ahead);
    }

    // Write to to[query][key] the scores with the keys `from` to `until`, and with some adjacent keys.
    void scores(int first, int count, int from, int until, float* to) {
        int begin = from / 16, end = ceil_div(until, 16);
        Factors factors{tiles_.queries(first), 64, SQUARE, tiles_.key_pairs(begin), size_t(tiles_.steps) * SQUARE,
                        SQUARE, tiles_.steps};
        all(count, end - begin, factors, to + begin * 16, KEY_TILE);
    }

    // to[query][d] = the sum of weights[query][key] · value[key][d] over keys `from` to `until`; all other
    // weights must be zero. Rows are padded(dim) numbers apart.
    void values(const Weight* weights, int count, int from, int until, float* to) {
        if (direct_) return all_direct(weights, count, from / 2, ceil_div(until, 2), to);
        int begin = from / CHUNK, columns = tiles_.columns();
        Factors factors{reinterpret_cast<const char*>(weights + begin * CHUNK), KEY_TILE * 2, 64,
                        tiles_.value_pairs(begin * columns), SQUARE, size_t(columns) * SQUARE,
                        ceil_div(until, CHUNK) - begin};
        all(count, columns, factors, to, size_t(columns) * 16);
    }

  private:
    static constexpr size_t SQUARE = PairTiles::SQUARE;
    static constexpr int LINES = 16;  // cache lines that memory delivers during about one step

    // A product of rows of pairs and squares of pairs, with distances in bytes: `row` to the next row,
    // `column` to the square of the next 16 columns, `row_step` and `square_step` to the next 16 pairs.
    struct Factors {
        const char* rows;
        size_t row, row_step;
        const char* squares;
        size_t column, square_step;
        int steps;
    };

    void all(int rows, int columns, Factors f, float* to, size_t stride) {
        for (int count; rows > 0; rows -= count, f.rows += size_t(count) * f.row, to += size_t(count) * stride) {
            count = rows <= 6 ? rows : rows < 10 ? rows - rows / 2 : rows < 12 ? 5 : 6;
            Factors part = f;
            for (int i = 0, wide; i < columns; i += wide, part.squares += size_t(wide) * f.column) {
                wide = columns - i >= 4 ? 4 : 1;
                if (wide == 4) {
                    some<4>(count, part, to + i * 16, stride);
                } else {
                    some<1>(count, part, to + i * 16, stride);
                }
            }
        }
    }

    // Compute weighted sums for one tile of queries, over pairs of keys from `begin` to `end`. Values are
    // paired in registers.
    void all_direct(const Weight* weights, int rows, int begin, int end, float* to) {
        size_t stride = size_t(dim_);
        for (int count; rows > 0; rows -= count, weights += count * KEY_TILE, to += size_t(count) * stride) {
            count = rows <= 6 ? rows : rows < 10 ? rows - rows / 2 : rows < 12 ? 5 : 6;
            for (int d = 0, wide; d < dim_; d += wide * CHUNK) {
                wide = dim_ - d >= 2 * CHUNK ? 2 : 1;
                if (wide == 2) {
                    some_direct<2>(count, weights, begin, end, d, to + d);
                } else {
                    some_direct<1>(count, weights, begin, end, d, to + d);
                }
            }
        }
    }

    template <int WIDE>
    void some_direct(int rows, const Weight* weights, int begin, int end, int d, float* to) {
        switch (rows) {
            case 1: return direct<1, WIDE>(weights, begin, end, d, to);
            case 2: return direct<2, WIDE>(weights, begin, end, d, to);
            case 3: return direct<3, WIDE>(weights, begin, end, d, to);
            case 4: return direct<4, WIDE>(weights, begin, end, d, to);
            case 5: return direct<5, WIDE>(weights, begin, end, d, to);
            default: return direct<6, WIDE>(weights, begin, end, d, to);
        }
    }

    // Compute the weighted sums of ROWS queries for WIDE · 32 dimensions from `d` on.
    template <int ROWS, int WIDE>
    void direct(const Weight* weights, int begin, int end, int d, float* to) {
        const __m512i low = _mm512_loadu_si512(PAIR_ORDER), high = _mm512_loadu_si512(PAIR_ORDER + 32);
        __m512 sum[ROWS][2 * WIDE];
        UNROLLED for (int r = 0; r < ROWS; r++) {
            UNROLLED for (int i = 0; i < 2 * WIDE; i++) sum[r][i] = _mm512_setzero_ps();
        }
        for (int pair = begin; pair < end; pair++) {
            ahead_->fetch(2 * WIDE);
            const bf16* first = tile_->values[2 * pair] + d;
            bool both = 2 * pair + 1 < tile_->count;
            const bf16* second = both ? tile_->values[2 * pair + 1] + d : first;
            __m512bh column[2 * WIDE];
            UNROLLED for (int i = 0; i < WIDE; i++) {
                __m512i one = _mm512_loadu_si512(first + i * CHUNK);
                __m512i other = _mm512_maskz_loadu_epi32(both ? 0xffff : 0, second + i * CHUNK);
                column[2 * i] = (__m512bh)_mm512_permutex2var_epi16(one, low, other);
                column[2 * i + 1] = (__m512bh)_mm512_permutex2var_epi16(one, high, other);
            }
            UNROLLED for (int r = 0; r < ROWS; r++) {
                int32_t two;
                std::memcpy(&two, weights + r * KEY_TILE + 2 * pair, 4);
                __m512bh weight = (__m512bh)_mm512_set1_epi32(two);
                UNROLLED for (int i = 0; i < 2 * WIDE; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], weight, column[i]);
            }
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            UNROLLED for (int i = 0; i < 2 * WIDE; i++) _mm512_storeu_ps(to + r * dim_ + i * 16, sum[r][i]);
        }
    }

    template <int WIDE>
    void some(int rows, const Factors& f, float* to, size_t stride) {
        switch (rows) {
            case 1: return block<1, WIDE>(f, to, stride);
            case 2: return block<2, WIDE>(f, to, stride);
            case 3: return block<3, WIDE>(f, to, stride);
            case 4: return block<4, WIDE>(f, to, stride);
            case 5: return block<5, WIDE>(f, to, stride);
            default: return block<6, WIDE>(f, to, stride);
        }
    }

    template <int ROWS, int WIDE>
    void block(const Factors& f, float* to, size_t stride) {
        __m512 sum[ROWS][WIDE];
        UNROLLED for (int r = 0; r < ROWS; r++) {
            UNROLLED for (int i = 0; i < WIDE; i++) sum[r][i] = _mm512_setzero_ps();
        }
        const char *rows = f.rows, *squares = f.squares;
        for (int step = 0; step < f.steps; step++, rows += f.row_step, squares += f.square_step) {
            ahead_->fetch(LINES);
            for (int pair = 0; pair < 16; pair++) {
                __m512bh column[WIDE];
                UNROLLED for (int i = 0; i < WIDE; i++) {
                    column[i] = (__m512bh)_mm512_loadu_si512(squares + size_t(i) * f.column + pair * 64);
                }
                UNROLLED for (int r = 0; r < ROWS; r++) {
                    int32_t two;
                    std::memcpy(&two, rows + size_t(r) * f.row + pair * 4, 4);
                    __m512bh both = (__m512bh)_mm512_set1_epi32(two);
                    UNROLLED for (int i = 0; i < WIDE; i++) sum[r][i] = _mm512_dpbf16_ps(sum[r][i], both, column[i]);
                }
            }
        }
        UNROLLED for (int r = 0; r < ROWS; r++) {
            UNROLLED for (int i = 0; i < WIDE; i++) _mm512_storeu_ps(to + size_t(r) * stride + i * 16, sum[r][i]);
        }
    }

    PairTiles tiles_;
    int dim_;
    bool direct_ = false;  // whether values are paired in registers, not in memory
    const KeyTile<bf16>* tile_ = nullptr;
    Ahead* ahead_ = nullptr;
};

}  // namespace streamserve
#endif
