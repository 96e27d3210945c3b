// The scales and offsets of integers (gemm_int.cpp, common.h: ScaleType).
#pragma once

#include "common.h"
#include "vec.h"

namespace streamserve {

namespace {

// The tables of a weight with `groups` groups of K.
class ScaleTables {
  public:
    ScaleTables(const Linear& w, int groups) : w_(w), groups_(groups) {}

    // Prefetch the scales and offsets of a panel's group.
    __attribute__((always_inline)) void fetch(int panel, int g) const {
        size_t at = index(panel, g);
        switch (w_.scale_type) {
            case SCALE_BF16:
            case SCALE_F16: return fetch_of<2, 1>(at);
            case SCALE_E8M0: return fetch_of<1, 1>(at);
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
            default: return load_of<D, ZEROS, float, float>(at, s, m);
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

    const Linear& w_;
    int groups_;
};

}  // namespace

}  // namespace streamserve
