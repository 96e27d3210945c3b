// The functions that Python calls. None of them throws, since Python could not catch it: `ss_pool_new` returns an
// error, and if the system refuses memory, the process ends with a message (see Buffer::get).
#include <sys/mman.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "abi.h"
#include "gemm.h"
#include "layers.h"
#include "pack.h"
#include "sampling.h"

using namespace streamserve;

namespace {

enum Shared { INPUT = 0 };

// Copy `count` bytes, then write zeros up to `size`, which is 64 or 128. Constant sizes let the compiler copy
// a whole chunk, the usual case, in a few instructions.
void copy_chunk(char* to, const char* from, size_t count, size_t size) {
    if (count == size && size == 64) {
        std::memcpy(to, from, 64);
    } else if (count == size) {
        std::memcpy(to, from, 128);
    } else {
        std::memcpy(to, from, count);
        std::memset(to + count, 0, size - count);
    }
}

// Copy `x` [rows, k], with `stride` numbers between rows, to the layout of the kernels, padded.
Rows lay_out(Pool& pool, const Linear& linear, const void* x, size_t stride, int rows) {
    size_t number = size_of(linear.type);
    char* memory = pool.shared(INPUT, rows_bytes(rows, linear.type, linear.k_padded));
    Rows to = rows_for(memory, linear.path, linear.type, linear.k_padded);
    int chunks = linear.k_padded / CHUNK;
    // Copy a tile's 16 rows chunk by chunk: with AMX, adjacent memory is written.
    pool.run([&](int) {
        for (int tile; (tile = pool.claim()) < ceil_div(rows, ROW_TILE);) {
            int first = tile * ROW_TILE, last = first + ROW_TILE < rows ? first + ROW_TILE : rows;
            for (int chunk = 0; chunk < chunks; chunk++) {
                int left = linear.k - chunk * CHUNK, count = left < 0 ? 0 : left < CHUNK ? left : CHUNK;
                for (int row = first; row < last; row++) {
                    const char* from = static_cast<const char*>(x) +
                                       (size_t(row) * stride + size_t(chunk) * CHUNK) * number;
                    copy_chunk(to.at(row, chunk), from, size_t(count) * number, CHUNK * number);
                }
            }
        }
    }, light(linear.path, rows, size_t(linear.k_padded)));
    return to;
}

}  // namespace

extern "C" {

int ss_path_supported(int path, int type) noexcept { return path_supported(path, type); }

// Return the number of operations of all threads together. See multiply_registers.
double ss_multiply_registers(void* pool_, int path, int bits, int rounds) noexcept {
    Pool& pool = *static_cast<Pool*>(pool_);
    double operations = 0;
    pool.run([&](int thread) {
        double done = multiply_registers(path, bits, rounds);
        if (thread == 0) operations = done * pool.threads();
    });
    return operations;
}

// Return a new pool, or null if the system refuses a thread or memory, with the errno in `error`.
void* ss_pool_new(int threads, const int32_t* cpus, int32_t* error) noexcept {
    try {
        return new Pool(threads, cpus);
    } catch (const std::system_error& refused) {
        *error = refused.code().value();
    } catch (const std::bad_alloc&) {
        *error = ENOMEM;
    }
    return nullptr;
}
void ss_pool_delete(void* pool) noexcept { delete static_cast<Pool*>(pool); }

// See pack.h. `rows` [n_padded]. ss_pack and ss_quantize return whether all numbers are finite.
int ss_pack(void* pool, const Linear* linear, const void* const* rows, int source, void* to) noexcept {
    return pack(*static_cast<Pool*>(pool), *linear, {rows, source}, to);
}

int ss_quantize(void* pool, const Linear* linear, const void* const* rows, int source, int symmetric, void* to,
                void* scales, void* zeros) noexcept {
    return quantize(*static_cast<Pool*>(pool), *linear, {rows, source}, symmetric != 0, to,
                    static_cast<bf16*>(scales), static_cast<int8_t*>(zeros));
}

void ss_pack_integers(void* pool, const Linear* linear, const uint8_t* const* rows, void* to) noexcept {
    pack_integers(*static_cast<Pool*>(pool), *linear, rows, to);
}

// See pack.h. `rows` and `types` [n_padded]. Returns a PackResult.
int ss_pack_blocks(void* pool, const Linear* linear, const uint8_t* const* rows, const int32_t* types, void* to,
                   void* scales, void* minimums) noexcept {
    Pool& own = *static_cast<Pool*>(pool);
    return int(pack_blocks(own, *linear, {rows, types}, to, scales, minimums));
}

// See pack.h. Returns whether all numbers are finite.
int ss_unpack_floats(void* pool, const uint8_t* const* rows, const int32_t* types, int count, int k, int type,
                     void* to) noexcept {
    return unpack_floats(*static_cast<Pool*>(pool), {rows, types}, count, k, type, to);
}

// Unpack the outputs `rows` [count] of a packed weight to `to` [count, k].
void ss_rows(void* pool_, const Linear* linear, const int64_t* rows, int count, void* to) noexcept {
    Pool& pool = *static_cast<Pool*>(pool_);
    size_t size = size_t(linear->k) * size_of(linear->type);
    pool.run([&](int) {
        for (int i; (i = pool.claim()) < count;) {
            unpack(*linear, int(rows[i]), static_cast<char*>(to) + size_t(i) * size);
        }
    }, light(linear->path, count, size_t(linear->k)));
}

// out [rows, n] = x [rows, k] Wᵀ + b, in the weight's type or, if `wide`, in float32. Wide results are
// multiplied by `scale` and, with a `cap` other than 0, capped: cap · tanh(y / cap).
void ss_linear(void* pool_, const Linear* linear, const void* x, size_t stride, int rows, void* out, int wide,
               float scale, float cap) noexcept {
    Pool& pool = *static_cast<Pool*>(pool_);
    Rows in = lay_out(pool, *linear, x, stride, rows);
    Finish finish{Finish::STORE, linear->type, wide != 0, out, size_t(linear->n), {}, scale, cap};
    pool.run([&](int thread) {
        KernelState state;
        multiply(pool, thread, *linear, in, rows, finish);
    }, light(linear->path, rows, size_t(linear->n_padded) * size_t(linear->k_padded)));
}

void ss_layers(void* pool, const Model* model, const Step* step, const Cache* cache, void* hidden, int first,
               int last) noexcept {
    run_layers(*static_cast<Pool*>(pool), *model, *step, *cache, hidden, first, last);
}

void ss_norm(void* pool, const void* from, const float* weight, int rows, int size, float epsilon, int wide,
             int path, int type, void* to) noexcept {
    norm_rows(*static_cast<Pool*>(pool), from, weight, rows, size, epsilon, wide != 0, path, type, to);
}

void ss_attend(void* pool, const Step* step, const CacheLayer* cache, const void* qkv, int heads, int window,
               float scale, float cap, const float* sinks, int path, void* out) noexcept {
    write_and_attend(*static_cast<Pool*>(pool), *step, *cache, qkv, heads, window, {scale, cap}, sinks, path, out);
}

void ss_sample(void* pool, const float* logits, int vocabulary, const Draw* draws, int count,
               int32_t* tokens) noexcept {
    sample(*static_cast<Pool*>(pool), logits, vocabulary, draws, count, tokens);
}

void ss_select_draft_tokens(void* pool, const float* logits, int vocabulary, const Draw* draws,
                            int count, int best, int32_t* tokens, double* scores) noexcept {
    select_draft_tokens(*static_cast<Pool*>(pool), logits, vocabulary, draws, count, best, tokens, scores);
}

// Request large pages for memory that will be filled and read in large pieces.
void ss_large_pages(void* from, size_t bytes) noexcept { madvise(from, bytes, MADV_HUGEPAGE); }

// Return the sum of some memory, read by all threads. Used to measure the memory's rate.
uint64_t ss_read(void* pool_, const uint64_t* from, size_t words) noexcept {
    Pool& pool = *static_cast<Pool*>(pool_);
    constexpr size_t piece = 1 << 14;
    std::atomic<uint64_t> total{0};
    pool.run([&](int) {
        uint64_t sum = 0;
        for (size_t begin; (begin = size_t(pool.claim()) * piece) < words;) {
            size_t end = begin + piece < words ? begin + piece : words;
            for (size_t i = begin; i < end; i++) sum += from[i];
        }
        total += sum;
    });
    return total;
}

}

std::vector<AbiFunction> streamserve::abi_functions() {
    return {
        ABI_FUNCTION(ss_path_supported),
        ABI_FUNCTION(ss_multiply_registers),
        ABI_FUNCTION(ss_pool_new),
        ABI_FUNCTION(ss_pool_delete),
        ABI_FUNCTION(ss_pack),
        ABI_FUNCTION(ss_quantize),
        ABI_FUNCTION(ss_pack_integers),
        ABI_FUNCTION(ss_pack_blocks),
        ABI_FUNCTION(ss_unpack_floats),
        ABI_FUNCTION(ss_rows),
        ABI_FUNCTION(ss_linear),
        ABI_FUNCTION(ss_layers),
        ABI_FUNCTION(ss_norm),
        ABI_FUNCTION(ss_attend),
        ABI_FUNCTION(ss_sample),
        ABI_FUNCTION(ss_select_draft_tokens),
        ABI_FUNCTION(ss_large_pages),
        ABI_FUNCTION(ss_read),
    };
}
