#include "attention.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention_amx.h"
#include "attention_dot.h"
#include "attention_engine.h"
#include "kv_vectors.h"

namespace streamserve {

namespace {

constexpr float LOG2_E = 1.44269504089f;
constexpr float INFINITE_POWER = 128;  // 2 to this power or a higher one is infinite
constexpr float NEVER = -std::numeric_limits<float>::infinity();

// The softmax so far of some queries: weighted sums [query][padded dim], largest scores, sums of weights.
struct State {
    float *sums, *largest, *weights;

    void clear(int count, int stride) const {
        std::fill(sums, sums + size_t(count) * size_t(stride), 0.0f);
        std::fill(largest, largest + count, NEVER);
        std::fill(weights, weights + count, 0.0f);
    }
    State from(int query, int stride) const {
        return {sums + size_t(query) * size_t(stride), largest + query, weights + query};
    }
    static size_t floats(int count, int stride) { return size_t(count) * size_t(stride + 2); }
    static State in(float* memory, int count, int stride) {
        float* tail = memory + size_t(count) * size_t(stride);
        return {memory, tail, tail + count};
    }
};

template <class V>
float power(float exponent) {
    return lane_of<V>([](V x) { return power_of_two(x); }, exponent);
}

// Merge a range's result into the total of the previous ranges.
template <class V>
void merge(const State& total, const State& range, int query, int stride) {
    State to = total.from(query, stride), add = range.from(query, stride);
    if (*add.largest == NEVER) return;  // the query sees no key of the range
    float largest = std::max(*to.largest, *add.largest);
    V keep = V::set(power<V>(*to.largest - largest)), gain = V::set(power<V>(*add.largest - largest));
    for (int d = 0; d < stride; d += V::lanes) {
        (V::load(to.sums + d) * keep + V::load(add.sums + d) * gain).store(to.sums + d);
    }
    float lanes[V::lanes];
    (V::set(*to.weights) * keep + V::set(*add.weights) * gain).store(lanes);
    *to.weights = lanes[0];
    *to.largest = largest;
}

// Return the largest score of keys `from` to `until`. Other scores, up to whole chunks, are set to -inf.
template <class V>
float mask(float* scores, int from, int until) {
    int end = round_up(until, CHUNK);
    if (from) std::fill(scores, scores + from, NEVER);
    if (until < end) std::fill(scores + until, scores + end, NEVER);
    V largest = V::set(NEVER);
    for (int i = from / CHUNK * CHUNK; i < end; i += V::lanes) largest = largest.max(V::load(scores + i));
    return largest.largest();
}

// Store weights in the precision of T even where products are in float32: all paths compute the same bits.
template <class T, class V>
void store_weight(V weight, bf16* to) {
    weight.store(to);
}
template <class T, class V>
void store_weight(V weight, float* to) {
    round_to<V, T>(weight).store(to);
}

// Write weights 2^(score · scale - top) of scores up to `end`, then zeros up to `count`. Return the sum.
template <class V, class T, class W>
float soften(const float* scores, int end, int count, float scale, float top, W* weights) {
    LaneSums<V> sum;
    V factor = V::set(scale), base = V::set(-top);
    for (int i = 0; i < end; i += LaneSums<V>::lanes) {
        sum.add([&](int lane) {
            V weight = power_of_two(fma(V::load(scores + i + lane), factor, base));
            store_weight<T>(weight, weights + i + lane);
            return weight;
        });
    }
    if (end < count) std::fill(weights + end, weights + count, W{});
    return sum.total();
}

// Attends items on one thread, with buffers in the thread's scratch memory.
template <class V, class T, class Engine>
class Worker {
  public:
    Worker(Pool& pool, int thread, const Attention& attention)
        : a_(attention), dim_(attention.cache.dim), stride_(padded(dim_)),
          group_(attention.heads / attention.cache.kv_heads), max_queries_(std::max(MAX_QUERIES, group_)),
          memory_(pool.scratch(thread, bytes())), engine_(memory_, dim_) {
        float* at = reinterpret_cast<float*>(memory_ + round_up(int(Engine::bytes(dim_)), 64));
        total_ = State::in(at, max_queries_, stride_);
        at += State::floats(max_queries_, stride_);
        later_ = State::in(at, max_queries_, stride_);
        at += State::floats(max_queries_, stride_);
        scores_ = at;
        results_ = scores_ + QUERY_TILE * KEY_TILE;
        weights_ = reinterpret_cast<typename Engine::Weight*>(results_ + QUERY_TILE * stride_);
        numbers_ = reinterpret_cast<T*>(weights_ + QUERY_TILE * KEY_TILE);
    }

    // Attend an item with one key-value head. `parts`: buffer for the result, if it is merged later. `next`:
    // the next item, whose first keys and values of `next_head` are prefetched.
    void attend(const Item& item, int kv_head, float* parts, const Item* next, int next_head) {
        begin(item, kv_head);
        for (int first = item.begin; first < item.end; first += KEY_RANGE) {
            // The first range is computed directly in the total; later ranges are merged into it.
            range_ = item.part < 0 && first == item.begin ? total_ : later_;
            range_.clear(queries_, stride_);
            for (int key = first; key < std::min(first + KEY_RANGE, item.end); key += KEY_TILE) {
                int next_key = key + KEY_TILE;
                ahead_.clear();
                if (next_key < item.end) {
                    look_ahead(*span_, kv_head, next_key, item.end);
                } else if (next) {
                    look_ahead(a_.spans[next->span], next_head, next->begin, next->end);
                }
                tile(key);
            }
            if (item.part < 0) {
                for (int i = 0; first > item.begin && i < queries_; i++) merge<V>(total_, range_, i, stride_);
            } else {
                std::copy(range_.sums, range_.sums + size_t(queries_) * stride_, parts);
                float* tail = parts + size_t(queries_) * stride_;
                std::copy(range_.largest, range_.largest + queries_, tail);
                std::copy(range_.weights, range_.weights + queries_, tail + queries_);
            }
        }
        if (item.part < 0) finish();
    }

    // Merge `item.parts` consecutive parts, and write the output.
    void merge_parts(const Item& item, int kv_head, float* parts) {
        span_ = &a_.spans[item.span], item_ = &item, kv_head_ = kv_head, queries_ = item.rows * group_;
        total_.clear(queries_, stride_);
        for (int part = 0; part < item.parts; part++, parts += State::floats(queries_, stride_)) {
            State range = State::in(parts, queries_, stride_);
            for (int i = 0; i < queries_; i++) merge<V>(total_, range, i, stride_);
        }
        finish();
    }

  private:
    size_t bytes() const {
        size_t floats = 2 * State::floats(max_queries_, stride_) + size_t(QUERY_TILE) * (2 * KEY_TILE + stride_);
        size_t numbers = a_.cache.quantized ? 2 * KEY_TILE * size_t(stride_) : 0;
        return Engine::bytes(dim_) + 64 + floats * sizeof(float) + numbers * sizeof(T);
    }

    void begin(const Item& item, int kv_head) {
        span_ = &a_.spans[item.span], item_ = &item, kv_head_ = kv_head, queries_ = item.rows * group_;
        const T* q = static_cast<const T*>(a_.q);
        for (int i = 0; i < queries_; i++) {
            size_t row = size_t(span_->row + item.row + i / group_);
            query_[i] = q + row * a_.q_stride + size_t(kv_head * group_ + i % group_) * size_t(dim_);
        }
        engine_.queries(query_, queries_);
        root_ = span_->start + span_->linear - 1;
        for (int row = 0; row < item.rows; row++) position_[row] = position(item.row + row);
    }

    int position(int row) const {
        if (row < span_->linear) return span_->start + row;
        int depth = 0;
        for (int node = row - span_->linear + 1; node > 0; node = span_->parents[node]) depth++;
        return root_ + depth;
    }

    // Attend all of the item's rows to the tile of keys from position `first` on.
    void tile(int first) {
        int linear = std::min(std::max(span_->linear - item_->row, 0), item_->rows);
        if (first + KEY_TILE <= root_ + 1) linear = item_->rows;  // before the tree, all rows see the same keys
        if (linear) some_rows(first, 0, linear, nullptr);
        for (int row = linear; row < item_->rows; row++) {
            // After the root, a node sees its path, in order of position.
            int node = item_->row + row - span_->linear + 1;
            path_.clear();
            for (; node > 0; node = span_->parents[node]) path_.push_back(node);
            std::reverse(path_.begin(), path_.end());
            some_rows(first, row, 1, path_.data());
        }
    }

    void some_rows(int first, int row, int rows, const int* path) {
        int last = 0, lowest = first + KEY_TILE;
        for (int i = row; i < row + rows; i++) {
            last = std::max(last, position_[i]);
            lowest = std::min(lowest, lowest_key(i));
        }
        if (last < first || lowest >= first + KEY_TILE) return;
        int begin = row * group_, end = begin + rows * group_;
        int from = begin / QUERY_TILE * QUERY_TILE;
        find(keys_, *span_, kv_head_, first, last + 1, path);
        if (a_.cache.quantized) dequantize(keys_);
        engine_.tile(keys_, ceil_div(end - from, QUERY_TILE), ahead_);
        for (; from < end; from += QUERY_TILE) query_tile(first, from, begin, end);
    }

    // Return the largest position of the queries `from` to `until`.
    int last_position(int from, int until) const {
        return *std::max_element(position_ + from / group_, position_ + (until - 1) / group_ + 1);
    }

    int lowest_key(int row) const { return a_.window ? std::max(0, position_[row] - a_.window + 1) : 0; }

    // Write to `to` the addresses of a span's keys and values from position `first` to `end`, at most a tile.
    // After the root, keys are the nodes of `path`. Quantized vectors are not converted.
    void find(KeyTile<T>& to, const Span& span, int kv_head, int first, int end, const int* path) const {
        const CacheLayer& cache = a_.cache;
        int root = span.start + span.linear - 1, count = std::min(KEY_TILE, end - first);
        int linear = path ? std::min(count, std::max(0, root + 1 - first)) : count;
        to.count = count;
        to.whole = cache.block_size % 16 == 0 && linear == count;
        to.bytes = int(cache.vector_bytes());
        int block = first / cache.block_size, slot = first % cache.block_size;
        for (int i = 0; i < linear; block++, slot = 0) {
            const char *key = at(span, kv_head, block, 0, slot), *value = at(span, kv_head, block, 1, slot);
            for (; i < linear && slot < cache.block_size; i++, slot++, key += to.bytes, value += to.bytes) {
                to.keys[i] = reinterpret_cast<const T*>(key);
                to.values[i] = reinterpret_cast<const T*>(value);
            }
        }
        for (int i = linear; i < count; i++) {
            int place = root + path[first + i - root - 1];
            int node_block = place / cache.block_size, node_slot = place % cache.block_size;
            to.keys[i] = reinterpret_cast<const T*>(at(span, kv_head, node_block, 0, node_slot));
            to.values[i] = reinterpret_cast<const T*>(at(span, kv_head, node_block, 1, node_slot));
        }
    }

    // Schedule prefetching of the keys from position `first` to `end`, at most a tile; tree nodes by row.
    void look_ahead(const Span& span, int kv_head, int first, int end) {
        const CacheLayer& cache = a_.cache;
        int block = first / cache.block_size, slot = first % cache.block_size;
        for (int left = std::min(KEY_TILE, end - first); left > 0; block++, slot = 0) {
            int count = std::min(left, cache.block_size - slot);
            size_t bytes = size_t(count) * cache.vector_bytes();
            ahead_.add(at(span, kv_head, block, 0, slot), bytes);
            ahead_.add(at(span, kv_head, block, 1, slot), bytes);
            left -= count;
        }
    }

    // Convert the tile's vectors, once for all queries of `some_rows`. The converted vectors are adjacent.
    void dequantize(KeyTile<T>& tile) {
        for (int i = 0; i < tile.count; i++) {
            T* key = numbers_ + size_t(i) * stride_;
            T* value = key + size_t(KEY_TILE) * stride_;
            ahead_.fetch(2);
            dequantize_vector<V, T>(reinterpret_cast<const char*>(tile.keys[i]), dim_, key);
            dequantize_vector<V, T>(reinterpret_cast<const char*>(tile.values[i]), dim_, value);
            tile.keys[i] = key;
            tile.values[i] = value;
        }
        tile.bytes = dim_ * int(sizeof(T));
        tile.whole = true;
    }

    // Return the address of a slot in the span's block number `block`.
    const char* at(const Span& span, int kv_head, int block, int which, int slot) const {
        return a_.cache.at(span.blocks[block], which, kv_head, slot);
    }

    // Attend the item's queries from `from` to `from` + 16, except those outside of `begin` to `end`.
    void query_tile(int first, int from, int begin, int end) {
        int last = std::min(from + QUERY_TILE, end), count = round_up(keys_.count, CHUNK);
        if (last_position(std::max(from, begin), last) < first) return;
        int low[QUERY_TILE], high[QUERY_TILE], lowest = KEY_TILE, highest = 0;
        for (int i = 0; i < last - from; i++) {
            int query = from + i, row = query / group_;
            low[i] = std::max(0, lowest_key(row) - first);
            high[i] = query < begin ? 0 : std::min(keys_.count, position_[row] + 1 - first);
            if (low[i] >= high[i]) continue;
            lowest = std::min(lowest, low[i]);
            highest = std::max(highest, high[i]);
        }
        if (lowest >= highest) return;
        engine_.scores(from, last - from, lowest, highest, scores_);
        if (a_.scoring.cap) cap_scores(last - from, lowest, highest);
        float before[QUERY_TILE] = {}, top[QUERY_TILE] = {}, keep[QUERY_TILE];
        for (int i = 0; i < last - from; i++) {
            if (low[i] >= high[i]) continue;
            before[i] = *range_.from(from + i, stride_).largest;
            top[i] = std::max(before[i], mask<V>(scores_ + i * KEY_TILE, low[i], high[i]) * scale_);
        }
        for (int i = 0; i < QUERY_TILE; i += V::lanes) {
            power_of_two(V::load(before + i) - V::load(top + i)).store(keep + i);
        }
        for (int i = 0; i < last - from; i++) {
            typename Engine::Weight* weights = weights_ + i * KEY_TILE;
            if (low[i] >= high[i]) {
                std::fill(weights, weights + count, typename Engine::Weight{});
                continue;
            }
            State state = range_.from(from + i, stride_);
            const float* scores = scores_ + i * KEY_TILE;
            float sum = soften<V, T>(scores, round_up(high[i], CHUNK), count, scale_, top[i], weights);
            *state.weights = *state.weights * keep[i] + sum;
            *state.largest = top[i];
        }
        engine_.values(weights_, last - from, lowest, highest, results_);
        for (int i = 0; i < last - from; i++) {
            if (low[i] >= high[i]) continue;
            float* result = results_ + i * stride_;
            float* sums = range_.from(from + i, stride_).sums;
            for (int d = 0; d < stride_; d += V::lanes) {
                fma(V::load(sums + d), V::set(keep[i]), V::load(result + d)).store(sums + d);
            }
        }
    }

    // Cap the scores of `count` queries with the keys `from` to `until`, in whole chunks. `mask` overwrites
    // the scores of other keys.
    void cap_scores(int count, int from, int until) {
        V scale = V::set(a_.scoring.scale / a_.scoring.cap), cap = V::set(a_.scoring.cap);
        for (int query = 0; query < count; query++) {
            float* scores = scores_ + query * KEY_TILE;
            for (int i = from / CHUNK * CHUNK; i < round_up(until, CHUNK); i += V::lanes) {
                soft_cap(V::load(scores + i), scale, cap).store(scores + i);
            }
        }
    }

    // Return the weight of a query's sink, relative to weights whose largest score is `largest`.
    float sink_weight(int head, float largest) const {
        if (!a_.sinks) return 0.0f;
        return power<V>(std::min(a_.sinks[kv_head_ * group_ + head] * LOG2_E - largest, INFINITE_POWER));
    }

    void finish() {
        for (int query = 0; query < queries_; query++) {
            State state = total_.from(query, stride_);
            int row = span_->row + item_->row + query / group_;
            int column = (kv_head_ * group_ + query % group_) * dim_;
            V whole = V::set(*state.weights + sink_weight(query % group_, *state.largest));
            for (int d = 0; d < stride_; d += V::lanes) {
                (V::load(state.sums + d) / whole).store(state.sums + d);
            }
            for (int d = 0; d < dim_;) {
                int at = (column + d) % CHUNK;
                T* to = reinterpret_cast<T*>(a_.out.at(row, (column + d) / CHUNK)) + at;
                if (at + V::lanes <= CHUNK && d + V::lanes <= dim_) {
                    V::load(state.sums + d).store(to);
                    d += V::lanes;
                } else {
                    put(*to, state.sums[d]);
                    d++;
                }
            }
        }
    }

    const Attention& a_;
    int dim_, stride_, group_, max_queries_;
    char* memory_;
    Engine engine_;
    State total_, later_, range_;  // of all ranges; of a range after the first; of the current range
    float *scores_, *results_;
    typename Engine::Weight* weights_;
    T* numbers_;  // with a quantized cache: a tile's converted keys, then its values
    float scale_ = LOG2_E * (a_.scoring.cap ? 1 : a_.scoring.scale);  // for powers of two instead of e

    const Span* span_ = nullptr;
    const Item* item_ = nullptr;
    int kv_head_ = 0, queries_ = 0, root_ = 0;
    const T* query_[MAX_QUERIES];
    int position_[MAX_QUERIES];
    KeyTile<T> keys_;
    Ahead ahead_;
    std::vector<int> path_;
};

template <class V, class T, class Engine>
void attend_with(Pool& pool, int thread, const Attention& a, const std::vector<Item>& items, float* parts) {
    int kv_heads = a.cache.kv_heads, group = a.heads / kv_heads, stride = padded(a.cache.dim);
    Worker<V, T, Engine> worker(pool, thread, a);
    int units = int(items.size()) * kv_heads;
    bool parted = !items.empty() && items[0].part >= 0;
    size_t of_one_head = part_floats(items, group, 1, a.cache.dim);
    auto part_of = [&](const Item& item, int kv_head) {
        return parts + size_t(kv_head) * of_one_head + State::floats(item.part, stride);
    };
    // Work is ordered by head: sequences with a shared prefix read a head's keys while they are in the cache.
    auto item_of = [&](int unit) { return &items[size_t(unit) % items.size()]; };
    auto head_of = [&](int unit) { return unit / int(items.size()); };
    for (int unit = pool.claim(), next; unit < units; unit = next) {
        next = pool.claim();
        const Item *item = item_of(unit), *next_item = next < units ? item_of(next) : nullptr;
        float* own = parted ? part_of(*item, head_of(unit)) : nullptr;
        worker.attend(*item, head_of(unit), own, next_item, next_item ? head_of(next) : 0);
    }
    if (!parted) return;
    pool.barrier();
    for (int unit; (unit = pool.claim()) < units;) {
        const Item& item = items[size_t(unit / kv_heads)];
        if (item.parts) worker.merge_parts(item, unit % kv_heads, part_of(item, unit % kv_heads));
    }
}

template <class V>
void attend_typed(Pool& pool, int thread, const Attention& a, const std::vector<Item>& items, float* parts) {
    if (a.cache.type == BF16) {
        attend_with<V, bf16, VectorEngine<V, bf16>>(pool, thread, a, items, parts);
    } else {
        attend_with<V, float, VectorEngine<V, float>>(pool, thread, a, items, parts);
    }
}

}  // namespace

std::vector<Item> plan_items(const Span* spans, int count, int group, int kv_heads, int window, int threads) {
    std::vector<Item> items;
    int at_once = std::max(1, MAX_QUERIES / group), longest = 0;
    for (int span = 0; span < count; span++) {
        for (int row = 0; row < spans[span].rows; row += at_once) {
            int rows = std::min(at_once, spans[span].rows - row), start = spans[span].start;
            // A tree node's position is at least the root's and at most `start` plus the node's row.
            int lowest = start + std::min(row, spans[span].linear - 1);
            int begin = window ? std::max(0, lowest - window + 1) / KEY_RANGE * KEY_RANGE : 0;
            items.push_back({span, row, rows, begin, start + row + rows, -1, 1});
            longest = std::max(longest, items.back().end - begin);
        }
    }
    if (int(items.size()) * kv_heads >= 4 * threads || longest <= KEY_RANGE || threads == 1) return items;
    std::vector<Item> parted;
    int queries = 0;
    for (const Item& item : items) {
        int parts = ceil_div(item.end - item.begin, KEY_RANGE);
        for (int part = 0; part < parts; part++) {
            int begin = item.begin + part * KEY_RANGE, end = std::min(begin + KEY_RANGE, item.end);
            parted.push_back({item.span, item.row, item.rows, begin, end, queries, part ? 0 : parts});
            queries += item.rows * group;
        }
    }
    return parted;
}

size_t part_floats(const std::vector<Item>& items, int group, int kv_heads, int dim) {
    if (items.empty() || items.back().part < 0) return 0;
    int queries = items.back().part + items.back().rows * group;
    return State::floats(queries, padded(dim)) * size_t(kv_heads);
}

void attend(Pool& pool, int thread, const Attention& a, const std::vector<Item>& items, float* parts) {
    switch (a.path) {
        case PORTABLE: return attend_typed<VecPortable>(pool, thread, a, items, parts);
#if defined(__AVX2__) && defined(__FMA__)
        case AVX2: return attend_typed<Vec256>(pool, thread, a, items, parts);
#endif
#if defined(__AMX_BF16__) && defined(STREAMSERVE_AVX512)
        case AMX:
            if (a.cache.type == BF16) {
                return attend_with<Vec512, bf16, AmxEngine>(pool, thread, a, items, parts);
            }
            return attend_typed<Vec512>(pool, thread, a, items, parts);
#endif
#if defined(__AVX512BF16__) && defined(STREAMSERVE_AVX512)
        case AVX512_BF16:
            if (a.cache.type == BF16) {
                return attend_with<Vec512, bf16, DotEngine>(pool, thread, a, items, parts);
            }
            [[fallthrough]];
#endif
#ifdef STREAMSERVE_AVX512
        default: return attend_typed<Vec512>(pool, thread, a, items, parts);
#endif
    }
}

}  // namespace streamserve
