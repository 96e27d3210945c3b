// Choice of tokens from rows of logits, with the same float64 operations as execution/compute/sampling.py does with numpy.
#pragma once

#include "abi.h"
#include "pool.h"

namespace streamserve {

// One choice of a token. `scores`: the row's logits after all adjustments that precede the temperature; null:
// row `row` of the logits, unadjusted. Temperature 0 chooses the best score.
struct Draw {
    const double* scores;
    uint64_t seed;
    double temperature, top_p;
    double min_score;  // logarithm of min_p: the lowest allowed score minus the best score
    int32_t row, top_k;
    uint32_t choice, index;
};
ABI_STRUCT(Draw, ABI_FIELD(scores), ABI_FIELD(seed), ABI_FIELD(temperature), ABI_FIELD(top_p), ABI_FIELD(min_score),
           ABI_FIELD(row), ABI_FIELD(top_k), ABI_FIELD(choice), ABI_FIELD(index));

// The token of a row with logits that are not finite; the same as in execution/compute/sampling.py.
constexpr int32_t NOT_FINITE = -1;

// Write to `tokens` the token of each draw on `logits` [rows, vocabulary]. Draws are shared among threads.
void sample(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count, int32_t* tokens);

// Write the `best` draft tokens of each draw and their scores, both [count][best], the best first. A score is
// the logarithm of the softmax, plus noise unless the temperature is 0. Only the likeliest tokens are
// considered, as in execution/compute/draft_selection.py with numpy. If there are fewer than `best`, the others
// are token -1 with -infinity.
void select_draft_tokens(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count,
                         int best, int32_t* tokens, double* scores);

}  // namespace streamserve
