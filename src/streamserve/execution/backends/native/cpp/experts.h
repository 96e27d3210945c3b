// Mixtures of experts: for each row, the MLPs of the experts that a router chooses for the row.
//
//   rows of the step        router, float32      pairs, sorted by expert, then row            sums of a row
//   r0 ─────────────────▸   scores, the best ▸   expert 0  [r0 r3]  gate_up ▸ down  ─┐        in the order of
//   r1                      experts of each      expert 2  [r1]     gate_up ▸ down  ─┼──────▸  its scores
//   …                       row and weights      …                                   ─┘
//
// A row's products do not depend on the rows multiplied with it (gemm.h), and its experts' outputs are added in the
// order of their scores. So a row's bits do not depend on other rows. The products of all experts are one phase: each
// expert has a separate series of units, so threads do not wait for each other between experts.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "elementwise.h"
#include "layers.h"

namespace streamserve {

// The experts of a layer and the rows of a step, before and after the products.
template <class V, class T>
class Mixture {
  public:
    // Allocate memory for `rows` rows in layers `first` to `last`. Must be called outside of jobs.
    void prepare(Pool& pool, const Model& model, int first, int last, int rows) {
        pool_ = &pool, model_ = &model, rows_ = rows;
        Sizes sizes;
        for (int number = first; number < last; number++) {
            if (model.layers[number].experts) sizes.include(*model.layers[number].experts);
        }
        if (!sizes.count) return;
        int at_once = std::min(rows, AT_ONCE);
        // Each group of rows begins at a whole row tile.
        size_t pairs = size_t(at_once) * size_t(sizes.chosen), slots = pairs + size_t(at_once);
        size_t aligned = pairs + size_t(ROW_TILE - 1) * std::min(pairs, size_t(sizes.count));
        size_t ranks = size_t(at_once) * size_t(sizes.chosen + 1);
        routed_ = rows_of(ROUTED, rows, F32, sizes.router_width, model.hidden != sizes.router_width);
        gathered_ = rows_of(GATHERED, int(aligned), model.type, sizes.width, false);
        inner_ = rows_of(EXPERTS_INNER, int(aligned), model.type, sizes.inner, sizes.padded);
        shared_inner_ = rows_of(SHARED_INNER, at_once, model.type, sizes.shared_inner, sizes.padded);
        width_ = sizes.width;
        size_t scores = size_t(at_once) * size_t(sizes.count + 1);
        logits_ = floats(LOGITS, 3 * scores), ranked_ = logits_ + scores, of_groups_ = ranked_ + scores;
        outputs_ = floats(OUTPUTS, slots * size_t(model.hidden));
        weights_ = floats(WEIGHTS, ranks);
        chosen_.resize(ranks), slot_of_.resize(ranks), row_of_.resize(slots), place_of_.resize(slots);
        pool.reserve_series(sizes.count + 2);
    }

    // Copy a row of `normed`, which is laid out for the experts, to the float32 input of the router.
    void take(const Rows& normed, int row) const {
        for (int i = 0; i < model_->hidden; i += CHUNK) {
            const T* from = reinterpret_cast<const T*>(normed.at(row, i / CHUNK));
            float* to = reinterpret_cast<float*>(routed_.at(row, i / CHUNK));
            for (int j = 0; j < CHUNK && i + j < model_->hidden; j++) to[j] = widen(from[j]);
        }
    }

    // Compute the mixture for all rows, and write it as `finish` says. Called by every thread, after a barrier.
    void run(int thread, const Experts& experts, const Rows& normed, const Finish& finish) {
        for (int first = 0; first < rows_; first += AT_ONCE) {
            if (first) pool_->barrier();
            some(thread, experts, from(normed, first), first, std::min(AT_ONCE, rows_ - first), finish);
        }
    }

  private:
    static constexpr int AT_ONCE = 1024;  // rows at a time, in whole tiles: bounds the memory for their pairs

    // Numbers of the pool's shared buffers; layers.cpp and api.cpp use the other numbers.
    enum Memory { ROUTED = 7, GATHERED, EXPERTS_INNER, SHARED_INNER, LOGITS, OUTPUTS, WEIGHTS };

    // Compute the mixture for `rows` rows from `first` on, which are the first rows of `normed`.
    void some(int thread, const Experts& experts, const Rows& normed, int first, int rows, const Finish& finish) {
        Pool& pool = *pool_;
        size_t outputs = outputs_of(experts);
        Finish to_logits{Finish::STORE, F32, true, logits_, outputs, {}};
        multiply(pool, thread, experts.router, from(routed_, first), rows, to_logits);
        pool.barrier();
        each(rows, [&](int row) { choose(experts, row); });
        pool.barrier();
        if (thread == 0) group(experts, normed, rows);
        pool.barrier();
        each(pairs_, [&](int slot) { gather(normed, slot); });
        pool.barrier();
        series([&](const Group& own) {
            Finish to_inner{Finish::GATE_MUL, model_->type, false, nullptr, 0, own.inner, 1, 0, model_->gating};
            multiply(pool, thread, experts.gate_up[own.expert], own.x, own.rows, to_inner);
        });
        pool.barrier();
        series([&](const Group& own) {
            size_t stride = size_t(model_->hidden);
            Finish out{Finish::STORE, model_->type, true, outputs_ + size_t(own.slot) * stride, stride, {}};
            multiply(pool, thread, experts.down[own.expert], own.inner, own.rows, out);
        });
        pool.barrier();
        float* sums = reinterpret_cast<float*>(pool.scratch(thread, size_t(model_->hidden) * sizeof(float)));
        each(rows, [&](int row) { add(experts, row, sums, finish, first + row); });
    }

    // The largest sizes of all layers.
    struct Sizes {
        int count = 0, chosen = 0, router_width = 0, width = 0, inner = 0, shared_inner = 0;
        bool padded = false;  // whether an expert's second matrix reads columns that the first does not write

        void include(const Experts& experts) {
            count = std::max(count, experts.count);
            chosen = std::max(chosen, experts.chosen);
            router_width = std::max(router_width, experts.router.k_padded);
            for (int i = 0; i < experts.count + experts.shared; i++) {
                width = std::max(width, experts.gate_up[i].k_padded);
                int& own = i < experts.count ? inner : shared_inner;
                own = std::max(own, experts.down[i].k_padded);
                padded |= experts.gate_up[i].n_padded / 2 != experts.down[i].k_padded;
            }
        }
    };

    // The rows of one expert: their inputs `x`, the `inner` activations between its matrices, and the first
    // `slot` of their outputs.
    struct Group {
        int expert, rows, slot;
        Rows x, inner;
    };

    Rows rows_of(Memory which, int rows, int type, int width, bool zeroed) {
        size_t bytes = rows_bytes(rows, type, width);
        char* memory = pool_->shared(which, bytes);
        if (zeroed && bytes) std::memset(memory, 0, bytes);
        return rows_for(memory, type == F32 ? AVX512 : model_->path, type, width);
    }

    float* floats(Memory which, size_t count) {
        return reinterpret_cast<float*>(pool_->shared(which, count * sizeof(float)));
    }

    // Call job(i) for i below `count`. Units are claimed 16 at a time, so that one thread writes adjacent memory.
    template <class F>
    void each(int count, F&& job) const {
        int at_once = count <= ROW_TILE ? 1 : ROW_TILE;
        for (int unit; (unit = pool_->claim()) * at_once < count;) {
            for (int i = unit * at_once; i < count && i < (unit + 1) * at_once; i++) job(i);
        }
    }

    template <class F>
    void series(F&& job) const {
        for (size_t i = 0; i < groups_.size(); i++) {
            pool_->enter_series(int(i));
            job(groups_[i]);
        }
    }

    // Choose the experts of a row (see Experts; of equal ones, the lower number first), and compute their weights. The
    // weight of a shared expert is a sigmoid if it is gated, otherwise 1.
    void choose(const Experts& experts, int row) {
        float* logits = logits_ + size_t(row) * outputs_of(experts);
        size_t at = size_t(row) * size_t(experts.chosen + experts.shared);
        int32_t* chosen = &chosen_[at];
        float* weights = weights_ + at;
        if (experts.sigmoid) {
            apply_sigmoid(logits, experts.count);
            choose_largest(experts, ranked(experts, logits, row), chosen);
            weigh_sigmoids(experts, logits, chosen, weights);
        } else {
            choose_largest(experts, logits, chosen);
            weigh_softmax(experts, logits, chosen, weights);
        }
        for (int rank = 0; rank < experts.chosen; rank++) weights[rank] *= experts.scale;
        if (experts.shared) {
            chosen[experts.chosen] = experts.count;
            if (experts.gated) apply_sigmoid(logits + experts.count, 1);
            weights[experts.chosen] = experts.gated ? logits[experts.count] : 1.0f;
        }
    }

    static void choose_largest(const Experts& experts, const float* numbers, int32_t* chosen) {
        int held = 0;
        for (int expert = 0; expert < experts.count; expert++) {
            int rank = held;
            while (rank > 0 && numbers[expert] > numbers[chosen[rank - 1]]) rank--;
            if (rank >= experts.chosen) continue;
            if (held < experts.chosen) held++;
            for (int i = held - 1; i > rank; i--) chosen[i] = chosen[i - 1];
            chosen[rank] = expert;
        }
    }

    // Return the numbers by which the experts of a row are chosen: their sigmoids plus the correction, or -∞ in groups
    // that are not chosen.
    const float* ranked(const Experts& experts, const float* sigmoids, int row) const {
        float* out = ranked_ + size_t(row) * size_t(experts.count);
        for (int i = 0; i < experts.count; i++) {
            out[i] = sigmoids[i] + (experts.correction ? experts.correction[i] : 0.0f);
        }
        if (experts.chosen_groups == experts.groups) return out;
        float* sums = of_groups_ + size_t(row) * size_t(experts.groups);
        int size = experts.count / experts.groups;
        for (int group = 0; group < experts.groups; group++) sums[group] = sum_of_two_largest(out + group * size, size);
        for (int group = 0; group < experts.groups; group++) {
            int before = 0;
            for (int other = 0; other < experts.groups; other++) {
                before += sums[other] > sums[group] || (sums[other] == sums[group] && other < group);
            }
            if (before < experts.chosen_groups) continue;
            std::fill_n(out + group * size, size, -std::numeric_limits<float>::infinity());
        }
        return out;
    }

    static float sum_of_two_largest(const float* numbers, int count) {
        float first = std::max(numbers[0], numbers[1]), second = std::min(numbers[0], numbers[1]);
        for (int i = 2; i < count; i++) {
            second = std::max(second, std::min(first, numbers[i]));
            first = std::max(first, numbers[i]);
        }
        return first + second;
    }

    static void weigh_sigmoids(const Experts& experts, const float* sigmoids, const int32_t* chosen, float* weights) {
        float total = 0;
        for (int rank = 0; rank < experts.chosen; rank++) total += weights[rank] = sigmoids[chosen[rank]];
        if (!experts.normalized) return;
        for (int rank = 0; rank < experts.chosen; rank++) weights[rank] /= total + 1e-20f;  // All may be 0.
    }

    // Compute the softmax over all experts or, if `normalized`, over the chosen experts.
    static void weigh_softmax(const Experts& experts, const float* logits, const int32_t* chosen, float* weights) {
        float top = logits[chosen[0]], total = 0;
        for (int rank = 0; rank < experts.chosen; rank++) weights[rank] = exponential_of(logits[chosen[rank]] - top);
        if (experts.normalized) {
            for (int rank = 0; rank < experts.chosen; rank++) total += weights[rank];
        } else {
            for (int expert = 0; expert < experts.count; expert++) total += exponential_of(logits[expert] - top);
        }
        for (int rank = 0; rank < experts.chosen; rank++) weights[rank] /= total;
    }

    // The number of the router's outputs for a row.
    static size_t outputs_of(const Experts& experts) {
        return size_t(experts.count + (experts.shared && experts.gated));
    }

    static void apply_sigmoid(float* numbers, int count) {
        auto sigmoid = [](V x) { return V::set(1.0f) / (V::set(1.0f) + exponential(V::set(0.0f) - x)); };
        int i = 0;
        for (; i + V::lanes <= count; i += V::lanes) sigmoid(V::load(numbers + i)).store(numbers + i);
        for (; i < count; i++) numbers[i] = lane_of<V>(sigmoid, numbers[i]);
    }

    static float exponential_of(float x) {
        return lane_of<V>([](V lanes) { return exponential(lanes); }, x);
    }

    // Sort pairs of row and expert by expert, then row. The shared expert reads all rows from `normed`.
    void group(const Experts& experts, const Rows& normed, int rows) {
        int ranks = experts.chosen + experts.shared, place = 0;
        pairs_ = rows * experts.chosen;
        groups_.clear();
        starts_.assign(size_t(experts.count) + 1, 0);
        for (int i = 0; i < rows * ranks; i++) starts_[size_t(chosen_[size_t(i)])]++;
        for (int expert = 0, slot = 0; expert < experts.count; expert++) {
            int own = starts_[size_t(expert)];
            starts_[size_t(expert)] = slot;
            if (!own) continue;
            groups_.push_back({expert, own, slot, from(gathered_, place), from(inner_, place)});
            for (int i = 0; i < own; i++) place_of_[size_t(slot + i)] = place + i;
            slot += own;
            place += round_up(own, ROW_TILE);
        }
        starts_[size_t(experts.count)] = pairs_;
        for (int i = 0; i < rows * ranks; i++) {
            int slot = starts_[size_t(chosen_[size_t(i)])]++;
            slot_of_[size_t(i)] = slot;
            row_of_[size_t(slot)] = i / ranks;
        }
        if (experts.shared) groups_.push_back({experts.count, rows, pairs_, normed, shared_inner_});
    }

    // Return the rows from `row` on, which must be a multiple of ROW_TILE.
    static Rows from(const Rows& rows, int row) {
        Rows out = rows;
        out.base = rows.at(row, 0);
        return out;
    }

    void gather(const Rows& normed, int slot) const {
        int row = row_of_[size_t(slot)], place = place_of_[size_t(slot)];
        for (int chunk = 0; chunk < width_ / CHUNK; chunk++) {
            std::memcpy(gathered_.at(place, chunk), normed.at(row, chunk), CHUNK * sizeof(T));
        }
    }

    // Multiply a row's outputs by their weights, add them in float32 in the order of ranks, and write row `to`.
    void add(const Experts& experts, int row, float* sums, const Finish& finish, int to) const {
        int ranks = experts.chosen + experts.shared, hidden = model_->hidden;
        for (int rank = 0; rank < ranks; rank++) {
            size_t at = size_t(row) * size_t(ranks) + size_t(rank);
            const float* own = outputs_ + size_t(slot_of_[at]) * size_t(hidden);
            float weight = weights_[at];
            int i = 0;
            for (; i + V::lanes <= hidden; i += V::lanes) {
                V product = V::load(own + i) * V::set(weight);
                (rank ? V::load(sums + i) + product : product).store(sums + i);
            }
            for (; i < hidden; i++) sums[i] = (rank ? sums[i] : 0.0f) + own[i] * weight;
        }
        size_t at = size_t(to) * finish.stride;
        if (finish.kind == Finish::ADD) return add_row<V, T>(sums, finish, at, hidden);
        store_row<V, T>(sums, finish, at, hidden);
    }

    Pool* pool_ = nullptr;
    const Model* model_ = nullptr;
    int rows_ = 0, pairs_ = 0, width_ = 0;
    Rows routed_{}, gathered_{}, inner_{}, shared_inner_{};
    float *logits_ = nullptr, *ranked_ = nullptr, *of_groups_ = nullptr, *outputs_ = nullptr, *weights_ = nullptr;
    std::vector<int32_t> chosen_, slot_of_;    // [row][rank]: experts, and the slots of their outputs
    std::vector<int32_t> row_of_, place_of_;   // [slot]: the slot's row, and its place in `gathered_`
    std::vector<int32_t> starts_;
    std::vector<Group> groups_;
};

}  // namespace streamserve
