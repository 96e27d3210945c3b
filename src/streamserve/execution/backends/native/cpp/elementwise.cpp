#include "elementwise.h"

namespace streamserve {

namespace {

template <class V, class T>
void end_rows(const Linear& linear, const Finish& finish, int row, int rows, int column, int columns,
              float* sums) {
    for (int i = 0; i < rows; i++, sums += PANEL) {
        end_row<V, T>(linear, finish, row + i, column, columns, sums);
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
