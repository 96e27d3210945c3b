#include "layers.h"

#include <algorithm>
#include <map>

#include "experts.h"
#include "kv_vectors.h"

namespace streamserve {

namespace {

// Numbers of the pool's shared buffers; experts.h uses the numbers between.
enum Memory { NORMED = 1, QKV, ATTENDED, INNER, PARTS, PROJECTED, PRODUCTS = 14 };

CacheLayer layer_of(const Model& model, const Cache& cache, int layer) {
    char* data = static_cast<char*>(cache.data) + size_t(layer) * cache.layer_stride;
    return {data, cache.block_size, model.kv_heads, model.dim, model.type, cache.quantized};
}

template <class V, class T>
void write_slot(const CacheLayer& cache, int64_t slot, const T* keys, const T* values) {
    int64_t block = slot / cache.block_size;
    int place = int(slot % cache.block_size);
    for (int which = 0; which < 2; which++) {
        const T* vector = which ? values : keys;
        for (int head = 0; head < cache.kv_heads; head++, vector += cache.dim) {
            char* to = cache.at(block, which, head, place);
            if (cache.quantized) {
                quantize_vector<V, T>(vector, cache.dim, to);
            } else {
                std::memcpy(to, vector, size_t(cache.dim) * sizeof(T));
            }
        }
    }
}

// Call row_job for all rows. Rows are claimed 16 at a time, so that one thread writes a tile of activations.
template <class F>
void for_rows(Pool& pool, int rows, F&& row_job) {
    int at_once = rows <= ROW_TILE ? 1 : ROW_TILE;
    for (int unit; (unit = pool.claim()) * at_once < rows;) {
        for (int row = unit * at_once; row < rows && row < (unit + 1) * at_once; row++) row_job(row);
    }
}

template <class T>
void copy_row(const T* from, int size, const Rows& to, int row) {
    for (int i = 0; i < size; i += CHUNK) {
        std::memcpy(to.at(row, i / CHUNK), from + i, size_t(size - i < CHUNK ? size - i : CHUNK) * sizeof(T));
    }
}

// Runs the layers of a step. Owns the buffers that the layers share. `prepare` is called outside of jobs,
// `layer` by every thread.
template <class V, class T>
class Runner {
  public:
    Runner(Pool& pool, const Model& model, const Step& step, const Cache& cache, T* hidden)
        : pool_(pool), model_(model), step_(step), cache_(cache), hidden_(hidden),
          norm_{model.epsilon, model.wide_norms != 0} {}

    void prepare(int first, int last) {
        int group = model_.heads / model_.kv_heads;
        size_t parts = 0;
        int normed = 0, attended = 0, inner = 0, inner_used = 0;
        bool post_norms = false;
        for (int number = first; number < last; number++) {
            const Layer& layer = model_.layers[number];
            normed = std::max({normed, layer.qkv.k_padded, layer.gate_up.k_padded});
            for (int i = 0; layer.experts && i < layer.experts->count + layer.experts->shared; i++) {
                normed = std::max(normed, layer.experts->gate_up[i].k_padded);
            }
            attended = std::max(attended, layer.out.k_padded);
            inner = std::max(inner, layer.down.k_padded);
            inner_used = std::max(inner_used, layer.down.k);
            post_norms |= layer.attention_post_norm || layer.mlp_post_norm;
            int window = layer.window;
            if (items_.count(window)) continue;
            items_[window] = plan_items(step_.spans, step_.span_count, group, model_.kv_heads, window,
                                        pool_.threads());
            size_t own = part_floats(items_[window], group, model_.kv_heads, model_.dim);
            parts = own > parts ? own : parts;
        }
        normed_ = rows(NORMED, model_.hidden, normed);
        attended_ = rows(ATTENDED, model_.heads * model_.dim, attended);
        inner_ = rows(INNER, inner_used, inner);
        mixture_.prepare(pool_, model_, first, last, step_.rows);
        qkv_width_ = size_t(model_.heads + 2 * model_.kv_heads) * size_t(model_.dim);
        qkv_ = reinterpret_cast<T*>(pool_.shared(QKV, size_t(step_.rows) * qkv_width_ * sizeof(T)));
        parts_ = reinterpret_cast<float*>(pool_.shared(PARTS, parts * sizeof(float)));
        if (post_norms) {
            size_t numbers = size_t(step_.rows) * size_t(model_.hidden);
            projected_ = reinterpret_cast<T*>(pool_.shared(PROJECTED, numbers * sizeof(T)));
        }
        if (step_.lora) prepare_products(*step_.lora);
        last_ = last;
    }

    void layer(int thread, int number) {
        const Layer& layer = model_.layers[number];
        int rows = step_.rows;
        Finish to_qkv{Finish::STORE, model_.type, false, qkv_, qkv_width_, {}};

        for_rows(pool_, rows, [&](int row) { enter(row, layer.attention_norm); });
        pool_.barrier();
        to_qkv.lora = products(number, LORA_QKV, normed_);
        multiply(pool_, thread, layer.qkv, normed_, rows, to_qkv);
        pool_.barrier();
        CacheLayer cache = layer_of(model_, cache_, number);
        for_rows(pool_, rows, [&](int row) { place(layer, cache, row); });
        pool_.barrier();
        // All keys and values of the layer are in the cache: another thread may send them now (transfer/pools.py).
        if (thread == 0) __atomic_fetch_add(cache_.written, 1, __ATOMIC_RELEASE);
        const std::vector<Item>& items = items_.at(layer.window);
        Attention attention{step_.spans,  qkv_,           qkv_width_, model_.heads, model_.path,
                            layer.window, model_.scoring, cache,      attended_,    layer.sinks};
        attend(pool_, thread, attention, items, parts_);
        pool_.barrier();
        Finish from_attention = out_of(layer.attention_post_norm);
        from_attention.lora = products(number, LORA_OUT, attended_);
        multiply(pool_, thread, layer.out, attended_, rows, from_attention);
        pool_.barrier();
        for_rows(pool_, rows, [&](int row) {
            if (layer.attention_post_norm) add_normed(row, layer.attention_post_norm);
            enter(row, layer.mlp_norm);
            if (layer.experts) mixture_.take(normed_, row);
        });
        pool_.barrier();
        mlp(thread, layer, number);
        pool_.barrier();
        if (!layer.mlp_post_norm) return;
        for_rows(pool_, rows, [&](int row) { add_normed(row, layer.mlp_post_norm); });
        pool_.barrier();
    }

  private:
    void mlp(int thread, const Layer& layer, int number) {
        Finish to = out_of(layer.mlp_post_norm);
        if (layer.experts) return mixture_.run(thread, *layer.experts, normed_, to);
        Finish to_inner{Finish::GATE_MUL, model_.type, false, nullptr, 0, inner_, 1, 0, model_.gating};
        to_inner.lora = products(number, LORA_GATE_UP, normed_);
        multiply(pool_, thread, layer.gate_up, normed_, step_.rows, to_inner);
        pool_.barrier();
        to.lora = products(number, LORA_DOWN, inner_);
        multiply(pool_, thread, layer.down, inner_, step_.rows, to);
    }

    void prepare_products(const Lora& lora) {
        units_ = low_rank_units(lora, step_.rows);
        products_stride_ = round_up(lora.max_rank, LOW_RANK_BLOCK);
        size_t numbers = size_t(step_.rows) * size_t(products_stride_);
        products_ = reinterpret_cast<float*>(pool_.shared(PRODUCTS, numbers * sizeof(float)));
    }

    // Compute the adapters' products for a linear map with the input `x`. They are valid until the next map's
    // products are computed.
    LowRankProducts products(int layer, LoraMap map, const Rows& x) {
        int number = layer * LORA_MAPS + map, next = number + 1 < last_ * LORA_MAPS ? number + 1 : -1;
        LowRankProducts to{step_.lora, number, next, products_, products_stride_, int(sizeof(T))};
        if (!to.lora || !to.any()) return {};
        shrink<V, T>(pool_, units_, x, to);
        return to;
    }

    // Copy a row of hidden states, normalized if there is a weight, to the input of attention or MLP.
    void enter(int row, const float* weight) {
        const T* own = hidden_ + size_t(row) * size_t(model_.hidden);
        if (!weight) return copy_row(own, model_.hidden, normed_, row);
        normalize<V, T>(own, weight, model_.hidden, norm_, normed_.at(row, 0), normed_.chunk_stride);
    }

    // Return the Finish for outputs of attention or MLP: they are added to the hidden states or, if there is
    // a `post_norm`, stored to be normalized first.
    Finish out_of(const float* post_norm) const {
        size_t stride = size_t(model_.hidden);
        if (post_norm) return {Finish::STORE, model_.type, false, projected_, stride, {}};
        return {Finish::ADD, model_.type, false, hidden_, stride, {}, model_.residual_scale};
    }

    void add_normed(int row, const float* weight) {
        size_t at = size_t(row) * size_t(model_.hidden);
        normalize_here(projected_ + at, weight, model_.hidden);
        add_to<V, T>(hidden_ + at, projected_ + at, model_.hidden);
    }

    void normalize_here(T* numbers, const float* weight, int size) const {
        normalize<V, T>(numbers, weight, size, norm_, reinterpret_cast<char*>(numbers), CHUNK * sizeof(T));
    }

    // Return a buffer for the input of linear maps, whose formats pad `k` to at most `k_padded`. Columns
    // after `k` are set to zero, as the memory may have been used before.
    Rows rows(Memory which, int k, int k_padded) {
        size_t bytes = rows_bytes(step_.rows, model_.type, k_padded);
        char* memory = pool_.shared(which, bytes);
        if (k != k_padded) std::memset(memory, 0, bytes);
        return rows_for(memory, model_.path, model_.type, k_padded);
    }

    // Rotate a row's queries and keys to its position, and write its keys and values to its slot.
    void place(const Layer& layer, const CacheLayer& cache, int row) {
        int dim = model_.dim, heads = model_.heads, turned = heads + model_.kv_heads;
        T* own = qkv_ + size_t(row) * qkv_width_;
        T* keys = own + size_t(heads) * size_t(dim);
        if (layer.head_norm) norm_heads(own, layer.head_norm);
        if (layer.rope >= 0) {
            size_t half = size_t(model_.rotary / 2);
            size_t at = (size_t(layer.rope) * size_t(step_.rows) + size_t(row)) * half;
            const T *cos = static_cast<const T*>(step_.cos) + at, *sin = static_cast<const T*>(step_.sin) + at;
            for (int head = 0; head < turned; head++) {
                rotate<V, T>(own + size_t(head) * size_t(dim), cos, sin, model_.rotary);
            }
        }
        if (step_.query_scales) {
            scale<V, T>(own, static_cast<const T*>(step_.query_scales)[row], heads * dim);
        }
        write_slot<V, T>(cache, step_.slots[row], keys, own + size_t(turned) * size_t(dim));
    }

    // Normalize a row's queries and keys: as two vectors, or each head.
    void norm_heads(T* queries, const float* weight) const {
        int dim = model_.dim, of_queries = model_.heads * dim, of_keys = model_.kv_heads * dim;
        if (model_.joint_head_norm) {
            normalize_here(queries, weight, of_queries);
            normalize_here(queries + of_queries, weight + of_queries, of_keys);
            return;
        }
        for (int i = 0; i < of_queries + of_keys; i += dim) normalize_here(queries + i, weight + i, dim);
    }

    Pool& pool_;
    const Model& model_;
    const Step& step_;
    const Cache& cache_;
    T* hidden_;
    Norm norm_;
    std::map<int, std::vector<Item>> items_;
    Rows normed_{}, attended_{}, inner_{};
    Mixture<V, T> mixture_;
    T *qkv_ = nullptr, *projected_ = nullptr;
    float* products_ = nullptr;
    int products_stride_ = 0, last_ = 0;
    std::vector<LowRankUnit> units_;
    size_t qkv_width_ = 0;
    float* parts_ = nullptr;
};

size_t weights_of(const Linear& linear) { return size_t(linear.n_padded) * size_t(linear.k_padded); }

size_t weights_of(const Layer& layer) {
    size_t weights = 0;
    for (const Linear* linear : {&layer.qkv, &layer.out, &layer.gate_up, &layer.down}) weights += weights_of(*linear);
    for (int i = 0; layer.experts && i < layer.experts->count + layer.experts->shared; i++) {
        weights += weights_of(layer.experts->gate_up[i]) + weights_of(layer.experts->down[i]);
    }
    return weights;
}

template <class V, class T>
void run(Pool& pool, const Model& model, const Step& step, const Cache& cache, void* hidden, int first,
         int last) {
    Runner<V, T> runner(pool, model, step, cache, static_cast<T*>(hidden));
    runner.prepare(first, last);
    size_t weights = 0;
    for (int layer = first; layer < last; layer++) weights += weights_of(model.layers[layer]);
    pool.run([&](int thread) {
        KernelState state;
        for (int layer = first; layer < last; layer++) runner.layer(thread, layer);
    }, light(model.path, step.rows, weights));
}

// Call f with a vector of the path's type and a number of type `type`.
template <class F>
void with_kinds(int path, int type, F&& f) {
    auto typed = [&](auto vector) { type == BF16 ? f(vector, bf16{}) : f(vector, float{}); };
    switch (path) {
        case PORTABLE: return typed(VecPortable{});
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return typed(Vec256{});
#endif
#ifdef STREAMSERVE_AVX512
        default: return typed(Vec512{});
#endif
    }
}

}  // namespace

void run_layers(Pool& pool, const Model& model, const Step& step, const Cache& cache, void* hidden, int first,
                int last) {
    with_kinds(model.path, model.type, [&](auto vector, auto number) {
        run<decltype(vector), decltype(number)>(pool, model, step, cache, hidden, first, last);
    });
}

void norm_rows(Pool& pool, const void* from, const float* weight, int rows, int size, float epsilon, bool wide,
               int path, int type, void* to) {
    with_kinds(path, type, [&](auto vector, auto number) {
        using T = decltype(number);
        pool.run([&](int) {
            FlushTiny flush;
            for_rows(pool, rows, [&](int row) {
                size_t at = size_t(row) * size_t(size);
                char* out = reinterpret_cast<char*>(static_cast<T*>(to) + at);
                normalize<decltype(vector), T>(static_cast<const T*>(from) + at, weight, size, {epsilon, wide}, out,
                                               CHUNK * sizeof(T));
            });
        }, light(path, rows, size_t(size)));
    });
}

void write_and_attend(Pool& pool, const Step& step, const CacheLayer& cache, const void* qkv, int heads,
                      int window, Scoring scoring, const float* sinks, int path, void* out) {
    int group = heads / cache.kv_heads, width = heads * cache.dim;
    std::vector<Item> items =
        plan_items(step.spans, step.span_count, group, cache.kv_heads, window, pool.threads());
    size_t parts = part_floats(items, group, cache.kv_heads, cache.dim);
    float* memory = reinterpret_cast<float*>(pool.shared(PARTS, parts * sizeof(float)));
    size_t stride = size_t(heads + 2 * cache.kv_heads) * size_t(cache.dim);
    size_t row = size_t(width) * size_of(cache.type);
    Rows plain{static_cast<char*>(out), ROW_TILE * row, row, CHUNK * size_of(cache.type)};
    Attention attention{step.spans, qkv, stride, heads, path, window, scoring, cache, plain, sinks};
    with_kinds(path, cache.type, [&](auto vector, auto number) {
        using V = decltype(vector);
        using T = decltype(number);
        pool.run([&](int thread) {
            KernelState state;
            for_rows(pool, step.rows, [&](int r) {
                const T* keys = static_cast<const T*>(qkv) + size_t(r) * stride + size_t(width);
                write_slot<V, T>(cache, step.slots[r], keys, keys + cache.kv_heads * cache.dim);
            });
            pool.barrier();
            attend(pool, thread, attention, items, memory);
        });
    });
}

}  // namespace streamserve
