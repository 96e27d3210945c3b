#include "elementwise.h"

namespace streamserve {

namespace {

template <class V, class T>
void store_row(const float* sums, const Finish& finish, size_t at, int columns, bool add) {
    T* out = static_cast<T*>(finish.out) + at;
    int i = 0;
    for (; i + V::lanes <= columns; i += V::lanes) {
        V sum = V::load(sums + i);
        (add ? V::load(out + i) + round_to<V, T>(sum) : sum).store(out + i);
    }
    for (; i < columns; i++) {
        float sum = sums[i];
        put(out[i], add ? widen(out[i]) + round_to_type(sum, T{}) : sum);
    }
}

template <class V, class T>
void silu_mul(const float* sums, T* chunk) {
    for (int i = 0; i < CHUNK; i += V::lanes) {
        V gate = round_to<V, T>(V::load(sums + i)), value = round_to<V, T>(V::load(sums + CHUNK + i));
        V one = V::set(1.0f);
        V silu = round_to<V, T>(gate / (one + exponential(V::set(0.0f) - gate)));
        (silu * value).store(chunk + i);
    }
}

template <class V, class T>
void end_rows(const Linear& linear, const Finish& finish, int row, int rows, int column, int columns,
              float* sums) {
    int real = linear.n - column < columns ? linear.n - column : columns;
    for (int i = 0; i < rows; i++, sums += PANEL) {
        if (linear.bias) {
            for (int j = 0; j < columns; j++) sums[j] += linear.bias[column + j];
        }
        size_t at = size_t(row + i) * finish.stride + size_t(column);
        if (finish.kind == Finish::SILU_MUL) {
            silu_mul<V, T>(sums, reinterpret_cast<T*>(finish.chunks.at(row + i, column / PANEL)));
        } else if (finish.wide) {
            store_row<V, float>(sums, finish, at, real, false);
        } else {
            store_row<V, T>(sums, finish, at, real, finish.kind == Finish::ADD);
        }
    }
}

template <class V>
void end_typed(const Linear& linear, const Finish& finish, int row, int rows, int column, int columns,
               float* sums) {
    if (finish.type == BF16) {
        end_rows<V, bf16>(linear, finish, row, rows, column, columns, sums);
    } else {
        end_rows<V, float>(linear, finish, row, rows, column, columns, sums);
    }
}

}  // namespace

void end(const Linear& linear, const Finish& finish, int row, int rows, int column, int columns,
         float* sums) {
    switch (linear.path) {
        case PORTABLE: return end_typed<VecPortable>(linear, finish, row, rows, column, columns, sums);
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return end_typed<Vec256>(linear, finish, row, rows, column, columns, sums);
#endif
#ifdef STREAMSERVE_AVX512
        default: return end_typed<Vec512>(linear, finish, row, rows, column, columns, sums);
#endif
    }
}

}  // namespace streamserve
