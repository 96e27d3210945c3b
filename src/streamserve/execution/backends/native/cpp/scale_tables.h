// The scales and offsets of integers (gemm_int.cpp, common.h: ScaleType).
#pragma once

#include "common.h"
#include "vec.h"

namespace streamserve {

namespace {

// The tables of a weight with `groups` groups of K.
class ScaleTables {
  public:
    ScaleTables(const Linear& w, int groups) : w_(w), groups_(groups) {
        if (w.scale_type == SCALE_LEVELS) shift_ = __builtin_ctz(unsigned(LEVEL_K / w.group * PANEL));
    }

    // Prefetch the scales and offsets of a panel's group.
    __attribute__((always_inline)) void fetch(int panel, int g) const {
        size_t at = index(panel, g);
        switch (w_.scale_type) {
            case SCALE_BF16:
            case SCALE_F16: return fetch_of<2, 1>(at);
            case SCALE_E8M0: return fetch_of<1, 1>(at);
            case SCALE_LEVELS: return fetch_levels(at);
            default: return fetch_of<4, 4>(at);
        }
    }

    // Load the scales and offsets of a panel's group, for the columns of `at_once` vectors from `column` on. Offsets are
    // zero without ZEROS.
    template <class D, bool ZEROS>
    __attribute__((always_inline)) void load(int panel, int g, int column, typename D::V (&s)[D::at_once],
                                             typename D::V (&m)[D::at_once]) const {
        size_t at = index(panel, g) + size_t(column);
        switch (w_.scale_type) {
            case SCALE_BF16: return load_of<D, ZEROS, bf16, int8_t>(at, s, m);
            case SCALE_F16: return load_of<D, ZEROS, f16, int8_t>(at, s, m);
            case SCALE_E8M0: return load_of<D, false, e8m0, int8_t>(at, s, m);
            case SCALE_LEVELS: return load_levels<D, ZEROS>(at, s, m);
            default: return load_of<D, ZEROS, float, float>(at, s, m);
        }
    }

    // With two levels: return whether group g is the first that has its float16.
    bool starts_level(int g) const { return w_.scale_type == SCALE_LEVELS && g % (LEVEL_K / w_.group) == 0; }

    // Write a panel's float16 of group g [64] as floats.
    template <class D>
    void widen_level(int panel, int g, float* scales, float* offsets) const {
        Place first = place(index(panel, g));
        for (int i = 0; i < PANEL; i += D::lanes) {
            super<typename D::V>(w_.scales, first, i).store(scales + i);
            if (w_.offsets) super<typename D::V>(w_.offsets, first, i).store(offsets + i);
        }
    }

    // Do the work of `load` with the float16 of widen_level.
    template <class D, bool ZEROS>
    __attribute__((always_inline)) void load_numbers(int panel, int g, int column, const float* scales,
                                                     const float* offsets, typename D::V (&s)[D::at_once],
                                                     typename D::V (&m)[D::at_once]) const {
        using V = typename D::V;
        Place first = place(index(panel, g) + size_t(column));
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            s[i] = V::load(scales + column + i * D::lanes) * number<V>(w_.scales, first, i * D::lanes);
            m[i] = V::set(0.0f);
            if constexpr (ZEROS) {
                m[i] = V::load(offsets + column + i * D::lanes) * number<V>(w_.offsets, first, i * D::lanes);
            }
        }
    }

  private:
    size_t index(int panel, int g) const { return (size_t(panel) * size_t(groups_) + size_t(g)) * PANEL; }

    template <size_t SCALE, size_t OFFSET>
    __attribute__((always_inline)) void fetch_of(size_t at) const {
        const char *scales = static_cast<const char*>(w_.scales), *offsets = static_cast<const char*>(w_.offsets);
        UNROLLED for (size_t i = 0; i < PANEL * SCALE; i += 64) __builtin_prefetch(scales + at * SCALE + i, 0, 2);
        if (!offsets) return;
        UNROLLED for (size_t i = 0; i < PANEL * OFFSET; i += 64) __builtin_prefetch(offsets + at * OFFSET + i, 0, 2);
    }

    template <class D, bool ZEROS, class S, class M>
    __attribute__((always_inline)) void load_of(size_t at, typename D::V (&s)[D::at_once],
                                                typename D::V (&m)[D::at_once]) const {
        using V = typename D::V;
        const S* scales = static_cast<const S*>(w_.scales) + at;
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            s[i] = V::load(scales + i * D::lanes);
            m[i] = V::set(0.0f);
            if constexpr (ZEROS) {
                m[i] = V::load(static_cast<const M*>(w_.offsets) + at + size_t(i * D::lanes));
                if constexpr (sizeof(M) == 1) m[i] = m[i] * (V::set(-0.0f) - s[i]);
            }
        }
    }

    // Where in a table of two levels the scale of index `at` is: bytes of its float16 and of its number.
    struct Place {
        size_t super, number;
    };
    Place place(size_t at) const {
        constexpr size_t SUPERS = PANEL * sizeof(f16);
        size_t numbers = size_t(1) << shift_, table = (at >> shift_) * (SUPERS + numbers);
        return {table + at % PANEL * sizeof(f16), table + SUPERS + at % numbers};
    }

    __attribute__((always_inline)) void fetch_levels(size_t at) const {
        Place first = place(at);
        bool starts = first.number - first.super == PANEL * sizeof(f16);  // no earlier group has these float16
        for (const void* table : {w_.scales, w_.offsets}) {
            const char* bytes = static_cast<const char*>(table);
            if (!bytes) continue;
            __builtin_prefetch(bytes + first.number, 0, 2);
            if (!starts) continue;
            __builtin_prefetch(bytes + first.super, 0, 2);
            __builtin_prefetch(bytes + first.super + 64, 0, 2);
        }
    }

    // Load the float16 or the numbers from column `i` after `first` on.
    template <class V>
    static V super(const void* table, const Place& first, int i) {
        return V::load(reinterpret_cast<const f16*>(static_cast<const char*>(table) + first.super) + i);
    }
    template <class V>
    static V number(const void* table, const Place& first, int i) {
        return V::load(reinterpret_cast<const int8_t*>(static_cast<const char*>(table) + first.number) + i);
    }

    template <class D, bool ZEROS>
    __attribute__((always_inline)) void load_levels(size_t at, typename D::V (&s)[D::at_once],
                                                    typename D::V (&m)[D::at_once]) const {
        using V = typename D::V;
        Place first = place(at);
        UNROLLED for (int i = 0; i < D::at_once; i++) {
            int from = i * D::lanes;
            s[i] = super<V>(w_.scales, first, from) * number<V>(w_.scales, first, from);
            m[i] = V::set(0.0f);
            if constexpr (ZEROS) m[i] = super<V>(w_.offsets, first, from) * number<V>(w_.offsets, first, from);
        }
    }

    const Linear& w_;
    int groups_, shift_ = 0;  // shift: with two levels, the logarithm of a panel's numbers that share float16
};

}  // namespace

}  // namespace streamserve
