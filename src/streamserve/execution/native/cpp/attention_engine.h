// How scores and weighted sums of one key tile are computed: with vectors (any processor, any type), and
// with AMX for bf16. Both give a query the same bits beside any other queries.
#pragma once

#include "attention.h"
#include "vec.h"

namespace streamserve {

// The keys and values of a tile: `count` of them from its first position on, each a vector of `dim` numbers.
// `whole`: they lie 16 by 16 adjacent, so that keys[0], keys[16], … are rows of a matrix.
template <class T>
struct KeyTile {
    const T* keys[KEY_TILE];
    const T* values[KEY_TILE];
    int count;
    bool whole;
};

// Numbers are padded to 32 in every buffer below.
inline int padded(int dim) { return round_up(dim, CHUNK); }

// Scores of up to 16 queries with a tile's keys, then what their weights make of its values.
template <class V, class T>
class VectorEngine {
  public:
    using Weight = float;
    static constexpr bool skips = true;  // values outside a query's keys are not touched

    static size_t bytes(int) { return 0; }
    VectorEngine(char*, int dim) : dim_(dim) {}

    void queries(const T* const* from, int count) { count_ = count, from_ = from; }
    void tile(const KeyTile<T>& tile, int) { tile_ = &tile; }

    void scores(int first, int count, float* to) {
        int whole = dim_ / V::lanes * V::lanes;
        for (int i = 0; i < count; i++) {
            const T* query = from_[first + i];
            for (int key = 0; key < tile_->count; key++) {
                const T* other = tile_->keys[key];
                V sum = V::set(0.0f);
                for (int d = 0; d < whole; d += V::lanes) {
                    sum = fma(V::load(query + d), V::load(other + d), sum);
                }
                float total = sum.sum();
                for (int d = whole; d < dim_; d++) total += widen(query[d]) * widen(other[d]);
                to[i * KEY_TILE + key] = total;
            }
        }
    }

    // to[d] = the sum of weights[key] · value[key][d] over keys `from` to `until`.
    void values(int i, const Weight* weights, int from, int until, float* to) {
        const Weight* own = weights + i * KEY_TILE;
        int d = 0;
        for (; d + V::lanes <= dim_; d += V::lanes) {
            V sum = V::set(0.0f);
            for (int key = from; key < until; key++) {
                sum = fma(V::set(own[key]), V::load(tile_->values[key] + d), sum);
            }
            sum.store(to + d);
        }
        for (; d < dim_; d++) {
            float sum = 0;
            for (int key = from; key < until; key++) sum += own[key] * widen(tile_->values[key][d]);
            to[d] = sum;
        }
    }

  private:
    int dim_, count_ = 0;
    const T* const* from_ = nullptr;
    const KeyTile<T>* tile_ = nullptr;
};

}  // namespace streamserve
