// Products with AMX of many rows: blocks of rows × columns, as large as a core's L2 cache holds.
//
//                     columns of a unit: up to 4 pairs of column tiles
//                   ┌────┬────┬────┬────┐
//                   │pair│pair│pair│pair│  weights: in L2, prefetched while the previous unit is multiplied
//                   └────┴────┴────┴────┘
//   strip of 32  ▒▒   cc                    a strip of x is multiplied by all pairs before the next strip;
//   strip of 32  ▒▒   cc                    2 × 2 tile registers hold sums over all of K or, where K is large,
//   …            ▒▒                         over a part of it: then sums are stored and loaded between parts
//
// The sums of a pair become results, row by row, between the multiplications of the next pair: the vector
// units work at the same time as the tile multiplier.
#include "elementwise.h"

#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
#include <immintrin.h>

namespace streamserve {

namespace {

constexpr size_t TILE = 1024;
constexpr int STRIP = 32, PAIR = 32;  // rows and columns of the sums in registers
constexpr int PAIRS = 4;              // maximum pairs of a unit
constexpr int FEW_PAIRS = 2;          // maximum with up to FEW_ROWS rows: small units let threads end together
constexpr int FEW_ROWS = 64;
constexpr int WHOLE = 40;             // up to this number of chunks, K is not divided
constexpr int PART = 32;              // maximum chunks of a part of K
constexpr int MAX_ROWS = 256;         // maximum rows of a block

// Sums that have not yet become results.
struct Pending {
    float* sums = nullptr;
    int row = 0, rows = 0, column = 0, columns = 0;
};

// Weight tiles to prefetch: for each pair, a part of the streams of its two column tiles.
struct Next {
    const char* tiles = nullptr;
    int pairs = 0;
};

class Blocks {
  public:
    Blocks(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows, const Finish& finish)
        : linear_(linear), x_(x), finish_(finish), rows_(rows), paired_(finish.kind == Finish::GATE_MUL),
          chunks_(linear.k_padded / CHUNK), stream_(size_t(chunks_) * TILE) {
        depth_ = chunks_ <= WHOLE ? chunks_ : ceil_div(chunks_, ceil_div(chunks_, PART));
        at_once_ = round_up(ceil_div(rows, ceil_div(rows, MAX_ROWS)), STRIP);
        int steps = linear.n_padded / PAIR / step(), max_pairs = rows > FEW_ROWS ? PAIRS : FEW_PAIRS;
        groups_ = round_up(ceil_div(steps * step(), max_pairs), pool.threads());
        if (groups_ > steps) groups_ = steps;
        size_t floats = depth_ < chunks_ ? size_t(MAX_ROWS) * PAIRS * PAIR : size_t(2) * STRIP * PANEL;
        sums_ = reinterpret_cast<float*>(pool.scratch(thread, floats * sizeof(float)));
    }

    int units() const { return groups_ * ceil_div(rows_, at_once_); }

    // Compute unit `unit`. `next`: the thread's next unit, whose weights are prefetched; it may not exist.
    void run(int unit, int next) {
        int begin = begin_of(unit % groups_), end = begin_of(unit % groups_ + 1);
        int first = unit / groups_ * at_once_, last = rows_ < first + at_once_ ? rows_ : first + at_once_;
        for (int from = 0; from < chunks_; from += depth_) {
            int until = chunks_ < from + depth_ ? chunks_ : from + depth_;
            Next prefetch;
            if (until < chunks_) {
                prefetch = {weight(begin) + size_t(until) * TILE, end - begin};
            } else if (next < units()) {
                int other = begin_of(next % groups_);
                prefetch = {weight(other), begin_of(next % groups_ + 1) - other};
            }
            part(begin, end, first, last, from, until, prefetch);
        }
        flush();
    }

  private:
    int step() const { return paired_ ? 2 : 1; }
    int begin_of(int group) const {
        return int(int64_t(linear_.n_padded / PAIR / step()) * group / groups_) * step();
    }
    const char* weight(int pair) const {
        return static_cast<const char*>(linear_.weight) + size_t(pair) * 2 * stream_;
    }

    void part(int begin, int end, int first, int last, int from, int until, const Next& prefetch) {
        int strips = ceil_div(last - first, STRIP);
        size_t share = size_t(ceil_div(16, strips)) * 64;  // bytes of a stream prefetched in each step
        for (int row = first, strip = 0; row < last; row += STRIP, strip++) {
            int count = last - row < STRIP ? last - row : STRIP;
            for (int pair = begin; pair < end; pair++) {
                int place = pair - begin;
                fetch_ = place < prefetch.pairs && strip * share < TILE ? share : 0;
                fetched_ = prefetch.tiles + size_t(place) * 2 * stream_ + size_t(strip * (until - from)) * share;
                float* own = place_of(strip, place);
                pair_of(pair, row, count, from, until, own);
                if (until < chunks_) continue;
                if (!paired_) {
                    flush();
                    pending_ = {own, row, count, pair * PAIR, PAIR};
                } else if (place % 2) {
                    flush();
                    pending_ = {own - PAIR, row, count, (pair - 1) * PAIR, PANEL};
                }
            }
        }
    }

    // Return the buffer of a pair's sums: one of two buffers alternately or, if K is divided, a buffer for
    // each strip and pair.
    float* place_of(int strip, int place) {
        if (depth_ < chunks_) {
            return sums_ + size_t(strip * PAIRS / 2 + place / 2) * STRIP * PANEL + place % 2 * PAIR;
        }
        if (!paired_ || place % 2 == 0) turn_ ^= 1;
        return sums_ + size_t(turn_) * STRIP * PANEL + (paired_ ? place % 2 * PAIR : 0);
    }

    // Do work during step k of a multiplication: prefetch, and finish a row.
    void interleave(int k) {
        const char* at = fetched_ + size_t(k) * fetch_;
        for (size_t line = 0; line < fetch_; line += 64) {
            _mm_prefetch(at + line, _MM_HINT_T1);
            _mm_prefetch(at + stream_ + line, _MM_HINT_T1);
        }
        if (pending_.rows) finish_row();
    }

    void finish_row() {
        end_row<Vec512, bf16>(linear_, finish_, pending_.row, pending_.column, pending_.columns,
                              pending_.sums);
        pending_.sums += PANEL;
        pending_.row++;
        pending_.rows--;
    }

    void flush() {
        while (pending_.rows) finish_row();
    }

    void pair_of(int pair, int row, int rows, int from, int until, float* sums) {
        const char *a = x_.at(row, from), *b = weight(pair) + size_t(from) * TILE;
        if (rows > ROW_TILE) {
            two_by_two(a, b, until - from, from > 0, sums);
        } else {
            one_by_two(a, b, until - from, from > 0, sums);
        }
    }

    void two_by_two(const char* a, const char* b, int depth, bool resume, float* sums) {
        float* below = sums + 16 * PANEL;
        if (resume) {
            _tile_loadd(0, sums, PANEL * 4);
            _tile_loadd(1, sums + 16, PANEL * 4);
            _tile_loadd(2, below, PANEL * 4);
            _tile_loadd(3, below + 16, PANEL * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int k = 0; k < depth; k++, a += TILE, b += TILE) {
            _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + stream_, 64);
            _tile_dpbf16ps(1, 4, 7);
            _tile_loadd(5, a + x_.tile_stride, 64);
            _tile_dpbf16ps(2, 5, 6);
            _tile_dpbf16ps(3, 5, 7);
            interleave(k);
        }
        _tile_stored(0, sums, PANEL * 4);
        _tile_stored(1, sums + 16, PANEL * 4);
        _tile_stored(2, below, PANEL * 4);
        _tile_stored(3, below + 16, PANEL * 4);
    }

    void one_by_two(const char* a, const char* b, int depth, bool resume, float* sums) {
        if (resume) {
            _tile_loadd(0, sums, PANEL * 4);
            _tile_loadd(1, sums + 16, PANEL * 4);
        } else {
            _tile_zero(0);
            _tile_zero(1);
        }
        for (int k = 0; k < depth; k++, a += TILE, b += TILE) {
            _tile_loadd(4, a, 64);
            _tile_loadd(6, b, 64);
            _tile_dpbf16ps(0, 4, 6);
            _tile_loadd(7, b + stream_, 64);
            _tile_dpbf16ps(1, 4, 7);
            interleave(k);
        }
        _tile_stored(0, sums, PANEL * 4);
        _tile_stored(1, sums + 16, PANEL * 4);
    }

    const Linear& linear_;
    const Rows& x_;
    const Finish& finish_;
    int rows_;
    bool paired_;
    int chunks_;
    size_t stream_;  // bytes of a column tile's weights
    int depth_, at_once_, groups_, turn_ = 0;
    float* sums_;
    Pending pending_;
    const char* fetched_ = nullptr;
    size_t fetch_ = 0;
};

}  // namespace

void multiply_blocks(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                     const Finish& finish) {
    Blocks blocks(pool, thread, linear, x, rows, finish);
    for (int unit = pool.claim(), next; unit < blocks.units(); unit = next) {
        next = pool.claim();
        blocks.run(unit, next);
    }
}

}  // namespace streamserve

#else

namespace streamserve {
void multiply_blocks(Pool&, int, const Linear&, const Rows&, int, const Finish&) {}
}  // namespace streamserve

#endif
