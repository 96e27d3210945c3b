// LoRA adapters: what they add to linear maps, y += B (scale · A x), for the rows of a step that have one.
//
// Before a product of the base, `shrink` computes scale · A x of these rows and `expand` B times that, both in
// float32; where the product ends it is added to its float32 sums before they are rounded. So the base's weights may
// be of any format. A product with A is a sum in sixteen lanes over ascending K, one with B a sum over ascending
// rank: a row's bits never depend on other rows, and AVX2, AVX512 and AVX512_BF16 give the same. Many adapters of a
// row each are read from memory once a step: A and B lie in the order in which they are read.
#pragma once

#include <vector>

#include "common.h"
#include "pool.h"
#include "vec.h"

namespace streamserve {

// The ranks that sixteen columns of a packed weight need: `ranks` from `first` on, in `b` [ranks][16] from number
// `offset` on.
struct LowRankColumns {
    int64_t offset;
    int32_t first, ranks;
};

// What an adapter adds to a linear map, whose modules' ranks follow each other; `rank`, an even number: 0 for
// nothing. `a` [rank / 2][chunks][2][32 k] and `b` are of the model's type; `columns` has an entry for each 16 of the
// packed weight.
struct LowRank {
    const void *a, *b;
    const float* scales;
    const LowRankColumns* columns;
    int32_t rank, chunks;
};

enum LoraMap { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_MAPS };

// The adapters of a step, whose maps are [layers][LORA_MAPS], of `max_rank` at most. `adapter_of` [rows]: which one
// a row has; -1: none.
struct Lora {
    const LowRank* const* adapters;
    const int32_t* adapter_of;
    int32_t count, max_rank;
};

// What is added to the rows of a step for one linear map: `products` with A [rows][stride], and `added` to the outputs
// [rows][width]. Without `lora`: nothing to any row.
struct LowRankProducts {
    const Lora* lora = nullptr;
    int map = 0;
    float* products = nullptr;
    int stride = 0;
    float* added = nullptr;
    int width = 0;

    const LowRank* of(int row) const {
        int adapter = lora->adapter_of[row];
        const LowRank* own = adapter < 0 ? nullptr : &lora->adapters[adapter][map];
        return own && own->rank ? own : nullptr;
    }
    bool any() const {
        for (int i = 0; i < lora->count; i++) {
            if (lora->adapters[i][map].rank) return true;
        }
        return false;
    }
};

// Up to four adjacent rows with the same adapter.
struct LowRankUnit {
    int row, rows;
};

constexpr int LOW_RANK_BLOCK = 16;      // ranks, and
constexpr int LOW_RANK_COLUMNS = 512;  // columns, that one thread computes of some rows

inline std::vector<LowRankUnit> low_rank_units(const Lora& lora, int rows) {
    std::vector<LowRankUnit> units;
    for (int row = 0; row < rows; row++) {
        if (lora.adapter_of[row] < 0) continue;
        bool joins = !units.empty() && units.back().row + units.back().rows == row && units.back().rows < 4 &&
                     lora.adapter_of[row] == lora.adapter_of[row - 1];
        if (joins) {
            units.back().rows++;
        } else {
            units.push_back({row, 1});
        }
    }
    return units;
}

// Products of R rows with two ranks from `rank` on.
template <class V, class T, int R>
inline void shrink_pair(const LowRank& map, const Rows& x, int row, int rank, const LowRankProducts& to) {
    using Sums = LaneSums<V>;
    Sums sums[R][2];
    const char* rows[R];
    for (int r = 0; r < R; r++) rows[r] = x.at(row + r, 0);
    const T* a = static_cast<const T*>(map.a) + size_t(rank) * size_t(map.chunks) * CHUNK;
    for (int chunk = 0; chunk < map.chunks; chunk++, a += 2 * CHUNK) {
        UNROLLED for (int k = 0; k < CHUNK; k += Sums::lanes) {
            UNROLLED for (int part = 0; part < Sums::parts; part++) {
                int lane = k + part * V::lanes;
                V first = V::load(a + lane), second = V::load(a + CHUNK + lane);
                UNROLLED for (int r = 0; r < R; r++) {
                    V numbers = V::load(reinterpret_cast<const T*>(rows[r]) + lane);
                    sums[r][0].part[part] = fma(first, numbers, sums[r][0].part[part]);
                    sums[r][1].part[part] = fma(second, numbers, sums[r][1].part[part]);
                }
            }
        }
        for (int r = 0; r < R; r++) rows[r] += x.chunk_stride;
    }
    for (int r = 0; r < R; r++) {
        float* out = to.products + size_t(row + r) * size_t(to.stride) + rank;
        for (int j = 0; j < 2; j++) out[j] = map.scales[rank + j] * sums[r][j].total();
    }
}

template <class V, class T, int R>
inline void shrink_rows(const LowRank& map, const Rows& x, int row, int rank, const LowRankProducts& to) {
    int last = map.rank < rank + LOW_RANK_BLOCK ? map.rank : rank + LOW_RANK_BLOCK;
    for (; rank < last; rank += 2) shrink_pair<V, T, R>(map, x, row, rank, to);
}

// B times the products of R rows, of G times 16 columns that need the same ranks.
template <class V, class T, int R, int G>
inline void expand_columns(const LowRank& map, int row, int group, const LowRankProducts& to) {
    constexpr int parts = 16 / V::lanes;
    const LowRankColumns* columns = map.columns + group;
    const T* b = static_cast<const T*>(map.b);
    const float* products = to.products + size_t(row) * size_t(to.stride) + columns->first;
    V sums[R][G * parts];
    for (auto& own : sums) {
        UNROLLED for (V& sum : own) sum = V::set(0.0f);
    }
    for (int rank = 0; rank < columns->ranks; rank++) {
        V weights[G * parts];
        UNROLLED for (int i = 0; i < G * parts; i++) {
            weights[i] = V::load(b + columns[i / parts].offset + rank * 16 + i % parts * V::lanes);
        }
        UNROLLED for (int r = 0; r < R; r++) {
            V product = V::set(products[r * to.stride + rank]);
            UNROLLED for (int i = 0; i < G * parts; i++) sums[r][i] = fma(product, weights[i], sums[r][i]);
        }
    }
    for (int r = 0; r < R; r++) {
        float* out = to.added + size_t(row + r) * size_t(to.width) + group * 16;
        for (int i = 0; i < G * parts; i++) sums[r][i].store(out + i * V::lanes);
    }
}

template <class V, class T, int R>
inline void expand_rows(const LowRank& map, int row, int column, const LowRankProducts& to) {
    int last = (to.width < column + LOW_RANK_COLUMNS ? to.width : column + LOW_RANK_COLUMNS) / 16;
    for (int group = column / 16; group < last;) {
        const LowRankColumns &own = map.columns[group], &next = map.columns[group + 1];
        if (V::lanes == 16 && group + 1 < last && own.first == next.first && own.ranks == next.ranks) {
            expand_columns<V, T, R, 2>(map, row, group, to);
            group += 2;
        } else {
            expand_columns<V, T, R, 1>(map, row, group, to);
            group += 1;
        }
    }
}

// Calls f with each unit and its map, for `blocks` blocks of work; a block of all units follows another. Called by
// every thread of a job.
template <class F>
inline void for_units(Pool& pool, const std::vector<LowRankUnit>& units, const LowRankProducts& to, int blocks,
                      F&& f) {
    int count = int(units.size());
    for (int claimed; (claimed = pool.claim()) < count * blocks;) {
        const LowRankUnit& unit = units[size_t(claimed % count)];
        if (const LowRank* map = to.of(unit.row)) f(unit, *map, claimed / count);
    }
}

// Computes what is added to the rows, in two passes with a barrier after each. Called by every thread of a job.
template <class V, class T>
void compute_products(Pool& pool, const std::vector<LowRankUnit>& units, const Rows& x, const LowRankProducts& to) {
    for_units(pool, units, to, ceil_div(to.lora->max_rank, LOW_RANK_BLOCK), [&](auto unit, auto& map, int block) {
        int rank = block * LOW_RANK_BLOCK;
        if (rank >= map.rank) return;
        switch (unit.rows) {
            case 1: return shrink_rows<V, T, 1>(map, x, unit.row, rank, to);
            case 2: return shrink_rows<V, T, 2>(map, x, unit.row, rank, to);
            case 3: return shrink_rows<V, T, 3>(map, x, unit.row, rank, to);
            default: return shrink_rows<V, T, 4>(map, x, unit.row, rank, to);
        }
    });
    pool.barrier();
    for_units(pool, units, to, ceil_div(to.width, LOW_RANK_COLUMNS), [&](auto unit, auto& map, int block) {
        int column = block * LOW_RANK_COLUMNS;
        switch (unit.rows) {
            case 1: return expand_rows<V, T, 1>(map, unit.row, column, to);
            case 2: return expand_rows<V, T, 2>(map, unit.row, column, to);
            case 3: return expand_rows<V, T, 3>(map, unit.row, column, to);
            default: return expand_rows<V, T, 4>(map, unit.row, column, to);
        }
    });
    pool.barrier();
}

// Adds what the row's adapter adds to sums of `columns` columns from `column` on, both multiples of 16.
template <class V>
inline void add_products(const LowRankProducts& from, int row, int column, int columns, float* sums) {
    if (!from.of(row)) return;
    const float* added = from.added + size_t(row) * size_t(from.width) + column;
    for (int i = 0; i < columns; i += V::lanes) (V::load(sums + i) + V::load(added + i)).store(sums + i);
}

}  // namespace streamserve
