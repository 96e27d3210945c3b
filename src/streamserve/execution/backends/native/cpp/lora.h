// LoRA adapters: y += B (scale · A x) in linear maps, for the rows of a step that have an adapter.
//
// Before a product of the base, `shrink` computes the products scale · A x of these rows in float32. When a
// range of the base's columns is complete, `expand` adds B times the products to its float32 sums, before
// they are rounded. So the base's weights may have any format.
//
// A product with A is a sum in sixteen lanes over ascending K; a product with B is a sum over ascending rank.
// So a row's bits do not depend on other rows, and AVX2, AVX512 and AVX512_BF16 give the same bits.
//
// With many adapters, of one row each, all adapters are read from memory once in a step: A and B lie in the
// order in which they are read, and are prefetched to L2 while the base is multiplied.
#pragma once

#include <tuple>
#include <utility>
#include <vector>

#include "common.h"
#include "pool.h"
#include "vec.h"

namespace streamserve {

// The ranks that sixteen columns of a packed weight need: `ranks` ranks from `first` on. Their numbers
// [ranks][16] are in `b` from index `offset` on.
struct LowRankColumns {
    int64_t offset;
    int32_t first, ranks;
};
ABI_STRUCT(LowRankColumns, ABI_FIELD(offset), ABI_FIELD(first), ABI_FIELD(ranks));

// An adapter's matrices for a linear map. The ranks of the map's modules follow each other. `rank` is their
// total, an even number, or 0 if the adapter does not change the map. `a` [rank / 2][chunks][2][32 k] and `b`
// are of the model's type. `columns` has an entry for each 16 columns of the packed weight.
struct LowRank {
    const void *a, *b;
    const float* scales;
    const LowRankColumns* columns;
    int32_t rank, chunks;
};
ABI_STRUCT(LowRank, ABI_FIELD(a), ABI_FIELD(b), ABI_FIELD(scales), ABI_FIELD(columns), ABI_FIELD(rank),
           ABI_FIELD(chunks));

enum LoraMap { LORA_QKV, LORA_OUT, LORA_GATE_UP, LORA_DOWN, LORA_MAPS };

// The adapters of a step; each has maps [layers][LORA_MAPS] of up to `max_rank`. `adapter_of` [rows]: the
// adapter of each row; -1: none.
struct Lora {
    const LowRank* const* adapters;
    const int32_t* adapter_of;
    int32_t count, max_rank;
};
ABI_STRUCT(Lora, ABI_FIELD(adapters), ABI_FIELD(adapter_of), ABI_FIELD(count), ABI_FIELD(max_rank));

// Cache lines to prefetch to L2 during a computation, a few at a time: many at once would delay the
// computation's loads.
class Lines {
  public:
    void clear() {
        ranges_.clear();
        number_ = 0;
        at_ = end_ = nullptr;
    }
    void add(const void* from, size_t bytes) {
        const char* at = static_cast<const char*>(from);
        if (!ranges_.empty() && ranges_.back().second == at) {
            ranges_.back().second += bytes;
        } else if (bytes) {
            ranges_.push_back({at, at + bytes});
        }
    }
    // Prefetch the next line. Return whether there was a line.
    bool fetch_one() {
        if (at_ >= end_) {
            if (number_ == ranges_.size()) return false;
            std::tie(at_, end_) = ranges_[number_++];
        }
        __builtin_prefetch(at_, 0, 2);
        at_ += 64;
        return true;
    }
    void fetch_rest() {
        while (fetch_one()) {}
    }

  private:
    std::vector<std::pair<const char*, const char*>> ranges_;
    size_t number_ = 0;
    const char *at_ = nullptr, *end_ = nullptr;
};

// The adapters' part of one linear map: B times `products` [rows][stride] is added to the rows of a step. `map`: its
// number; `next`: the number of the next map, -1 if there is none. Without `lora`, nothing is added to any row.
struct LowRankProducts {
    const Lora* lora = nullptr;
    int map = 0, next = -1;
    float* products = nullptr;
    int stride = 0;
    int number = 0;  // bytes of a number in A and B

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
    // Write to `lines` the cache lines of B that `columns` columns from `column` on need, and columns / width
    // of the next map's A.
    void ahead(int column, int columns, int width, Lines& lines) const;
};

// Up to four adjacent rows with the same adapter.
struct LowRankUnit {
    int row, rows;
};

constexpr int LOW_RANK_BLOCK = 16;  // ranks of a unit of work

inline void LowRankProducts::ahead(int column, int columns, int width, Lines& lines) const {
    lines.clear();
    for (int i = 0; lora && i < lora->count; i++) {
        const LowRank& own = lora->adapters[i][map];
        for (int group = column / 16; own.rank && group < (column + columns) / 16; group++) {
            const LowRankColumns& at = own.columns[group];
            lines.add(static_cast<const char*>(own.b) + at.offset * number, size_t(at.ranks * 16 * number));
        }
    }
    for (int i = 0; lora && next >= 0 && i < lora->count; i++) {
        const LowRank& after = lora->adapters[i][next];
        int64_t count = int64_t(after.rank) * after.chunks * CHUNK * number / 64;
        int64_t first = count * column / width, last = count * (column + columns) / width;
        lines.add(static_cast<const char*>(after.a) + first * 64, size_t(last - first) * 64);
    }
}

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

// Compute the products of R rows with P pairs of ranks from `rank` on. The following pairs are prefetched meanwhile.
template <class V, class T, int R, int P>
inline void shrink_pairs(const LowRank& map, const Rows& x, int row, int rank, const LowRankProducts& to) {
    using Sums = LaneSums<V>;
    Sums sums[R][2 * P];
    const char* rows[R];
    for (int r = 0; r < R; r++) rows[r] = x.at(row + r, 0);
    size_t pair = 2 * size_t(map.chunks) * CHUNK;
    const T* a = static_cast<const T*>(map.a) + size_t(rank / 2) * pair;
    for (int chunk = 0; chunk < map.chunks; chunk++, a += 2 * CHUNK) {
        UNROLLED for (int p = 0; p < P; p++) {
            const char* ahead = reinterpret_cast<const char*>(a + size_t(p + P) * pair);
            UNROLLED for (size_t line = 0; line < 2 * CHUNK * sizeof(T); line += 64) __builtin_prefetch(ahead + line);
        }
        UNROLLED for (int k = 0; k < CHUNK; k += Sums::lanes) {
            UNROLLED for (int part = 0; part < Sums::parts; part++) {
                int lane = k + part * V::lanes;
                V weights[2 * P];
                UNROLLED for (int j = 0; j < 2 * P; j++) {
                    weights[j] = V::load(a + size_t(j / 2) * pair + j % 2 * CHUNK + lane);
                }
                UNROLLED for (int r = 0; r < R; r++) {
                    V numbers = V::load(reinterpret_cast<const T*>(rows[r]) + lane);
                    UNROLLED for (int j = 0; j < 2 * P; j++) {
                        sums[r][j].part[part] = fma(weights[j], numbers, sums[r][j].part[part]);
                    }
                }
            }
        }
        for (int r = 0; r < R; r++) rows[r] += x.chunk_stride;
    }
    for (int r = 0; r < R; r++) {
        float* out = to.products + size_t(row + r) * size_t(to.stride) + rank;
        for (int j = 0; j < 2 * P; j++) out[j] = map.scales[rank + j] * sums[r][j].total();
    }
}

template <class V, class T, int R>
inline void shrink_rows(const LowRank& map, const Rows& x, int row, int rank, const LowRankProducts& to) {
    int last = map.rank < rank + LOW_RANK_BLOCK ? map.rank : rank + LOW_RANK_BLOCK;
    if constexpr (R == 1) {  // two sums at a time would leave the multipliers waiting for results: take four
        for (; rank + 4 <= last; rank += 4) shrink_pairs<V, T, R, 2>(map, x, row, rank, to);
    }
    for (; rank < last; rank += 2) shrink_pairs<V, T, R, 1>(map, x, row, rank, to);
}

// Compute the products with A, then wait in a barrier. Called by every thread of a job.
template <class V, class T>
void shrink(Pool& pool, const std::vector<LowRankUnit>& units, const Rows& x, const LowRankProducts& to) {
    int count = int(units.size()), blocks = ceil_div(to.lora->max_rank, LOW_RANK_BLOCK);
    for (int claimed; (claimed = pool.claim()) < count * blocks;) {
        const LowRankUnit& unit = units[size_t(claimed % count)];
        const LowRank* map = to.of(unit.row);
        int rank = claimed / count * LOW_RANK_BLOCK;
        if (!map || rank >= map->rank) continue;
        switch (unit.rows) {
            case 1: shrink_rows<V, T, 1>(*map, x, unit.row, rank, to); break;
            case 2: shrink_rows<V, T, 2>(*map, x, unit.row, rank, to); break;
            case 3: shrink_rows<V, T, 3>(*map, x, unit.row, rank, to); break;
            default: shrink_rows<V, T, 4>(*map, x, unit.row, rank, to);
        }
    }
    pool.barrier();
}

// Add B times a row's products to the row's sums of G · 16 columns, which all need the same ranks.
template <class V, class T, int G>
inline void expand(const LowRank& map, const LowRankColumns* columns, const float* products, float* sums) {
    constexpr int parts = 16 / V::lanes;
    const T* b = static_cast<const T*>(map.b);
    V added[G * parts];
    UNROLLED for (V& sum : added) sum = V::set(0.0f);
    for (int rank = 0; rank < columns->ranks; rank++) {
        V product = V::set(products[columns->first + rank]);
        UNROLLED for (int i = 0; i < G * parts; i++) {
            V weight = V::load(b + columns[i / parts].offset + rank * 16 + i % parts * V::lanes);
            added[i] = fma(product, weight, added[i]);
        }
    }
    UNROLLED for (int i = 0; i < G * parts; i++) (V::load(sums + i * V::lanes) + added[i]).store(sums + i * V::lanes);
}

// Add the part of the row's adapter to the sums of `columns` columns from `column` on, both multiples of 16.
template <class V, class T>
inline void add_products(const LowRankProducts& from, int row, int column, int columns, float* sums) {
    const LowRank* map = from.of(row);
    if (!map) return;
    const float* products = from.products + size_t(row) * size_t(from.stride);
    const LowRankColumns *own = map->columns + column / 16, *last = own + columns / 16;
    auto alike = [&](int count) {
        if (last - own < count) return false;
        for (int i = 1; i < count; i++) {
            if (own[i].first != own->first || own[i].ranks != own->ranks) return false;
        }
        return true;
    };
    for (int count; own < last; own += count, sums += 16 * count) {
        count = alike(4) ? 4 : alike(2) ? 2 : 1;
        switch (count) {
            case 4: expand<V, T, 4>(*map, own, products, sums); break;
            case 2: expand<V, T, 2>(*map, own, products, sums); break;
            default: expand<V, T, 1>(*map, own, products, sums);
        }
    }
}

}  // namespace streamserve
