// The engine for processors with a dot product of bf16 pairs: sums of up to 6 queries × 64 columns in registers.
#pragma once

#include "attention_pairs.h"

#if defined(__AVX512BF16__) && defined(STREAMSERVE_AVX512)

namespace streamserve {

class DotEngine {
  public:
    using Weight = bf16;

    static size_t bytes(int dim) { return PairTiles::bytes(dim); }
    DotEngine(char* memory, int dim) : tiles_(memory, dim) {}

    void queries(const bf16* const* from, int count) { tiles_.take_queries(from, count); }

    void tile(const KeyTile<bf16>& tile, int, Ahead& ahead) {
        ahead_ = &ahead;
        tiles_.take(tile, true, ahead);
    }

    // Scores with the keys `from` to `until`, and some adjacent ones, to to[query][key].
    void scores(int first, int count, int from, int until, float* to) {
        int begin = from / 16, end = ceil_div(until, 16);
        Factors factors{tiles_.queries(first), 64, SQUARE, tiles_.key_pairs(begin), size_t(tiles_.steps) * SQUARE,
                        SQUARE, tiles_.steps};
        all(count, end - begin, factors, to + begin * 16, KEY_TILE);
    }

    // to[query][d] = the sum of weights[query][key] · value[key][d] over keys `from` to `until`, the others'
    // weights being zero; rows padded(dim) apart.
    void values(const Weight* weights, int count, int from, int until, float* to) {
        int begin = from / CHUNK, columns = tiles_.columns();
        Factors factors{reinterpret_cast<const char*>(weights + begin * CHUNK), KEY_TILE * 2, 64,
                        tiles_.value_pairs(begin * columns), SQUARE, size_t(columns) * SQUARE,
                        ceil_div(until, CHUNK) - begin};
        all(count, columns, factors, to, size_t(columns) * 16);
    }

  private:
    static constexpr size_t SQUARE = PairTiles::SQUARE;
    static constexpr int LINES = 16;  // that memory delivers in about a step

    // Rows of pairs times squares of pairs: distances in bytes to the next row, to the next column of 16, and to
    // the next step of 16 pairs in both.
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
    Ahead* ahead_ = nullptr;
};

}  // namespace streamserve
#endif
