"""The prompts and answers of reranking models like Qwen3-Reranker, which judge whether a document is
relevant."""

import math
from dataclasses import dataclass

import numpy as np

from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.sampling import Pooling, SamplingParams
from streamserve.text.prompt_text import PromptText, joined
from streamserve.text.tokenizer import Tokenizer

INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""The instruction as published with the model, for requests that give none."""

_BEGIN = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the "
    'Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
END = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""The text of every prompt after its document."""


@dataclass(frozen=True)
class RerankScoring:
    """How a reranking model scores: by the logits of the tokens `no` and `yes`."""

    no: int
    yes: int

    def prompt(
        self, query: PromptText | str, document: PromptText | str, instruction: PromptText | str | None = None
    ) -> PromptText:
        """Return the prompt that asks the model to judge a document."""
        instruct = INSTRUCTION if instruction is None else instruction
        return joined(
            f"{_BEGIN}<Instruct>: ", instruct, "\n<Query>: ", query, "\n<Document>: ", document, END
        )

    @property
    def params(self) -> SamplingParams:
        """The parameters of a request for the logits of `no` and `yes`."""
        return SamplingParams(max_tokens=0, temperature=0.0, pooling=Pooling("logits", (self.no, self.yes)))

    def score(self, vector: bytes) -> float:
        """Return the probability of yes rather than no, from the logits of such a request."""
        no, yes = np.frombuffer(vector, "<f4").astype(float)
        return probability(float(yes) - float(no))


def probability(logit: float) -> float:
    """Return the logistic function of `logit`, without overflow."""
    return 1 / (1 + math.exp(-logit)) if logit >= 0 else math.exp(logit) / (1 + math.exp(logit))


def scoring(tokenizer: Tokenizer) -> RerankScoring:
    """Return how the model with this tokenizer scores.

    Raises CheckpointError unless "no" and "yes" are one token each.
    """
    no, yes = (tokenizer.encode(answer, add_special_tokens=False) for answer in ("no", "yes"))
    if len(no) != 1 or len(yes) != 1:
        raise CheckpointError('--task score: the tokenizer has no tokens "no" and "yes" to score by')
    return RerankScoring(no[0], yes[0])
