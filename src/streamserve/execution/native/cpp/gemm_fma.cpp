// The paths that multiply in float32: AVX512, AVX2 and plain C++, for bf16 and float32 weights alike.
#include "gemm.h"
#include "vec.h"

namespace streamserve {

namespace {

// ROWS × WIDE vectors of columns over all of K.
template <class V, class T, int ROWS, int WIDE>
void block(const T* weight, const T* const* x, int depth, float* sums) {
    V sum[ROWS][WIDE];
    for (auto& row : sum)
        for (V& one : row) one = V::set(0.0f);
    for (int k = 0; k < depth; k++, weight += WIDE * V::lanes) {
        V column[WIDE];
        for (int i = 0; i < WIDE; i++) column[i] = V::load(weight + i * V::lanes);
        for (int row = 0; row < ROWS; row++) {
            V value = V::set(widen(x[row][k]));
            for (int i = 0; i < WIDE; i++) sum[row][i] = fma(value, column[i], sum[row][i]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < WIDE; i++) sum[row][i].store(sums + row * PANEL + i * V::lanes);
}

template <class V, class T, int WIDE>
void sums_of(const Linear& w, const Rows& x, int row, int rows, int tile, float* sums) {
    constexpr int width = WIDE * V::lanes;
    const T* weight = static_cast<const T*>(w.weight) + size_t(tile) * 16 * w.k_padded;
    for (int column = 0; column < PANEL; column += width, weight += size_t(width) * w.k_padded) {
        for (int done = 0; done < rows;) {
            const T* at[4];
            int count = rows - done < 4 ? rows - done : 4;
            for (int i = 0; i < count; i++) at[i] = reinterpret_cast<const T*>(x.at(row + done + i, 0));
            float* to = sums + done * PANEL + column;
            switch (count) {
                case 1: block<V, T, 1, WIDE>(weight, at, w.k_padded, to); break;
                case 2: block<V, T, 2, WIDE>(weight, at, w.k_padded, to); break;
                case 3: block<V, T, 3, WIDE>(weight, at, w.k_padded, to); break;
                default: block<V, T, 4, WIDE>(weight, at, w.k_padded, to);
            }
            done += count;
        }
    }
}

template <class V, int WIDE>
void sums_typed(const Linear& w, const Rows& x, int row, int rows, int tile, float* sums) {
    if (w.type == BF16) {
        sums_of<V, bf16, WIDE>(w, x, row, rows, tile, sums);
    } else {
        sums_of<V, float, WIDE>(w, x, row, rows, tile, sums);
    }
}

}  // namespace

void sums_portable(const Linear& w, const Rows& x, int row, int rows, int tile, float* sums) {
    sums_typed<VecPortable, 2>(w, x, row, rows, tile, sums);
}

#if defined(__AVX2__) && defined(__FMA__)
void sums_avx2(const Linear& w, const Rows& x, int row, int rows, int tile, float* sums) {
    sums_typed<Vec256, 2>(w, x, row, rows, tile, sums);
}
#else
void sums_avx2(const Linear&, const Rows&, int, int, int, float*) {}
#endif

#ifdef STREAMSERVE_AVX512
void sums_avx512(const Linear& w, const Rows& x, int row, int rows, int tile, float* sums) {
    sums_typed<Vec512, 4>(w, x, row, rows, tile, sums);
}
#else
void sums_avx512(const Linear&, const Rows&, int, int, int, float*) {}
#endif

}  // namespace streamserve
