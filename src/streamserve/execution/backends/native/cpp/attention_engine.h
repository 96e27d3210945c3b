// Computation of scores and weighted sums for one key tile with vectors, on any processor and for any type.
// (The other engines, for bf16, are in attention_amx.h and attention_dot.h.) A query's bits do not depend on
// the other queries of the step.
#pragma once

#include <algorithm>

#include "attention.h"
#include "vec.h"

namespace streamserve {

// The keys and values of a tile, `count` from its first position on. Each is a vector of `bytes` bytes.
// `whole`: each 16 of them are adjacent, so that a matrix of 16 rows begins at keys[0], keys[16], …
template <class T>
struct KeyTile {
    const T* keys[KEY_TILE];
    const T* values[KEY_TILE];
    int count, bytes;
    bool whole;
};

// The next tile, whose cache lines are prefetched to L2 while the current tile is computed. Software must prefetch:
// blocks are too short for the hardware's prefetcher. It does so a few lines at a time: many would delay loads.
class Ahead {
  public:
    void clear() { count_ = next_ = left_ = 0; }

    // Add adjacent vectors.
    void add(const char* begin, size_t bytes) {
        uintptr_t first = reinterpret_cast<uintptr_t>(begin) / LINE, last = (reinterpret_cast<uintptr_t>(begin) + bytes - 1) / LINE;
        runs_[count_++] = {reinterpret_cast<const char*>(first * LINE), int(last - first) + 1};
    }

    void fetch(int lines) {
        while (lines > 0) {
            if (!left_) {
                if (next_ == count_) return;
                at_ = runs_[next_].begin, left_ = runs_[next_].lines;
                next_++;
            }
            int some = std::min(lines, left_);
            for (int i = 0; i < some; i++) __builtin_prefetch(at_ + i * LINE, 0, 2);
            at_ += some * LINE, left_ -= some, lines -= some;
        }
    }

  private:
    static constexpr int LINE = 64;
    struct Run {
        const char* begin;
        int lines;
    };

    Run runs_[2 * KEY_TILE];
    const char* at_ = nullptr;
    int count_ = 0, next_ = 0, left_ = 0;  // runs, begun runs, and lines left of the last begun run
};

// In every buffer below, the numbers of a vector are padded to a multiple of 32.
inline int padded(int dim) { return round_up(dim, CHUNK); }

// to[row][i] = the sum of x[row][k] · at(k)[i] over k from `from` to `until`. Each sum is one chain of fused
// multiply-adds, in the order of the bf16 dot product: ascending pairs of k, the second of a pair first.
template <class V, int ROWS, int WIDE, class At>
inline void products(const float* x, size_t x_stride, At at, int from, int until, float* to, size_t to_stride) {
    V sum[ROWS][WIDE];
    UNROLLED for (int row = 0; row < ROWS; row++) {
        UNROLLED for (int i = 0; i < WIDE; i++) sum[row][i] = V::set(0.0f);
    }
    auto add = [&](int k) __attribute__((always_inline)) {
        auto columns = at(k);
        // The larger group of operands is loaded one by one, so that sums and operands fit in 16 registers.
        if constexpr (WIDE > ROWS) {
            V value[ROWS];
            UNROLLED for (int row = 0; row < ROWS; row++) value[row] = V::set(x[size_t(row) * x_stride + size_t(k)]);
            UNROLLED for (int i = 0; i < WIDE; i++) {
                V column = V::load(columns + i * V::lanes);
                UNROLLED for (int row = 0; row < ROWS; row++) accumulate(sum[row][i], value[row], column);
            }
        } else {
            V column[WIDE];
            UNROLLED for (int i = 0; i < WIDE; i++) column[i] = V::load(columns + i * V::lanes);
            UNROLLED for (int row = 0; row < ROWS; row++) {
                V value = V::set(x[size_t(row) * x_stride + size_t(k)]);
                UNROLLED for (int i = 0; i < WIDE; i++) accumulate(sum[row][i], value, column[i]);
            }
        }
    };
    if (from % 2) add(from++);
    for (; from + 1 < until; from += 2) {
        add(from + 1);
        add(from);
    }
    if (from < until) add(from);
    UNROLLED for (int row = 0; row < ROWS; row++) {
        UNROLLED for (int i = 0; i < WIDE; i++) sum[row][i].store(to + size_t(row) * to_stride + i * V::lanes);
    }
}

// Compute `products` for any number of rows, and `columns` columns, which must be a multiple of two vectors.
template <class V, class At>
void all_products(int rows, int columns, const float* x, size_t x_stride, At at, int from, int until, float* to,
                  size_t to_stride) {
    for (int row = 0, count; row < rows; row += count, x += size_t(count) * x_stride) {
        int left = rows - row;
        count = left <= 6 ? left : left < 10 ? left - left / 2 : left < 12 ? 5 : 6;
        for (int i = 0, wide; i < columns; i += wide * V::lanes) {
            auto here = [at, i](int k) { return at(k) + i; };
            float* out = to + size_t(row) * to_stride + i;
            wide = count <= 3 && columns - i >= 4 * V::lanes ? 4 : 2;
            switch (wide == 4 ? -count : count) {
                case -1: products<V, 1, 4>(x, x_stride, here, from, until, out, to_stride); break;
                case -2: products<V, 2, 4>(x, x_stride, here, from, until, out, to_stride); break;
                case -3: products<V, 3, 4>(x, x_stride, here, from, until, out, to_stride); break;
                case 1: products<V, 1, 2>(x, x_stride, here, from, until, out, to_stride); break;
                case 2: products<V, 2, 2>(x, x_stride, here, from, until, out, to_stride); break;
                case 3: products<V, 3, 2>(x, x_stride, here, from, until, out, to_stride); break;
                case 4: products<V, 4, 2>(x, x_stride, here, from, until, out, to_stride); break;
                case 5: products<V, 5, 2>(x, x_stride, here, from, until, out, to_stride); break;
                default: products<V, 6, 2>(x, x_stride, here, from, until, out, to_stride);
            }
        }
    }
}

// Transpose eight keys: to[d][i] = keys[i][d]. Rows of `to` are `stride` numbers apart.
template <class T>
static inline void turn_eight(const T* const* keys, int dim, float* to, size_t stride) {
    int d = 0;
#ifdef __AVX2__
    constexpr int numbers = 32 / sizeof(T);
    for (; d + numbers <= dim; d += numbers) {
        __m256 a[8], b[8];
        for (int i = 0; i < 8; i++) a[i] = _mm256_loadu_ps(reinterpret_cast<const float*>(keys[i] + d));
        for (int i = 0; i < 8; i += 2) {
            b[i] = _mm256_unpacklo_ps(a[i], a[i + 1]);
            b[i + 1] = _mm256_unpackhi_ps(a[i], a[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            a[i] = _mm256_shuffle_ps(b[i], b[i + 2], 0x44);
            a[i + 1] = _mm256_shuffle_ps(b[i], b[i + 2], 0xee);
            a[i + 2] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0x44);
            a[i + 3] = _mm256_shuffle_ps(b[i + 1], b[i + 3], 0xee);
        }
        for (int i = 0; i < 4; i++) {
            b[i] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x20);
            b[i + 4] = _mm256_permute2f128_ps(a[i], a[i + 4], 0x31);
        }
        for (int i = 0; i < 8; i++) {
            if constexpr (sizeof(T) == 4) {
                _mm256_storeu_ps(to + size_t(d + i) * stride, b[i]);
            } else {
                // Each 32-bit word has two numbers of a key.
                Vec256 even, odd;
                Vec256::halves(_mm256_castps_si256(b[i]), even, odd);
                even.store(to + size_t(d + 2 * i) * stride);
                odd.store(to + size_t(d + 2 * i + 1) * stride);
            }
        }
    }
#endif
    for (; d < dim; d++)
        for (int i = 0; i < 8; i++) to[size_t(d) * stride + size_t(i)] = widen(keys[i][d]);
}

// The engine in float32: scores of up to 16 queries with a tile's keys, and sums of its values by their
// weights. Keys are transposed, to vectors of many keys' numbers of one dimension: for few queries a panel at
// a time, just before it is multiplied; for many queries all panels at once.
template <class V, class T>
class VectorEngine {
  public:
    using Weight = float;
    static constexpr int WIDTH = 2 * V::lanes;  // keys of a panel

    static size_t bytes(int dim) {
        return (MAX_QUERIES + 2 * KEY_TILE) * size_t(padded(dim)) * sizeof(float);
    }
    VectorEngine(char* memory, int dim) : dim_(dim), row_(size_t(padded(dim))) {
        queries_ = reinterpret_cast<float*>(memory);
        panels_ = queries_ + MAX_QUERIES * row_;
        values_ = panels_ + KEY_TILE * row_;
    }

    void queries(const T* const* from, int count) {
        for (int i = 0; i < count; i++) widen_row(from[i], queries_ + size_t(i) * row_);
    }

    // `ahead` is not used: with few queries, `turn` prefetches the next panel instead.
    void tile(const KeyTile<T>& tile, int query_tiles, Ahead&) {
        tile_ = &tile;
        many_ = query_tiles > 1;
        for (int panel = 0; many_ && panel * WIDTH < tile.count; panel++) turn(panel, panel_at(panel));
        widened_ = many_ || dim_ % CHUNK;
        for (int key = 0; widened_ && key < tile.count; key++) {
            widen_row(tile.values[key], values_ + size_t(key) * row_);
        }
    }

    // Write to to[query][key] the scores with the keys `from` to `until`, and with some adjacent keys.
    void scores(int first, int count, int from, int until, float* to) {
        const float* x = queries_ + size_t(first) * row_;
        for (int panel = from / WIDTH; panel * WIDTH < until; panel++) {
            if (!many_) turn(panel, panels_);
            const float* keys = many_ ? panel_at(panel) : panels_;
            auto at = [keys](int d) { return keys + d * WIDTH; };
            all_products<V>(count, WIDTH, x, row_, at, 0, dim_, to + panel * WIDTH, KEY_TILE);
        }
    }

    // to[query][d] = the sum of weights[query][key] · value[key][d] over keys `from` to `until`; all other
    // weights must be zero. Rows are padded(dim) numbers apart.
    void values(const Weight* weights, int count, int from, int until, float* to) {
        int columns = int(row_);
        if (widened_) {
            auto at = [values = values_, row = row_](int key) { return values + size_t(key) * row; };
            all_products<V>(count, columns, weights, KEY_TILE, at, from, until, to, row_);
        } else {
            auto at = [values = tile_->values](int key) { return values[key]; };
            all_products<V>(count, columns, weights, KEY_TILE, at, from, until, to, row_);
        }
    }

  private:
    float* panel_at(int panel) const { return panels_ + size_t(panel * WIDTH) * row_; }

    void widen_row(const T* from, float* to) const {
        int d = 0;
        for (; d + V::lanes <= dim_; d += V::lanes) V::load(from + d).store(to + d);
        for (; d < dim_; d++) to[d] = widen(from[d]);
        for (; d < int(row_); d++) to[d] = 0;
    }

    // Transpose a panel's keys; places after the last key repeat it. With few queries, the panel's values and
    // the next panel's keys are prefetched meanwhile.
    void turn(int panel, float* to) const {
        int last = tile_->count - 1;
        for (int half = 0; half < WIDTH; half += 8) {
            const T* keys[8];
            for (int i = 0; i < 8; i++) {
                int key = std::min(panel * WIDTH + half + i, last);
                keys[i] = tile_->keys[key];
                if (many_) continue;
                fetch(tile_->keys[std::min(key + WIDTH, last)]);
                fetch(tile_->values[key]);
            }
            turn_eight(keys, dim_, to + half, WIDTH);
        }
    }

    void fetch(const T* vector) const {
        const char* at = reinterpret_cast<const char*>(vector);
        for (size_t byte = 0; byte < size_t(dim_) * sizeof(T); byte += 64) __builtin_prefetch(at + byte);
    }

    int dim_;
    size_t row_;
    float *queries_, *panels_, *values_;
    bool many_ = false, widened_ = false;
    const KeyTile<T>* tile_ = nullptr;
};

}  // namespace streamserve
