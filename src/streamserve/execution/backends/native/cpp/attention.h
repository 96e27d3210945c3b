// Softmax attention of a step's rows over the paged cache.
//
// A query reads the keys that it sees in order of position, in tiles of 128 keys and ranges of 512 keys, both
// aligned to absolute positions. Within a range the softmax is online; at its end the range's result is
// merged into the query's total. So a query's operations depend only on its position and keys: the chunks of
// a sequence, the other rows of the step, and the thread that computes a range change no bit.
//
//   position   0 ───────── 512 ───────── 1024 ──── root ─┬─ tree nodes
//   ranges     [  merged   ][   merged    ][   merged      ]        tiles up to a tree's root are computed for all
//   tiles      |128|128|…                                          its rows; after the root, for each row's path
#pragma once

#include <vector>

#include "common.h"
#include "pool.h"

namespace streamserve {

constexpr int KEY_TILE = 128;
constexpr int KEY_RANGE = 512;
constexpr int QUERY_TILE = 16;   // queries: rows × the query heads that share a key-value head
constexpr int MAX_QUERIES = 256; // of one item

// Query tokens of a sequence: `rows` rows from `row` on. The first `linear` tokens are at positions `start`,
// `start` + 1, … If there are more rows, the last of these tokens is the root of a tree, and the other rows
// are its nodes. `parents`: of all nodes, the root first (-1). If `linear` is below 1, the root, at position
// `start` + `linear` - 1, has no row, and the first row is node 1 - `linear`.
struct Span {
    const int32_t* blocks;
    const int32_t* parents;
    int32_t row, rows, start, linear;
};
ABI_STRUCT(Span, ABI_FIELD(blocks), ABI_FIELD(parents), ABI_FIELD(row), ABI_FIELD(rows), ABI_FIELD(start),
           ABI_FIELD(linear));

// One layer of the cache: [block][k|v][head][slot][vector]. A vector has `dim` numbers of `type` or, if
// `quantized`, `dim` integers and their scale (kv_vectors.h). Attention computes in `type` in both cases.
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

// Work of one thread for each key-value head: some rows of a span, and the keys of some whole ranges. `part`:
// number of the first query of its partial results, which are merged later; -1: the result is complete.
// `parts`: number of parts to merge, in the first of them; 0 in the others.
struct Item {
    int span, row, rows, begin, end, part, parts;
};

// The score of a product of query and key, before the softmax: product · scale or, with a `cap` other than 0,
// cap · tanh(product · scale / cap).
struct Scoring {
    float scale, cap;
};
ABI_STRUCT(Scoring, ABI_FIELD(scale), ABI_FIELD(cap));

struct Attention {
    const Span* spans;
    const void* q;     // [row][head][dim], rows `q_stride` numbers apart
    size_t q_stride;
    int heads, path;
    int window;        // number of latest positions that a row sees, its own included; 0: all
    Scoring scoring;
    CacheLayer cache;
    Rows out;          // [row][head · dim]
    const float* sinks = nullptr;  // for each head, the score of a key that has no value; null: no sinks
};

// Return the items of a step. Divides the keys of items by range where there are too few items for the threads.
std::vector<Item> plan_items(const Span* spans, int count, int group, int kv_heads, int window, int threads);

// Return the number of float32 values that the parts of `items` take for all heads.
size_t part_floats(const std::vector<Item>& items, int group, int kv_heads, int dim);

// Called by every thread of a job. If there are parts, threads meet in a barrier before the parts are merged.
void attend(Pool& pool, int thread, const Attention& attention, const std::vector<Item>& items, float* parts);

}  // namespace streamserve
