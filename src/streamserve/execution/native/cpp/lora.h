// LoRA adapters: what they add to linear maps, y += B (scale · A x), for the rows of a step that have one.
//
// `shrink` computes the products scale · A x of these rows, in float32; the base's product then ends in `expand`,
// which adds B · products to its float32 sums before they are rounded. So the base's weights may be of any format.
// A product is a sum in sixteen lanes over ascending K, an output one over ascending rank: a row's bits never
// depend on other rows, and AVX2, AVX512 and AVX512_BF16 give the same.
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

// What an adapter adds to a linear map, whose modules' ranks follow each other; `rank` 0: nothing. `a`
// [rank][chunks of 32 k] and `b` are of the model's type; `columns` has an entry for each 16 of the packed weight.
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

// The products of a step's rows for one linear map: [rows][stride]. Without `lora`: none of them has any.
struct LowRankProducts {
    const Lora* lora = nullptr;
    int map = 0;
    float* products = nullptr;
    int stride = 0;

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

constexpr int LOW_RANK_BLOCK = 16;  // ranks that one thread computes of some rows

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

// Products of R rows with J ranks from `rank` on.
template <class V, class T, int R, int J>
inline void shrink_tile(const LowRank& map, const Rows& x, int row, int rank, const LowRankProducts& to) {
    using Sums = LaneSums<V>;
    Sums sums[R][J];
    const T* a = static_cast<const T*>(map.a) + size_t(rank) * size_t(map.chunks) * CHUNK;
    for (int chunk = 0; chunk < map.chunks; chunk++, a += CHUNK) {
        const T* rows[R];
        for (int r = 0; r < R; r++) rows[r] = reinterpret_cast<const T*>(x.at(row + r, chunk));
        for (int k = 0; k < CHUNK; k += Sums::lanes) {
            UNROLLED for (int part = 0; part < Sums::parts; part++) {
                int lane = k + part * V::lanes;
                V numbers[R];
                UNROLLED for (int r = 0; r < R; r++) numbers[r] = V::load(rows[r] + lane);
                UNROLLED for (int j = 0; j < J; j++) {
                    V weights = V::load(a + size_t(j) * size_t(map.chunks) * CHUNK + lane);
                    UNROLLED for (int r = 0; r < R; r++) {
                        sums[r][j].part[part] = fma(weights, numbers[r], sums[r][j].part[part]);
                    }
                }
            }
        }
    }
    for (int r = 0; r < R; r++) {
        float* out = to.products + size_t(row + r) * size_t(to.stride) + rank;
        for (int j = 0; j < J; j++) out[j] = map.scales[rank + j] * sums[r][j].total();
    }
}

template <class V, class T, int R, int J>
inline void shrink_rows(const LowRank& map, const Rows& x, int row, int rank, int last, const LowRankProducts& to) {
    for (; rank + J <= last; rank += J) shrink_tile<V, T, R, J>(map, x, row, rank, to);
    for (; rank < last; rank++) shrink_tile<V, T, R, 1>(map, x, row, rank, to);
}

// Called by every thread of a job, before a barrier.
template <class V, class T>
void shrink(Pool& pool, const std::vector<LowRankUnit>& units, const Rows& x, const LowRankProducts& to) {
    int count = int(units.size()), blocks = ceil_div(to.lora->max_rank, LOW_RANK_BLOCK);
    for (int claimed; (claimed = pool.claim()) < count * blocks;) {
        LowRankUnit unit = units[size_t(claimed % count)];
        const LowRank* map = to.of(unit.row);
        int rank = claimed / count * LOW_RANK_BLOCK;
        if (!map || rank >= map->rank) continue;
        int last = map->rank < rank + LOW_RANK_BLOCK ? map->rank : rank + LOW_RANK_BLOCK;
        switch (unit.rows) {
            case 1: shrink_rows<V, T, 1, 4>(*map, x, unit.row, rank, last, to); break;
            case 2: shrink_rows<V, T, 2, 2>(*map, x, unit.row, rank, last, to); break;
            case 3: shrink_rows<V, T, 3, 2>(*map, x, unit.row, rank, last, to); break;
            default: shrink_rows<V, T, 4, 2>(*map, x, unit.row, rank, last, to); break;
        }
    }
}

// Adds B · products to sums of G times 16 columns, which need the same ranks.
template <class V, class T, int G>
inline void expand_columns(const LowRank& map, const LowRankColumns* columns, const float* products, float* sums) {
    constexpr int parts = 16 / V::lanes;
    V added[G * parts];
    UNROLLED for (V& sum : added) sum = V::set(0.0f);
    const T* b = static_cast<const T*>(map.b);
    for (int rank = 0; rank < columns->ranks; rank++) {
        V product = V::set(products[columns->first + rank]);
        UNROLLED for (int g = 0; g < G; g++) {
            const T* line = b + columns[g].offset + rank * 16;
            UNROLLED for (int part = 0; part < parts; part++) {
                V& sum = added[g * parts + part];
                sum = fma(product, V::load(line + part * V::lanes), sum);
            }
        }
    }
    UNROLLED for (int i = 0; i < G * parts; i++) {
        (V::load(sums + i * V::lanes) + added[i]).store(sums + i * V::lanes);
    }
}

// Adds what the row's adapter adds to sums of `columns` columns from `column` on, both multiples of 16.
template <class V, class T>
inline void expand(const LowRankProducts& from, int row, int column, int columns, float* sums) {
    const LowRank* map = from.of(row);
    if (!map) return;
    const float* products = from.products + size_t(row) * size_t(from.stride);
    const LowRankColumns* at = map->columns + column / 16;
    auto same = [&](int i) { return at[i].first == at->first && at[i].ranks == at->ranks; };
    for (int left = columns / 16; left > 0;) {
        if (left >= 4 && same(1) && same(2) && same(3)) {
            expand_columns<V, T, 4>(*map, at, products, sums);
            at += 4, sums += 64, left -= 4;
        } else if (left >= 2 && same(1)) {
            expand_columns<V, T, 2>(*map, at, products, sums);
            at += 2, sums += 32, left -= 2;
        } else {
            expand_columns<V, T, 1>(*map, at, products, sums);
            at += 1, sums += 16, left -= 1;
        }
    }
}

}  // namespace streamserve
