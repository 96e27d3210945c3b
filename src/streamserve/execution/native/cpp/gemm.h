// y = x Wᵀ + b on weights packed once.
//
// Each output is one float32 accumulator that takes its products in ascending order of pairs of K, the second of a pair
// first (AMX has an order of its own), in the same instructions for any number of rows; threads share outputs, never a sum. So a row's bits never depend on
// the rows multiplied with it, nor on the number of threads.
//
// How a weight [n, k] is packed, so that every kernel reads memory from front to back (n in panels of 64):
//
//   AMX           [n/16][k/32] tiles of 1 KB: 16 pairs of k × 16 columns × 2        a stream each 16 columns
//   AVX512_BF16   [n/64][k/2][64][2]                                                a stream each 64 columns
//   others        [n/w][k][w], w two vectors: 32, 16 or 16; bf16 of the two alternating (vec.h: load_tile)
//   e4m3          as others, on AMX and AVX512_BF16 as on AVX512
#pragma once

#include <utility>

#include "common.h"
#include "lora.h"
#include "pool.h"
#include "processor.h"

namespace streamserve {

// How gates are activated. CLAMPED_SILU has `limit`s of gate and value, and the factor `alpha` of its exponent.
struct Gating {
    int activation;
    float alpha, limit;
};
ABI_STRUCT(Gating, ABI_FIELD(activation), ABI_FIELD(alpha), ABI_FIELD(limit));

// What becomes of sums [rows][64 columns]; all of them are rounded to the model's type first.
struct Finish {
    enum Kind {
        STORE,     // out[row, column] = sum, or cap · tanh(sum · scale / cap)
        ADD,       // out[row, column] += sum · scale, rounded again after a scale other than 1
        GATE_MUL,  // columns 0 to 31 of a panel are gates, the others values: chunk = act(gate) · value
    };
    Kind kind;
    int type;          // of sums and of `out`; what STORE writes may be `wide`: float32, not rounded
    bool wide;
    void* out;         // STORE, ADD
    size_t stride;     // of `out`, in numbers
    Rows chunks;       // GATE_MUL
    float scale = 1;   // STORE if wide, ADD
    float cap = 0;     // STORE if wide; 0: none
    Gating gating = {}; // GATE_MUL
    LowRankProducts lora = {};  // what adapters add to the sums
};

// Called by every thread of a job; `x` is laid out by rows_for. Returns without waiting for the others.
void multiply(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows, const Finish& finish);

// Weight tiles to be fetched to L2 meanwhile: `count` streams of tiles, `stride` bytes apart.
struct Prefetch {
    const char* tiles = nullptr;
    size_t stride = 0;
    int count = 0;

    // Shared between two passes.
    std::pair<Prefetch, Prefetch> halves() const {
        int first = (count + 1) / 2;
        return {{tiles, stride, first}, {tiles + size_t(first) * stride, stride, count - first}};
    }
};

// Sums of rows `row` to `row + rows`, up to 32, and of a panel's four column tiles (16
// columns each) from `tile` on, to `sums` [rows rounded up to 16][64]. With AMX there may be one tile only.
void sums_amx(const Linear& w, const Rows& x, int row, int rows, int tile, int tiles, const Prefetch& prefetch,
              float* sums);
void sums_avx512_bf16(const Linear& w, const Rows& x, int row, int rows, int tile, Lines& lines, float* sums);

// The paths that multiply in float32, and e4m3 on any path: called by every thread of a job.
void multiply_float32(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                      const Finish& finish);

// Weights of 8 or 4 bits: called by every thread of a job.
void multiply_integers(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                       const Finish& finish);

// AMX for more than a strip of rows: called by every thread of a job.
void multiply_blocks(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                     const Finish& finish);

// Whether a product of so many rows and weights is done before a second thread would be there: they fit in
// one core's L2 cache, and multiplying takes some ten microseconds.
bool light(int path, int rows, size_t weights);

// What this build can do on this processor.
bool path_supported(int path, int type);

// Multiplies what is in registers of the calling thread, with `bits` a weight (16 or 32 by `path`'s own
// instructions, 8 by those that it takes for integers). Returns how many operations that were, 0 for
// the portable path and what this build has no instructions for.
double multiply_registers(int path, int bits, int rounds);

// Each thread around its use of tile registers; nothing where there are none.
void amx_begin();
void amx_end();
bool amx_supported();

// The state in which a thread computes, while it lives: it may use tile registers, and tiny numbers are zero.
class KernelState {
  public:
    KernelState() { amx_begin(); }
    ~KernelState() { amx_end(); }
    KernelState(const KernelState&) = delete;
    KernelState& operator=(const KernelState&) = delete;

  private:
    FlushTiny flush_;
};

}  // namespace streamserve
