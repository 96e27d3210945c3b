// Decoder layers from hidden states to hidden states, as one job of the pool.
#pragma once

#include "attention.h"
#include "gemm.h"
#include "lora.h"

namespace streamserve {

// A mixture of experts. The router, in float32, has an output for each of `count` experts; each row takes the
// `chosen` experts with the largest outputs. All rows take a `shared` expert; if it is `gated`, the router has one more
// output: its gate. `gate_up` and `down` are the matrices of the experts, then of the shared expert.
//
// The weights of the chosen experts are the softmax of the outputs, or with `sigmoid` their sigmoids. They sum to 1 if
// `normalized`, and are then multiplied by `scale`. With `sigmoid`, the sigmoid plus `correction` [count] chooses
// (null: plus 0), and only within the `chosen_groups` of `groups` equal groups of experts that have the largest sums of
// their two largest numbers.
struct Experts {
    Linear router;
    const Linear *gate_up, *down;
    const float* correction;
    int32_t count, chosen, groups, chosen_groups, shared, gated, normalized, sigmoid;
    float scale;
};
ABI_STRUCT(Experts, ABI_FIELD(router), ABI_FIELD(gate_up), ABI_FIELD(down), ABI_FIELD(correction), ABI_FIELD(count),
           ABI_FIELD(chosen), ABI_FIELD(groups), ABI_FIELD(chosen_groups), ABI_FIELD(shared), ABI_FIELD(gated),
           ABI_FIELD(normalized), ABI_FIELD(sigmoid), ABI_FIELD(scale));

// One layer's weights. Norms are float32, or null where a layer has none:
//
//   attention_norm, mlp_norm             of the input of attention and MLP
//   attention_post_norm, mlp_post_norm   of their output, before it is added to the hidden states
//   head_norm                            of queries and keys, [query heads + key heads][dim]
//
// `gate_up` is packed in panels of 32 gates and their 32 values. A layer may have `experts` instead of
// `gate_up` and `down`. `sinks`: attention's sinks. `rope`: the number of its rotation in the step; -1: none.
struct Layer {
    const float *attention_norm, *attention_post_norm, *head_norm, *mlp_norm, *mlp_post_norm, *sinks;
    const Experts* experts;
    Linear qkv, out, gate_up, down;
    int32_t window, rope;
};
ABI_STRUCT(Layer, ABI_FIELD(attention_norm), ABI_FIELD(attention_post_norm), ABI_FIELD(head_norm),
           ABI_FIELD(mlp_norm), ABI_FIELD(mlp_post_norm), ABI_FIELD(sinks), ABI_FIELD(experts), ABI_FIELD(qkv),
           ABI_FIELD(out), ABI_FIELD(gate_up), ABI_FIELD(down), ABI_FIELD(window), ABI_FIELD(rope));

// A model. The first `rotary` of a head's `dim` numbers are rotated. `wide_norms`: see Norm in elementwise.h.
// `joint_head_norm`: all queries of a row are normalized as one vector, and all its keys as another, instead of each
// head. The outputs of attention and MLP are multiplied by `residual_scale`, unless they are normalized.
struct Model {
    const Layer* layers;
    int32_t hidden, heads, kv_heads, dim, rotary, path, type, wide_norms, joint_head_norm;
    float epsilon, residual_scale;
    Scoring scoring;
    Gating gating;
};
ABI_STRUCT(Model, ABI_FIELD(layers), ABI_FIELD(hidden), ABI_FIELD(heads), ABI_FIELD(kv_heads), ABI_FIELD(dim),
           ABI_FIELD(rotary), ABI_FIELD(path), ABI_FIELD(type), ABI_FIELD(wide_norms), ABI_FIELD(joint_head_norm),
           ABI_FIELD(epsilon), ABI_FIELD(residual_scale), ABI_FIELD(scoring), ABI_FIELD(gating));

// A step's rows. `cos`, `sin` [rotations][rows][rotary / 2] and `query_scales` [rows] are of the model's type.
// `query_scales` multiply the queries after their rotation; null: nothing does. `slots` [rows]: numbers of the rows'
// slots in the cache. `lora`: the rows' adapters; null if no row has one.
struct Step {
    const Span* spans;
    const int64_t* slots;
    const void* cos;
    const void* sin;
    const void* query_scales;
    const Lora* lora;
    int32_t span_count, rows;
};
ABI_STRUCT(Step, ABI_FIELD(spans), ABI_FIELD(slots), ABI_FIELD(cos), ABI_FIELD(sin),
           ABI_FIELD(query_scales), ABI_FIELD(lora), ABI_FIELD(span_count), ABI_FIELD(rows));

// The cache of all layers, `layer_stride` bytes apart, with vectors as in CacheLayer. `written` counts the
// layers whose keys and values have been written, over all steps: so an observer may read a layer while the
// next ones are computed.
struct Cache {
    void* data;
    size_t layer_stride;
    int64_t* written;
    int32_t block_size, quantized;
};
ABI_STRUCT(Cache, ABI_FIELD(data), ABI_FIELD(layer_stride), ABI_FIELD(written), ABI_FIELD(block_size),
           ABI_FIELD(quantized));

// Run layers `first` to `last` (exclusive) on `hidden` [rows][hidden], in place.
void run_layers(Pool& pool, const Model& model, const Step& step, const Cache& cache, void* hidden, int first,
                int last);

// Write the RMSNorm of each row of `from` to `to`, both [rows][size].
void norm_rows(Pool& pool, const void* from, const float* weight, int rows, int size, float epsilon, bool wide,
               int path, int type, void* to);

// For one layer, write the keys and values of `qkv` [rows][heads + 2 kv_heads][dim] to the cache, then attend.
void write_and_attend(Pool& pool, const Step& step, const CacheLayer& cache, const void* qkv, int heads,
                      int window, Scoring scoring, const float* sinks, int path, void* out);

}  // namespace streamserve
