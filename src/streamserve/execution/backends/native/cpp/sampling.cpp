#include "sampling.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "noise.h"

namespace streamserve {

namespace {

// All noise is between these bounds (execution/compute/noise.py).
constexpr double LOWEST = -3.63, HIGHEST = 36.74;
constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int GROUP = 64;
constexpr size_t SINGLE_THREAD_LOGITS = 1 << 16;  // up to this, waking a second thread costs more than it saves
constexpr size_t SAMPLED = 16;   // cost of a sampled logit relative to a compared one

// Return the first index of the largest value.
template <class T>
int first_best(const T* values, int count) {
    const T* found = std::find(values, values + count, largest(values, count));
    return found == values + count ? 0 : int(found - values);
}

// Return e^x for x ≤ 0, to about one unit in the last place, in a form that compilers vectorize.
inline double exponential(double x) {
    constexpr double LOG2_E = 1.4426950408889634, SHIFT = 0x1.8p52;
    constexpr double LN2_HIGH = 0x1.62e42fefa3800p-1, LN2_LOW = 0x1.ef35793c76730p-45;
    double clipped = x > -700.0 ? x : -700.0;
    double shifted = clipped * LOG2_E + SHIFT, power = shifted - SHIFT;
    double r = (clipped - power * LN2_HIGH) - power * LN2_LOW;
    double sum = 1.0 / 6227020800.0;
    for (double factorial : {479001600.0, 39916800.0, 3628800.0, 362880.0, 40320.0, 5040.0, 720.0, 120.0,
                             24.0, 6.0, 2.0, 1.0, 1.0}) {
        sum = sum * r + 1.0 / factorial;
    }
    uint64_t bits;
    std::memcpy(&bits, &shifted, 8);
    bits = (bits + 1023) << 52;  // shifts out the bits of SHIFT: only the lowest 12 bits remain
    double scale;
    std::memcpy(&scale, &bits, 8);
    return x > -700.0 ? sum * scale : 0.0;
}

// Return an upper bound of a token's noise, without a logarithm: -log(-log u) ≤ -log(1 - u), and the
// logarithm to base 2 of m·2ᵉ is at least e + m - 1. 1e-9 is added for rounding errors.
inline double noise_bound(uint64_t words) {
    double rest = 1.0 - uniform(words);
    int64_t bits;
    std::memcpy(&bits, &rest, 8);
    return (1023.0 - double(bits) * 0x1p-52) * 0.6931471805599454 + 1e-9;
}

// Return the id with the highest sum of score and noise, the lowest id of equal sums.
int draw_one(const Draw& draw, const double* scores, const int32_t* ids, int count) {
    double best = -INFINITE;
    int token = ids[0];
    auto consider = [&](double score, int id, uint64_t words) {
        double sum = score + gumbel(words);
        if (sum > best || (sum == best && id < token)) best = sum, token = id;
    };
    uint64_t words[LANES];
    double bounds[LANES];
    int start = first_best(scores, count);  // the best score first: it rules out most other tokens
    random_words(draw, ids + start, 1, words);
    consider(scores[start], ids[start], words[0]);
    for (int first = 0; first < count; first += LANES) {
        int lanes = std::min(LANES, count - first);
        random_words(draw, ids + first, lanes, words);
        for (int lane = 0; lane < LANES; lane++) bounds[lane] = noise_bound(words[lane]);
        for (int lane = 0; lane < lanes; lane++) {
            double score = scores[first + lane];
            if (score + bounds[lane] >= best) consider(score, ids[first + lane], words[lane]);
        }
    }
    return token;
}

// Samples a token from a row of logits, in a thread's memory.
class Row {
  public:
    static size_t bytes(int vocabulary) { return (sizeof(double) * 3 + sizeof(int32_t) * 2) * size_t(vocabulary); }

    Row(const Draw& draw, int vocabulary, char* memory) : draw_(draw), vocabulary_(vocabulary) {
        scores_ = reinterpret_cast<double*>(memory);
        kept_ = scores_ + vocabulary;
        work_ = kept_ + vocabulary;
        ids_ = reinterpret_cast<int32_t*>(work_ + vocabulary);
        order_ = ids_ + vocabulary;
    }

    int sample(const float* logits) {
        for (int i = 0; i < vocabulary_; i++) {
            scores_[i] = (draw_.scores ? draw_.scores[i] : double(logits[i])) / draw_.temperature;
        }
        double best = largest(scores_, vocabulary_);
        if (!std::isfinite(best)) return first_best(scores_, vocabulary_);
        bool nucleus = draw_.top_p < 1.0;
        double floor = nucleus ? -std::numeric_limits<double>::max() : best - (HIGHEST - LOWEST);
        if (draw_.min_score > -INFINITE) floor = std::max(floor, best + draw_.min_score);
        gather(floor);
        if (draw_.top_k > 0 && draw_.top_k < count_) keep_highest(draw_.top_k);
        if (nucleus) keep_nucleus(best);
        return draw_one(draw_, kept_, ids_, count_);
    }

  private:
    void gather(double floor) {
        count_ = 0;
        for (int i = 0; i < vocabulary_; i++) {
            kept_[count_] = scores_[i];
            ids_[count_] = i;
            count_ += scores_[i] >= floor;
        }
    }

    // Keep the `count` highest scores, of equal scores the lower ids. `count` must be less than count_.
    void keep_highest(int count) {
        double least = at_least(count);
        int candidates = 0;
        for (int i = 0; i < count_; i++) {
            work_[candidates] = kept_[i];
            candidates += kept_[i] >= least;
        }
        std::nth_element(work_, work_ + count - 1, work_ + candidates, std::greater<>());
        double last = work_[count - 1];
        int equals = count;
        for (int i = 0; i < count_; i++) equals -= kept_[i] > last;
        int size = 0;
        for (int i = 0; i < count_; i++) {
            if (kept_[i] < last || (kept_[i] == last && equals-- <= 0)) continue;
            kept_[size] = kept_[i];
            ids_[size++] = ids_[i];
        }
        count_ = size;
    }

    // Return a bound that at least `count` scores reach: the best scores of `count` groups reach it.
    double at_least(int count) {
        int groups = count_ / GROUP;
        if (groups <= count) return -INFINITE;
        for (int i = 0; i < groups; i++) work_[i] = largest(kept_ + i * GROUP, GROUP);
        std::nth_element(work_, work_ + count - 1, work_ + groups, std::greater<>());
        return work_[count - 1];
    }

    // Keep the smallest set of most likely tokens whose probabilities sum to top_p, of equal tokens the lower ids.
    void keep_nucleus(double best) {
        double sums[LANES] = {};
        for (int i = 0; i < count_; i++) work_[i] = exponential(kept_[i] - best);
        int i = 0;
        for (; i + LANES <= count_; i += LANES) {
            for (int lane = 0; lane < LANES; lane++) sums[lane] += work_[i + lane];
        }
        for (; i < count_; i++) sums[0] += work_[i];
        double sum = 0.0;
        for (double part : sums) sum += part;
        for (i = 0; i < count_; i++) work_[i] /= sum;
        Place last = nucleus_end();
        double floor = best - (HIGHEST - LOWEST);
        int size = 0;
        for (i = 0; i < count_; i++) {
            kept_[size] = kept_[i];
            ids_[size] = ids_[i];
            bool inside = work_[i] > last.value || (work_[i] == last.value && i <= last.place);
            size += inside && kept_[i] >= floor;
        }
        count_ = size;
    }

    struct Place {
        double value;
        int place;
    };

    // Return the least likely token of the nucleus. Probabilities are first summed in slots by exponent and
    // five more bits; only the slot in which top_p is reached is sorted.
    Place nucleus_end() {
        double sums[SLOTS] = {};
        for (int i = 0; i < count_; i++) sums[slot(work_[i])] += work_[i];
        int found = 0;
        double reached = 0.0;
        while (found < SLOTS && reached + sums[found] < draw_.top_p) reached += sums[found++];
        int size = 0;
        for (int i = 0; i < count_; i++) {
            order_[size] = i;
            size += slot(work_[i]) == found;
        }
        auto better = [this](int a, int b) { return work_[a] > work_[b] || (work_[a] == work_[b] && a < b); };
        std::sort(order_, order_ + size, better);
        for (int i = 0; i < size; i++) {
            reached += work_[order_[i]];
            if (reached >= draw_.top_p || i + 1 == size) return {work_[order_[i]], order_[i]};
        }
        return {0.0, count_};  // rounded sums do not reach top_p: the nucleus is all tokens
    }

    // Return the slot of a probability up to 1. Higher probabilities have lower slots.
    static int slot(double probability) {
        uint64_t bits;
        std::memcpy(&bits, &probability, 8);
        int64_t below = (int64_t(1023) << 5) - int64_t(bits >> 47);
        return below < SLOTS - 1 ? int(below) : SLOTS - 1;
    }

    static constexpr int SLOTS = 2048;

    const Draw& draw_;
    int vocabulary_, count_ = 0;
    double* scores_;  // [vocabulary]
    double* kept_;    // the scores of ids_; ids ascend
    double* work_;
    int32_t* ids_;
    int32_t* order_;  // indices of the other arrays
};

}  // namespace

void sample(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count, int32_t* tokens) {
    size_t work = 0;
    for (int i = 0; i < count; i++) work += size_t(vocabulary) * (draws[i].temperature == 0.0 ? 1 : SAMPLED);
    auto job = [&](int thread) {
        for (int number; (number = pool.claim()) < count;) {
            const Draw& draw = draws[number];
            const float* row = logits + size_t(draw.row) * size_t(vocabulary);
            if (!all_finite(row, vocabulary)) {  // sorting NaN could also access memory out of bounds
                tokens[number] = NOT_FINITE;
            } else if (draw.temperature == 0.0) {
                tokens[number] =
                    draw.scores ? first_best(draw.scores, vocabulary) : first_best(row, vocabulary);
            } else {
                tokens[number] =
                    Row(draw, vocabulary, pool.scratch(thread, Row::bytes(vocabulary))).sample(row);
            }
        }
    };
    pool.run(job, count == 1 || work <= SINGLE_THREAD_LOGITS);
}

}  // namespace streamserve
