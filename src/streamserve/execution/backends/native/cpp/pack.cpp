#include "pack.h"

#include "elementwise.h"
#include "panels.h"

namespace streamserve {

namespace {

constexpr int MAX_GROUP = 128;  // largest group that is rounded with zero points
constexpr float SHRINK[] = {0.95f, 0.9f};

// The layout of a packed weight of floats: streams of `columns` columns, in which `group` adjacent k of a
// column lie together. `interleaved`: columns i of the first and the second half alternate.
struct Packing {
    int columns, group;
    bool interleaved;

    size_t place(int k, int column) const {
        int half = columns / 2, at = interleaved ? column % half * 2 + column / half : column;
        return (size_t(k / group) * size_t(columns) + size_t(at)) * size_t(group) + size_t(k % group);
    }
};

Packing packing(int path, int type) {
    switch (path) {
        case AMX: return {16, 2, false};
        case AVX512_BF16: return {64, 2, false};
        case AVX512: return {32, 1, type == BF16};
        default: return {16, 1, type == BF16};
    }
}

// Write the pairs of columns i and i + columns / 2 for each k: to[k][i] = (from[i][k], from[i + columns / 2][k]).
void turn_pairs(const uint16_t* from, size_t stride, int columns, int depth, uint32_t* to) {
    int half = columns / 2;
    for (int k = 0; k < depth; k++, to += half) {
        for (int i = 0; i < half; i++) {
            uint32_t low = from[size_t(i) * stride + size_t(k)], high = from[size_t(i + half) * stride + size_t(k)];
            to[i] = low | high << 16;
        }
    }
}

// Write the numbers of a row as T, then zeros up to `padded`. `check` becomes NaN if a number is not finite.
template <class V, class S, class T>
void convert(const void* row, int k, int padded, T* to, V& check) {
    const S* from = static_cast<const S*>(row);
    int i = 0;
    for (; i + V::lanes <= k; i += V::lanes) {
        V x = round_to<V, T>(V::load(from + i));
        check = check + x * V::set(0.0f);
        x.store(to + i);
    }
    for (; i < k; i++) {
        put(to[i], widen(from[i]));
        check = check + V::set(widen(to[i]) * 0.0f);
    }
    for (; i < padded; i++) to[i] = T{};
}

template <class V, class T>
void convert_from(int source, const void* row, int k, int padded, T* to, V& check) {
    switch (source) {
        case FROM_BF16: return convert<V, bf16>(row, k, padded, to, check);
        case FROM_F16: return convert<V, f16>(row, k, padded, to, check);
        default: return convert<V, float>(row, k, padded, to, check);
    }
}

template <class V>
bool all_finite(V check) {
    float sum = check.sum();
    return sum == sum;
}

template <class V, class T>
bool pack_panel(const Linear& linear, const Outputs& from, int panel, char* rows, char* to) {
    V check = V::set(0.0f);
    size_t stride = size_t(linear.k_padded) * sizeof(T);
    for (int i = 0; i < PANEL; i++) {
        T* row = reinterpret_cast<T*>(rows + size_t(i) * stride);
        const void* source = from.rows[panel * PANEL + i];
        convert_from<V>(from.source, source, source ? linear.k : 0, linear.k_padded, row, check);
    }
    Packing packed = packing(linear.path, linear.type);
    to += size_t(panel) * PANEL * stride;
    for (int i = 0; i < PANEL; i += packed.columns) {
        const char* first = rows + size_t(i) * stride;
        char* stream = to + size_t(i) * stride;
        if (packed.interleaved) {
            turn_pairs(reinterpret_cast<const uint16_t*>(first), size_t(linear.k_padded), packed.columns,
                       linear.k_padded, reinterpret_cast<uint32_t*>(stream));
        } else {
            turn_words(first, stride, packed.columns, int(stride / 4), stream);
        }
    }
    return all_finite(check);
}

// A group rounded in one range: its squared error, scale, zero point and numbers.
struct Rounded {
    float error, scale, zero;
    uint8_t numbers[MAX_GROUP];
};

float storable(float scale) { return widen(round_bf16(scale)); }

template <class V>
void store_numbers(V numbers, uint8_t* to) {
    numbers.store(reinterpret_cast<int8_t*>(to));
}

// Round a group as `_round_range` of quantization.py does. Errors are added in halves, in the order of its `_sum`.
template <class V>
void round_range(const float* x, int count, float low, float high, float largest, Rounded& to) {
    to.scale = storable(high / largest - low / largest);
    float divisor = to.scale > 0 ? to.scale : 1.0f;
    V nearest = V::set(low / -divisor).nearest().max(V::set(0.0f)).min(V::set(largest));
    to.zero = nearest.largest();
    V error[MAX_GROUP / V::lanes];
    for (int i = 0; i < count; i += V::lanes) {
        V value = V::load(x + i);
        V number = ((value / V::set(divisor)).nearest() + nearest).max(V::set(0.0f)).min(V::set(largest));
        V wrong = (number - nearest) * V::set(to.scale) - value;
        error[i / V::lanes] = wrong * wrong;
        store_numbers(number, to.numbers + i);
    }
    for (int half = count / V::lanes / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; i++) error[i] = error[i] + error[i + half];
    }
    to.error = error[0].sum();
}

template <class V>
void round_with_zeros(const float* x, int count, int largest, uint8_t* numbers, bf16& scale, int8_t& zero) {
    V least = V::set(0.0f), most = least;
    for (int i = 0; i < count; i += V::lanes) {
        least = least.min(V::load(x + i));
        most = most.max(V::load(x + i));
    }
    float low = -(V::set(0.0f) - least).largest(), high = most.largest();
    Rounded tries[2];
    Rounded *best = tries, *other = tries + 1;
    round_range<V>(x, count, low, high, float(largest), *best);
    for (float part : SHRINK) {
        round_range<V>(x, count, low * part, high * part, float(largest), *other);
        if (other->error < best->error) std::swap(best, other);
    }
    std::memcpy(numbers, best->numbers, size_t(count));
    scale = round_bf16(best->scale);
    zero = int8_t(best->zero);
}

template <class V>
void round_symmetric(const float* x, int count, int middle, uint8_t* numbers, bf16& scale) {
    V zero = V::set(0.0f), peak = zero, largest = V::set(float(middle - 1));
    for (int i = 0; i < count; i += V::lanes) {
        V value = V::load(x + i);
        peak = peak.max(value).max(zero - value);
    }
    float found = storable(peak.largest() / float(middle - 1));
    V divisor = V::set(found > 0 ? found : 1.0f);
    for (int i = 0; i < count; i += V::lanes) {
        V number = (V::load(x + i) / divisor).nearest().max(zero - largest).min(largest);
        store_numbers(number, numbers + i);
    }
    for (int i = 0; i < count; i++) numbers[i] = uint8_t(numbers[i] + middle);
    scale = round_bf16(found);
}

struct Tables {
    bf16* scales;
    int8_t* zeros;  // null: symmetric
};

template <class V>
bool quantize_panel(const Linear& linear, const Outputs& from, int panel, char* memory, void* to,
                    const Tables& tables) {
    V check = V::set(0.0f);
    int groups = ceil_div(linear.k_padded, linear.group);
    size_t row = row_bytes(linear), stride = column_stride(linear);
    size_t stored = size_t(panel) * size_t(groups) * PANEL;
    float* x = reinterpret_cast<float*>(memory);
    uint8_t* numbers = reinterpret_cast<uint8_t*>(x + round_up(linear.k_padded, MAX_GROUP));
    uint8_t* columns = numbers + round_up(linear.k_padded, MAX_GROUP);
    std::memset(columns, 0, PANEL * stride);
    for (int i = 0; i < PANEL; i++) {
        const void* source = from.rows[panel * PANEL + i];
        for (int g = 0; !source && g < groups; g++) {
            tables.scales[stored + size_t(g * PANEL + i)] = {};
            if (tables.zeros) tables.zeros[stored + size_t(g * PANEL + i)] = 0;
        }
        if (!source) continue;
        convert_from<V>(from.source, source, linear.k, round_up(linear.k_padded, MAX_GROUP), x, check);
        for (int g = 0; g < groups; g++) {
            int begin = g * linear.group;
            size_t at = stored + size_t(g * PANEL + i);
            if (tables.zeros) {
                round_with_zeros<V>(x + begin, linear.group, (1 << linear.bits) - 1, numbers + begin,
                                    tables.scales[at], tables.zeros[at]);
            } else {
                round_symmetric<V>(x + begin, linear.group, 1 << (linear.bits - 1), numbers + begin, tables.scales[at]);
            }
        }
        std::memset(numbers + linear.k, 0, size_t(linear.k_padded - linear.k));
        if (linear.bits == 4) {
            join_halves(linear, numbers, columns + size_t(i) * stride);
        } else {
            std::memcpy(columns + size_t(i) * stride, numbers, row);
        }
    }
    place_columns(linear, panel, columns, to);
    return all_finite(check);
}

// Call f with a vector of the path's type.
template <class F>
bool with_vector(int path, F&& f) {
    switch (path) {
        case PORTABLE: return f(VecPortable{});
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return f(Vec256{});
#endif
#ifdef STREAMSERVE_AVX512
        default: return f(Vec512{});
#endif
    }
    return false;
}

}  // namespace

bool pack(Pool& pool, const Linear& linear, const Outputs& from, void* to) {
    size_t bytes = PANEL * size_t(linear.k_padded) * size_of(linear.type);
    return with_vector(linear.path, [&](auto vector) {
        using V = decltype(vector);
        return for_panels(pool, linear, [&](int thread, int panel) {
            char *memory = pool.scratch(thread, bytes), *out = static_cast<char*>(to);
            return linear.type == BF16 ? pack_panel<V, bf16>(linear, from, panel, memory, out)
                                       : pack_panel<V, float>(linear, from, panel, memory, out);
        });
    });
}

bool quantize(Pool& pool, const Linear& linear, const Outputs& from, bool symmetric, void* to, bf16* scales,
              int8_t* zeros) {
    size_t bytes = size_t(round_up(linear.k_padded, MAX_GROUP)) * 5 + PANEL * column_stride(linear);
    Tables tables{scales, symmetric ? nullptr : zeros};
    return with_vector(linear.path, [&](auto vector) {
        return for_panels(pool, linear, [&](int thread, int panel) {
            return quantize_panel<decltype(vector)>(linear, from, panel, pool.scratch(thread, bytes), to, tables);
        });
    });
}

void pack_integers(Pool& pool, const Linear& linear, const uint8_t* const* rows, void* to) {
    size_t stride = column_stride(linear), padded = size_t(linear.k_padded);
    for_panels(pool, linear, [&](int thread, int panel) {
        uint8_t* columns = reinterpret_cast<uint8_t*>(pool.scratch(thread, PANEL * stride + padded));
        uint8_t* numbers = columns + PANEL * stride;
        for (int i = 0; i < PANEL; i++) {
            const uint8_t* from = rows[panel * PANEL + i];
            uint8_t* own = linear.bits == 4 ? numbers : columns + size_t(i) * stride;
            if (from) std::memcpy(own, from, size_t(linear.k));
            size_t done = from ? size_t(linear.k) : 0;
            std::memset(own + done, 0, padded - done);
            if (linear.bits == 4) join_halves(linear, numbers, columns + size_t(i) * stride);
        }
        place_columns(linear, panel, columns, to);
        return true;
    });
}

namespace {

template <class T>
void unpack_row(const Linear& linear, int row, T* to) {
    Packing packed = packing(linear.path, linear.type);
    size_t stream = size_t(row / packed.columns) * size_t(packed.columns) * size_t(linear.k_padded);
    const T* from = static_cast<const T*>(linear.weight) + stream;
    for (int k = 0; k < linear.k; k++) to[k] = from[packed.place(k, row % packed.columns)];
}

}  // namespace

void unpack(const Linear& linear, int row, void* to) {
    if (linear.type == BF16) {
        unpack_row(linear, row, static_cast<bf16*>(to));
    } else {
        unpack_row(linear, row, static_cast<float*>(to));
    }
}

}  // namespace streamserve
