#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include "noise.h"
#include "sampling.h"

namespace streamserve {

namespace {

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr int CANDIDATES = 32;          // equals the number in selection.py
constexpr int GROUP = 64;               // adjacent tokens of a group, whose best score is computed
constexpr size_t SINGLE_THREAD_LOGITS = 1 << 16;  // up to this, waking a second thread costs more than it saves

// Return e^x for x ≤ 0, with a relative error of about 1e-6, in a form that compilers vectorize.
inline float exponential(float x) {
    constexpr float LOG2_E = 1.44269504f, SHIFT = 0x1.8p23f, LN2_HIGH = 0.693359375f, LN2_LOW = -2.12194440e-4f;
    float clipped = x > -87.0f ? x : -87.0f;
    float shifted = clipped * LOG2_E + SHIFT, power = shifted - SHIFT;
    float r = (clipped - power * LN2_HIGH) - power * LN2_LOW;
    float sum = 1.0f / 720.0f;
    for (float factorial : {120.0f, 24.0f, 6.0f, 2.0f, 1.0f, 1.0f}) sum = sum * r + 1.0f / factorial;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits = (bits + 127) << 23;
    float scale;
    std::memcpy(&scale, &bits, 4);
    return sum * scale;
}

// A row's likeliest tokens, the best first, of equal scores the lower id first. `T` is the type of the scores.
template <class T>
class Likeliest {
  public:
    static size_t bytes(int vocabulary) { return size_t(vocabulary) * (sizeof(int32_t) + sizeof(T)); }

    Likeliest(const T* scores, int vocabulary, char* memory)
        : scores_(scores), vocabulary_(vocabulary), work_(reinterpret_cast<T*>(memory)),
          ids_(reinterpret_cast<int32_t*>(work_ + vocabulary)) {}

    int find() {
        T bound = candidate_bound();
        int count = 0;
        for (int i = 0; i < vocabulary_; i++) {
            if (scores_[i] >= bound && scores_[i] > -std::numeric_limits<T>::infinity()) ids_[count++] = i;
        }
        auto better = [this](int a, int b) {
            return scores_[a] > scores_[b] || (scores_[a] == scores_[b] && a < b);
        };
        int selected = std::min(count, CANDIDATES);
        std::partial_sort(ids_, ids_ + selected, ids_ + count, better);
        return selected;
    }

    int id(int rank) const { return ids_[rank]; }
    double score(int rank) const { return double(scores_[ids_[rank]]); }

    // Return the logarithm of the sum of e^((score - best) / temperature) over all tokens.
    double log_sum(double temperature) const {
        float best = float(score(0)), factor = float(1.0 / temperature), sums[LANES] = {};
        int i = 0;
        for (; i + LANES <= vocabulary_; i += LANES) {
            for (int lane = 0; lane < LANES; lane++) {
                sums[lane] += exponential((float(scores_[i + lane]) - best) * factor);
            }
        }
        for (; i < vocabulary_; i++) sums[0] += exponential((float(scores_[i]) - best) * factor);
        double sum = 0.0;
        for (float part : sums) sum += double(part);
        return std::log(sum);
    }

  private:
    // Return a bound that at least CANDIDATES scores reach: the best scores of CANDIDATES groups reach it.
    T candidate_bound() {
        int groups = vocabulary_ / GROUP;
        if (groups < CANDIDATES) return -std::numeric_limits<T>::infinity();
        for (int i = 0; i < groups; i++) work_[i] = largest(scores_ + i * GROUP, GROUP);
        std::nth_element(work_, work_ + CANDIDATES - 1, work_ + groups, std::greater<>());
        return work_[CANDIDATES - 1];
    }

    const T* scores_;
    int vocabulary_;
    T* work_;
    int32_t* ids_;
};

struct Candidate {
    double score;
    int32_t id;
};

// Return the number of candidates, whose scores are log-probabilities, that min_p, top_k and top_p leave.
int count_allowed(const Draw& draw, const Candidate* candidates, int count) {
    if (draw.top_k > 0) count = std::min(count, int(draw.top_k));
    double before = 0.0;
    for (int i = 0; i < count; i++) {
        if (candidates[i].score < candidates[0].score + draw.min_score) return i;
        if (draw.top_p < 1.0 && before >= draw.top_p) return i;
        before += std::exp(candidates[i].score);
    }
    return count;
}

void add_noise(const Draw& draw, Candidate* candidates, int count) {
    int32_t ids[CANDIDATES];
    uint64_t words[LANES];
    for (int i = 0; i < count; i++) ids[i] = candidates[i].id;
    random_words(draw, ids, count, words);
    for (int i = 0; i < count; i++) candidates[i].score += gumbel(words[i]);
    std::sort(candidates, candidates + count,
              [](const Candidate& a, const Candidate& b) { return a.score > b.score; });
}

template <class T>
void select_row(const Draw& draw, const T* scores, int vocabulary, char* memory, int best, int32_t* tokens,
                double* selected_scores) {
    static_assert(CANDIDATES <= LANES);
    Candidate candidates[CANDIDATES];
    Likeliest<T> likeliest(scores, vocabulary, memory);
    int count = likeliest.find();
    bool greedy = draw.temperature == 0.0;
    double temperature = greedy ? 1.0 : draw.temperature;
    double sum = count ? likeliest.log_sum(temperature) : 0.0;
    for (int i = 0; i < count; i++) {
        candidates[i] = {(likeliest.score(i) - likeliest.score(0)) / temperature - sum, likeliest.id(i)};
    }
    if (!greedy) {
        count = count_allowed(draw, candidates, count);
        add_noise(draw, candidates, count);
    }
    for (int i = 0; i < best; i++) {
        tokens[i] = i < count ? candidates[i].id : -1;
        selected_scores[i] = i < count ? candidates[i].score : -INFINITE;
    }
}

}  // namespace

void select_draft_tokens(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count,
                         int best, int32_t* tokens, double* scores) {
    size_t bytes = Likeliest<double>::bytes(vocabulary);
    auto job = [&](int thread) {
        for (int number; (number = pool.claim()) < count;) {
            const Draw& draw = draws[number];
            const float* row = logits + size_t(draw.row) * size_t(vocabulary);
            char* memory = pool.scratch(thread, bytes);
            int32_t* ids = tokens + size_t(number) * size_t(best);
            double* selected_scores = scores + size_t(number) * size_t(best);
            if (!all_finite(row, vocabulary)) {
                std::fill(ids, ids + best, NOT_FINITE);
                std::fill(selected_scores, selected_scores + best, -INFINITE);
            } else if (draw.scores) {
                select_row(draw, draw.scores, vocabulary, memory, best, ids, selected_scores);
            } else {
                select_row(draw, row, vocabulary, memory, best, ids, selected_scores);
            }
        }
    };
    pool.run(job, size_t(count) * size_t(vocabulary) <= SINGLE_THREAD_LOGITS);
}

}  // namespace streamserve
