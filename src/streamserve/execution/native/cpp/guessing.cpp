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
constexpr int CANDIDATES = 32;          // as in guesses.py
constexpr int GROUP = 64;               // neighbours of which the best is known
constexpr size_t FEW = 1 << 16;         // logits that are looked at before a second thread would be there

// e^x for x ≤ 0, to some 1e-6, in a form that compilers turn into vectors.
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

// A row's likeliest tokens, the best first, of equals the lower id. `T` is what its scores are kept in.
template <class T>
class Likeliest {
  public:
    static size_t bytes(int vocabulary) { return size_t(vocabulary) * (sizeof(int32_t) + sizeof(T)); }

    Likeliest(const T* scores, int vocabulary, char* memory)
        : scores_(scores), vocabulary_(vocabulary), work_(reinterpret_cast<T*>(memory)),
          ids_(reinterpret_cast<int32_t*>(work_ + vocabulary)) {}

    int find() {
        T least = at_least();
        int count = 0;
        for (int i = 0; i < vocabulary_; i++) {
            if (scores_[i] >= least && scores_[i] > -std::numeric_limits<T>::infinity()) ids_[count++] = i;
        }
        auto better = [this](int a, int b) {
            return scores_[a] > scores_[b] || (scores_[a] == scores_[b] && a < b);
        };
        int kept = std::min(count, CANDIDATES);
        std::partial_sort(ids_, ids_ + kept, ids_ + count, better);
        return kept;
    }

    int id(int place) const { return ids_[place]; }
    double score(int place) const { return double(scores_[ids_[place]]); }

    // The logarithm of the sum of e^((score - best) / temperature).
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
    // Something that enough scores reach: so many groups have a best one that does.
    T at_least() {
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

struct Guess {
    double score;
    int32_t id;
};

// How many of the likeliest, whose logarithms these are, min_p, top_k and top_p leave.
int survivors(const Draw& draw, const Guess* guesses, int count) {
    if (draw.top_k > 0) count = std::min(count, int(draw.top_k));
    double before = 0.0;
    for (int i = 0; i < count; i++) {
        if (guesses[i].score < guesses[0].score + draw.min_score) return i;
        if (draw.top_p < 1.0 && before >= draw.top_p) return i;
        before += std::exp(guesses[i].score);
    }
    return count;
}

void add_noise(const Draw& draw, Guess* guesses, int count) {
    int32_t ids[CANDIDATES];
    uint64_t words[LANES];
    for (int i = 0; i < count; i++) ids[i] = guesses[i].id;
    random_words(draw, ids, count, words);
    for (int i = 0; i < count; i++) guesses[i].score += gumbel(words[i]);
    std::sort(guesses, guesses + count, [](const Guess& a, const Guess& b) { return a.score > b.score; });
}

template <class T>
void guess_row(const Draw& draw, const T* scores, int vocabulary, char* memory, int best, int32_t* tokens,
               double* found) {
    static_assert(CANDIDATES <= LANES);
    Guess guesses[CANDIDATES];
    Likeliest<T> likeliest(scores, vocabulary, memory);
    int count = likeliest.find();
    bool greedy = draw.temperature == 0.0;
    double temperature = greedy ? 1.0 : draw.temperature;
    double sum = count ? likeliest.log_sum(temperature) : 0.0;
    for (int i = 0; i < count; i++) {
        guesses[i] = {(likeliest.score(i) - likeliest.score(0)) / temperature - sum, likeliest.id(i)};
    }
    if (!greedy) {
        count = survivors(draw, guesses, count);
        add_noise(draw, guesses, count);
    }
    for (int i = 0; i < best; i++) {
        tokens[i] = i < count ? guesses[i].id : -1;
        found[i] = i < count ? guesses[i].score : -INFINITE;
    }
}

}  // namespace

void guess(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count, int best,
           int32_t* tokens, double* scores) {
    size_t bytes = Likeliest<double>::bytes(vocabulary);
    auto job = [&](int thread) {
        for (int number; (number = pool.claim()) < count;) {
            const Draw& draw = draws[number];
            const float* row = logits + size_t(draw.row) * size_t(vocabulary);
            char* memory = pool.scratch(thread, bytes);
            int32_t* ids = tokens + size_t(number) * size_t(best);
            double* found = scores + size_t(number) * size_t(best);
            if (!all_finite(row, vocabulary)) {
                std::fill(ids, ids + best, NOT_FINITE);
                std::fill(found, found + best, -INFINITE);
            } else if (draw.scores) {
                guess_row(draw, draw.scores, vocabulary, memory, best, ids, found);
            } else {
                guess_row(draw, row, vocabulary, memory, best, ids, found);
            }
        }
    };
    pool.run(job, size_t(count) * size_t(vocabulary) <= FEW);
}

}  // namespace streamserve
