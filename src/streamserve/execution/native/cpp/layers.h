// Decoder layers from hidden states to hidden states, as one job of the pool.
#pragma once

#include "attention.h"
#include "gemm.h"

namespace streamserve {

// One layer's weights; norms are of the model's type. `head_norm` [query heads + key heads][dim] or null.
// `gate_up` is packed in panels of 32 gates and their 32 values.
struct Layer {
    const void* attention_norm;
    const void* head_norm;
    const void* mlp_norm;
    Linear qkv, out, gate_up, down;
    int32_t window;
};

struct Model {
    const Layer* layers;
    int32_t hidden, heads, kv_heads, dim, path, type;
    float epsilon;
};

// A step's rows. `cos`, `sin` [rows][dim / 2] of the model's type; `slots` [rows] number the cache's slots.
struct Step {
    const Span* spans;
    const int64_t* slots;
    const void* cos;
    const void* sin;
    int32_t span_count, rows;
};

// The cache of all layers, `layer_stride` bytes apart, with vectors as in CacheLayer. `written` counts the
// layers whose keys and values are there, over all steps: an observer may read a layer while the next ones are
// computed.
struct Cache {
    void* data;
    size_t layer_stride;
    int64_t* written;
    int32_t block_size, quantized;
};

// `hidden` [rows][hidden], in place, through layers `first` to `last`.
void run_layers(Pool& pool, const Model& model, const Step& step, const Cache& cache, void* hidden, int first,
                int last);

// RMSNorm of all rows, from one matrix to another, both [rows][size].
void norm_rows(Pool& pool, const void* from, const void* weight, int rows, int size, float epsilon, int path,
               int type, void* to);

// For one layer: writes keys and values, of `qkv` [rows][heads + 2 kv_heads][dim], to the cache, attends.
void write_and_attend(Pool& pool, const Step& step, const CacheLayer& cache, const void* qkv, int heads,
                      int window, int path, void* out);

}  // namespace streamserve
