// The operations between matrix products. Results are rounded to the model's type after each step, as in plain torch.
#pragma once

#include "gemm.h"
#include "vec.h"

namespace streamserve {

template <class V, class T>
inline V round_to(V x) {
    if constexpr (sizeof(T) == 2) {
        return x.rounded();
    } else {
        return x;
    }
}

inline float round_to_type(float x, bf16) { return widen(round_bf16(x)); }
inline float round_to_type(float x, float) { return x; }

inline void put(float& to, float x) { to = x; }
inline void put(bf16& to, float x) { to = round_bf16(x); }

template <class V, class T>
inline void store_row(const float* sums, const Finish& finish, size_t at, int columns) {
    T* out = static_cast<T*>(finish.out) + at;
    int i = 0;
    for (; i + V::lanes <= columns; i += V::lanes) V::load(sums + i).store(out + i);
    for (; i < columns; i++) put(out[i], sums[i]);
}

template <class V>
inline void store_wide(const float* sums, const Finish& finish, size_t at, int columns) {
    if (finish.scale == 1 && !finish.cap) return store_row<V, float>(sums, finish, at, columns);
    float* out = static_cast<float*>(finish.out) + at;
    int i = 0;
    for (; i + V::lanes <= columns; i += V::lanes) {
        V sum = V::load(sums + i) * V::set(finish.scale);
        (finish.cap ? soft_cap(sum, V::set(1 / finish.cap), V::set(finish.cap)) : sum).store(out + i);
    }
    for (; i < columns; i++) {
        float sum = sums[i] * finish.scale;
        auto capped = [&](V x) { return soft_cap(x, V::set(1 / finish.cap), V::set(finish.cap)); };
        out[i] = finish.cap ? lane_of<V>(capped, sum) : sum;
    }
}

template <class V, class T>
inline void add_row(const float* sums, const Finish& finish, size_t at, int columns) {
    T* out = static_cast<T*>(finish.out) + at;
    bool scaled = finish.scale != 1;
    int i = 0;
    for (; i + V::lanes <= columns; i += V::lanes) {
        V sum = round_to<V, T>(V::load(sums + i));
        if (scaled) sum = round_to<V, T>(sum * V::set(finish.scale));
        (V::load(out + i) + sum).store(out + i);
    }
    for (; i < columns; i++) {
        float sum = round_to_type(sums[i], T{});
        if (scaled) sum = round_to_type(sum * finish.scale, T{});
        put(out[i], widen(out[i]) + sum);
    }
}

// Return x / (1 + e^-s). This is SiLU for s = x, clamped SiLU for s = alpha · x, and the tanh approximation
// of GELU for the cubic below.
template <class V>
inline V activate(V x, const Gating& gating) {
    V one = V::set(1.0f), s = x;
    if (gating.activation == GELU) s = x * V::set(1.5957691216f) * fma(x * x, V::set(0.044715f), one);
    if (gating.activation == CLAMPED_SILU) s = x * V::set(gating.alpha);
    return x / (one + exponential(V::set(0.0f) - s));
}

// Write act(gate) · value to `chunk`; for the clamped SiLU, act(min(gate, limit)) · (1 + value), where the
// value is clamped to ±limit.
template <class V, class T>
inline void gate_mul(const float* sums, T* chunk, const Gating& gating) {
    V limit = V::set(gating.limit);
    for (int i = 0; i < CHUNK; i += V::lanes) {
        V gate = round_to<V, T>(V::load(sums + i)), value = round_to<V, T>(V::load(sums + CHUNK + i));
        if (gating.activation == CLAMPED_SILU) {
            // min and max return their argument if it is NaN: so a NaN stays a NaN.
            gate = limit.min(gate);
            value = (V::set(0.0f) - limit).max(limit.min(value));
            value = round_to<V, T>(V::set(1.0f) + value);
        }
        (round_to<V, T>(activate(gate, gating)) * value).store(chunk + i);
    }
}

// Add bias and adapters to one row's sums of columns `column` to `column + columns`, and write the results.
template <class V, class T>
inline void end_row(const Linear& linear, const Finish& finish, int row, int column, int columns,
                    float* sums) {
    if (linear.bias) {
        for (int j = 0; j < columns; j++) sums[j] += linear.bias[column + j];
    }
    if (finish.lora.lora) add_products<V, T>(finish.lora, row, column, columns, sums);
    int real = linear.n - column < columns ? linear.n - column : columns;
    size_t at = size_t(row) * finish.stride + size_t(column);
    if (finish.kind == Finish::GATE_MUL) {
        gate_mul<V, T>(sums, reinterpret_cast<T*>(finish.chunks.at(row, column / PANEL)), finish.gating);
    } else if (finish.wide) {
        store_wide<V>(sums, finish, at, real);
    } else if (finish.kind == Finish::ADD) {
        add_row<V, T>(sums, finish, at, real);
    } else {
        store_row<V, T>(sums, finish, at, real);
    }
}

// Call end_row for `rows` rows from `row` on.
void end(const Linear& linear, const Finish& finish, int row, int rows, int column, int columns, float* sums);

// The rounding of RMSNorm. `wide`: everything is computed in float32; otherwise the normalized number is
// rounded before it is multiplied by its weight.
struct Norm {
    float epsilon;
    bool wide;
};

// Write the RMSNorm of a row of `size` numbers to chunks from `to` on, which may be the row itself.
template <class V, class T>
void normalize(const T* from, const float* weight, int size, Norm norm, char* to, size_t chunk_stride) {
    using Squares = LaneSums<V>;
    int whole = size / Squares::lanes * Squares::lanes;
    Squares squares;
    for (int i = 0; i < whole; i += Squares::lanes) {
        squares.add_squares([&](int lane) { return V::load(from + i + lane); });
    }
    float total = squares.total();
    for (int i = whole; i < size; i++) total += widen(from[i]) * widen(from[i]);
    float scale = 1.0f / std::sqrt(total / float(size) + norm.epsilon);
    for (int i = 0; i < size; i += V::lanes) {
        T* out = reinterpret_cast<T*>(to + size_t(i / CHUNK) * chunk_stride) + i % CHUNK;
        if (i < whole) {
            V scaled = V::load(from + i) * V::set(scale);
            (V::load(weight + i) * (norm.wide ? scaled : round_to<V, T>(scaled))).store(out);
            continue;
        }
        for (int j = i; j < std::min(size, i + V::lanes); j++) {  // each number once: it may be overwritten
            float scaled = widen(from[j]) * scale;
            put(out[j - i], weight[j] * (norm.wide ? scaled : round_to_type(scaled, T{})));
        }
    }
}

// Add x to `to`, both of `size` numbers.
template <class V, class T>
void add_to(T* to, const T* x, int size) {
    int i = 0;
    for (; i + V::lanes <= size; i += V::lanes) (V::load(to + i) + V::load(x + i)).store(to + i);
    for (; i < size; i++) put(to[i], widen(to[i]) + widen(x[i]));
}

// Multiply `size` numbers by `factor`.
template <class V, class T>
void scale(T* numbers, T factor, int size) {
    int i = 0;
    for (; i + V::lanes <= size; i += V::lanes) (V::load(numbers + i) * V::set(widen(factor))).store(numbers + i);
    for (; i < size; i++) put(numbers[i], widen(numbers[i]) * widen(factor));
}

// Apply rotary embedding to `dim` numbers in place: numbers i and i + dim / 2 are rotated by cos[i] and sin[i].
template <class V, class T>
void rotate(T* head, const T* cos, const T* sin, int dim) {
    int half = dim / 2, i = 0;
    for (; i + V::lanes <= half; i += V::lanes) {
        V first = V::load(head + i), second = V::load(head + half + i);
        V c = V::load(cos + i), s = V::load(sin + i);
        (round_to<V, T>(first * c) - round_to<V, T>(second * s)).store(head + i);
        (round_to<V, T>(second * c) + round_to<V, T>(first * s)).store(head + half + i);
    }
    for (; i < half; i++) {
        float first = widen(head[i]), second = widen(head[half + i]), c = widen(cos[i]), s = widen(sin[i]);
        put(head[i], round_to_type(first * c, T{}) - round_to_type(second * s, T{}));
        put(head[half + i], round_to_type(second * c, T{}) + round_to_type(first * s, T{}));
    }
}

}  // namespace streamserve
