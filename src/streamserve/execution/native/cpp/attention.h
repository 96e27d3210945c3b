// Softmax attention of a step's rows over the paged cache.
//
// A query visits the keys it sees in order of position: in tiles of 128 keys and ranges of 512, both aligned
// to absolute positions. Within a range the softmax is online; at its end the range's result is merged into
// the query's total. Everything a query meets is thus a function of its own position and keys: the
// chunks of a sequence, the other rows of the step, and the thread that computes a range change no bit.
//
//   position   0 ───────── 512 ───────── 1024 ──── root ─┬─ tree nodes
//   ranges     [  merged   ][   merged    ][   merged      ]        tiles below a tree's root are shared by
//   tiles      |128|128|…                                          its rows; after it each row has its path
#pragma once

#include <vector>

#include "common.h"
#include "pool.h"

namespace streamserve {

constexpr int KEY_TILE = 128;
constexpr int KEY_RANGE = 512;
constexpr int QUERY_TILE = 16;    // queries: rows × the query heads that share a key-value head
constexpr int MAX_QUERIES = 256; // of one item

// Some query tokens of a sequence. Tokens are at positions `start`, `start` + 1, …; the last of the `linear`
// first is the root of a tree if there are more. `parents` of the tree's nodes, the root first (-1). With
// `linear` below 1 the root lies 1 - `linear` places before the first row, which is that node of the tree.
struct Span {
    const int32_t* blocks;
    const int32_t* parents;
    int32_t row, rows, start, linear;
};
ABI_STRUCT(Span, ABI_FIELD(blocks), ABI_FIELD(parents), ABI_FIELD(row), ABI_FIELD(rows), ABI_FIELD(start),
           ABI_FIELD(linear));

// One layer of the cache: [block][k|v][head][slot][vector]. A vector is `dim` numbers of `type` or, with
// `quantized`, `dim` integers and their scale (kv_vectors.h). Attention computes in `type` in either case.
struct CacheLayer {
    void* data;
    int32_t block_size, kv_heads, dim, type, quantized;

    size_t vector_bytes() const { return size_t(dim) * (quantized ? 1 : size_of(type)) + (quantized ? 4 : 0); }

    char* at(int64_t block, int which, int head, int slot) const {
        size_t vector = ((size_t(block) * 2 + size_t(which)) * size_t(kv_heads) + size_t(head)) *
                            size_t(block_size) + size_t(slot);
        return static_cast<char*>(data) + vector * vector_bytes();
    }
};
ABI_STRUCT(CacheLayer, ABI_FIELD(data), ABI_FIELD(block_size), ABI_FIELD(kv_heads), ABI_FIELD(dim), ABI_FIELD(type),
           ABI_FIELD(quantized));

// Some rows of a span and the keys of some whole ranges: what one thread does for one key-value head.
// `part` numbers what is merged later by another; -1: this is all, the result goes out at once.
struct Item {
    int span, row, rows, begin, end, part, parts;
};

// What becomes of a product of query and key before the softmax: product · scale, and with a `cap` other than
// 0 cap · tanh(product · scale / cap).
struct Scoring {
    float scale, cap;
};
ABI_STRUCT(Scoring, ABI_FIELD(scale), ABI_FIELD(cap));

struct Attention {
    const Span* spans;
    const void* q;     // [row][head][dim], rows `q_stride` numbers apart
    size_t q_stride;
    int heads, path;
    int window;        // latest positions a row sees, itself included; 0: all
    Scoring scoring;
    CacheLayer cache;
    Rows out;          // [row][head · dim]
    const float* sinks = nullptr;  // of each head: a score whose key has no value; null: none
};

// The items of a step. Splits ranges between threads where there are fewer sequences than threads.
std::vector<Item> plan_items(const Span* spans, int count, int group, int kv_heads, int window, int threads);

// Numbers of float32 that the parts of `items` take for all heads.
size_t part_floats(const std::vector<Item>& items, int group, int kv_heads, int dim);

// Called by every thread of a job, which ends with a barrier inside if there are parts.
void attend(Pool& pool, int thread, const Attention& attention, const std::vector<Item>& items, float* parts);

}  // namespace streamserve
