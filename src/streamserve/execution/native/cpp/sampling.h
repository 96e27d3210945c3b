// Choosing tokens after rows of logits: what execution/sampling.py does with numpy, step by step in float64.
#pragma once

#include "abi.h"
#include "pool.h"

namespace streamserve {

// One choice. `scores` are the row's logits with everything applied that comes before the temperature, or
// null: then they are row `row` of the logits as they are. Temperature 0 takes the best score.
struct Draw {
    const double* scores;
    uint64_t seed;
    double temperature, top_p;
    double min_score;  // the logarithm of min_p: how far below the best a score may be
    int32_t row, top_k;
    uint32_t choice, index;
};
ABI_STRUCT(Draw, ABI_FIELD(scores), ABI_FIELD(seed), ABI_FIELD(temperature), ABI_FIELD(top_p), ABI_FIELD(min_score),
           ABI_FIELD(row), ABI_FIELD(top_k), ABI_FIELD(choice), ABI_FIELD(index));

// The token of a row whose logits are not all finite: as execution/sampling.py.
constexpr int32_t NOT_FINITE = -1;

// For each draw on `logits` [.., vocabulary] its token. Threads share out the draws.
void sample(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count, int32_t* tokens);

// For each draw its `best` draft tokens and their scores, both [count][best], the best first: logarithms of the
// softmax, with the noise added unless the temperature is 0. Only the likeliest tokens are looked at (what
// execution/drafters/selection.py does with numpy). Where there are fewer, token -1 and -infinity.
void select_draft_tokens(Pool& pool, const float* logits, int vocabulary, const Draw* draws, int count,
                         int best, int32_t* tokens, double* scores);

}  // namespace streamserve
