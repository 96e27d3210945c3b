// y = x Wᵀ + b on weights packed once.
//
// Each output is one float32 accumulator. Products are added in ascending order of pairs of k, the second of a pair
// first (AMX adds in a different order), by the same instructions for any number of rows. Threads share outputs,
// never a sum. So a row's bits depend neither on the rows multiplied with it nor on the number of threads.
//
// How a weight [n, k] is packed, so that every kernel reads memory from front to back (n in panels of 64):
//
//   AMX           [n/16][k/32] tiles of 1 KB: 16 pairs of k × 16 columns × 2        a stream for 16 columns
//   AVX512_BF16   [n/64][k/2][64][2]                                                a stream for 64 columns
//   other paths   [n/w][k][w], where w is two vectors: 32 columns on AVX512, otherwise 16;
//                 in bf16, numbers of the two vectors alternate (vec.h: load_tile)
//   e4m3          as on other paths; on AMX and AVX512_BF16 as on AVX512
#pragma once

#include <utility>

#include "common.h"
#include "lora.h"
#include "pool.h"
#include "processor.h"

namespace streamserve {

// The activation of gates. CLAMPED_SILU has the `limit` of gates and values, and the factor `alpha` of its exponent.
struct Gating {
    int activation;
    float alpha, limit;
};
ABI_STRUCT(Gating, ABI_FIELD(activation), ABI_FIELD(alpha), ABI_FIELD(limit));

// How sums [rows][64 columns] become results. All sums are first rounded to the model's type, unless `wide`.
struct Finish {
    enum Kind {
        STORE,     // out[row, column] = sum, or cap · tanh(sum · scale / cap)
        ADD,       // out[row, column] += sum · scale, rounded again after a scale other than 1
        GATE_MUL,  // columns 0 to 31 of a panel are gates, 32 to 63 values: chunk = act(gate) · value
    };
    Kind kind;
    int type;          // of sums and of `out`
    bool wide;         // STORE: write float32 that is not rounded
    void* out;         // STORE, ADD
    size_t stride;     // of `out`, in numbers
    Rows chunks;       // GATE_MUL
    float scale = 1;   // STORE if wide, ADD
    float cap = 0;     // STORE if wide; 0: none
    Gating gating = {}; // GATE_MUL
    LowRankProducts lora = {};  // the adapters' products, added to the sums
};

// Called by every thread of a job. `x` is laid out by rows_for. Returns without waiting for the other threads.
void multiply(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows, const Finish& finish);

// Weight tiles to prefetch to L2 during a multiplication: `count` streams of tiles, `stride` bytes apart.
struct Prefetch {
    const char* tiles = nullptr;
    size_t stride = 0;
    int count = 0;

    // Return the streams divided between two passes.
    std::pair<Prefetch, Prefetch> halves() const {
        int first = (count + 1) / 2;
        return {{tiles, stride, first}, {tiles + size_t(first) * stride, stride, count - first}};
    }
};

// Write to `sums` [rows rounded up to 16][64] the sums of up to 32 rows from `row` on, for `tiles` column
// tiles of 16 columns from `tile` on: the four of a panel or, with AMX, a single one.
void sums_amx(const Linear& w, const Rows& x, int row, int rows, int tile, int tiles, const Prefetch& prefetch,
              float* sums);
void sums_avx512_bf16(const Linear& w, const Rows& x, int row, int rows, int tile, Lines& lines, float* sums);

// Products on the paths that multiply in float32, and with e4m3 weights on any path. Called by every thread of a job.
void multiply_float32(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                      const Finish& finish);

// Products with weights of 8 or 4 bits. Called by every thread of a job.
void multiply_integers(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                       const Finish& finish);

// Products with AMX of more than 32 rows. Called by every thread of a job.
void multiply_blocks(Pool& pool, int thread, const Linear& linear, const Rows& x, int rows,
                     const Finish& finish);

// Return whether one thread finishes a product of `rows` rows with `weights` numbers before a second thread could
// start: the weights fit in one core's L2 cache, and multiplying takes about ten microseconds.
bool light(int path, int rows, size_t weights);

// Return whether this build has the path for a type, and this processor the path's instructions.
bool path_supported(int path, int type);

// Multiply numbers in registers of the calling thread, `rounds` times. `bits` of a weight: 16 or 32 for the
// float instructions of `path`, 8 for its integer instructions. Returns the number of operations; 0 for the
// portable path and for instructions that this build does not have.
double multiply_registers(int path, int bits, int rounds);

// Called by each thread before and after it uses tile registers. Without AMX, they do nothing.
void amx_begin();
void amx_end();
bool amx_supported();

// While a KernelState lives, the calling thread may use tile registers and treats tiny numbers as zero (FlushTiny).
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
