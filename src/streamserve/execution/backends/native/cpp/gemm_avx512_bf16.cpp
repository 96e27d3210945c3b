// Products on the AVX512_BF16 path: sums of up to 6 rows × 64 columns stay in registers over all of K.
#include "gemm.h"

#ifdef __AVX512BF16__
#include <immintrin.h>
#endif

namespace streamserve {

#ifdef __AVX512BF16__
namespace {

constexpr int PAIR_BYTES = PANEL * 4;  // bytes of 64 columns for a pair of k
constexpr int AHEAD = 16;              // distance of prefetching in cache lines

template <int ROWS>
void block(const char* weight, const char* const* x, int pairs, Lines& lines, float* sums) {
    __m512 sum[ROWS][4];
    for (auto& row : sum)
        for (__m512& one : row) one = _mm512_setzero_ps();
    for (int pair = 0; pair < pairs; pair++) {
        const char* line = weight + size_t(pair) * PAIR_BYTES;
        lines.fetch_one();
        __m512bh column[4];
        for (int i = 0; i < 4; i++) {
            _mm_prefetch(line + (AHEAD + i) * 64, _MM_HINT_T0);
            column[i] = (__m512bh)_mm512_loadu_si512(line + i * 64);
        }
        for (int row = 0; row < ROWS; row++) {
            int32_t two;
            std::memcpy(&two, x[row] + size_t(pair) * 4, 4);
            __m512bh values = (__m512bh)_mm512_set1_epi32(two);
            for (int i = 0; i < 4; i++) sum[row][i] = _mm512_dpbf16_ps(sum[row][i], values, column[i]);
        }
    }
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < 4; i++) _mm512_storeu_ps(sums + row * PANEL + i * 16, sum[row][i]);
}

}  // namespace

void sums_avx512_bf16(const Linear& w, const Rows& x, int row, int rows, int tile, Lines& lines, float* sums) {
    const char* weight = static_cast<const char*>(w.weight) + size_t(tile) * 16 * w.k_padded * 2;
    for (int done = 0; done < rows;) {
        const char* at[6];
        int left = rows - done, count = left < 6 ? left : 6;
        if (left == 7 || left == 8) count = 4;  // two blocks of about equal size: 4 + 3 or 4 + 4
        for (int i = 0; i < count; i++) at[i] = x.at(row + done + i, 0);
        float* to = sums + done * PANEL;
        switch (count) {
            case 1: block<1>(weight, at, w.k_padded / 2, lines, to); break;
            case 2: block<2>(weight, at, w.k_padded / 2, lines, to); break;
            case 3: block<3>(weight, at, w.k_padded / 2, lines, to); break;
            case 4: block<4>(weight, at, w.k_padded / 2, lines, to); break;
            case 5: block<5>(weight, at, w.k_padded / 2, lines, to); break;
            default: block<6>(weight, at, w.k_padded / 2, lines, to);
        }
        done += count;
    }
    lines.fetch_rest();
}

#else

void sums_avx512_bf16(const Linear&, const Rows&, int, int, int, Lines&, float*) {}

#endif

}  // namespace streamserve
