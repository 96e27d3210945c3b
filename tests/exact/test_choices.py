"""The choices of a request share its prompt's blocks and copy on write, and each has the text that it would
have alone."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from streamserve.protocol.messages import Submit, Token
from streamserve.protocol.sampling import SamplingParams
from tests.checkpoints import make_checkpoint
from tests.conftest import Scale
from tests.exact.generating import Case, make_engine, make_prompts

CHOICES = 4
MAX_OUTPUT = 40


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama"), max_position_embeddings=2048)


def run(engine, requests: list[Submit]) -> dict[tuple[str, int], list[int]]:
    texts: dict[tuple[str, int], list[int]] = {}
    for request in requests:
        engine.handle(request)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Token):
                texts.setdefault((event.request, event.choice), []).append(event.token)
    assert engine.report().blocks_live == 0
    return texts


@pytest.mark.parametrize(
    "case", [Case(), Case(chunk=7), Case(chunk=64, preempt_every=6), Case(blocks=100)], ids=str
)
def test_a_choice_is_the_same_co_batched_and_alone(
    checkpoint: Path, case: Case, scale: Scale, record: Callable[..., None]
) -> None:
    count = scale.pick(8 if case.blocks < 200 else 4, 50)
    rng = random.Random(scale.seed)
    together, alone = make_engine(checkpoint, case), make_engine(checkpoint, Case())
    prompts = make_prompts(rng, count, 400, together.model.vocab_size)
    requests = [
        Submit(
            str(number), prompt, SamplingParams(
                n=CHOICES, seed=number, max_tokens=MAX_OUTPUT, ignore_eos=True,
                frequency_penalty=rng.choice((0.0, 0.5)), repetition_penalty=rng.choice((1.0, 1.2)),
            ), outputs={choice: [] for choice in range(CHOICES)}, arrival=float(number),
        )
        for number, prompt in enumerate(prompts)
    ]  # fmt: skip
    texts = run(together, requests)
    assert len(texts) == count * CHOICES
    for request in requests:
        for choice in range(CHOICES):
            single = Submit(request.request, request.prompt, request.params, outputs={choice: []})
            assert run(alone, [single]) == {(request.request, choice): texts[request.request, choice]}
    report = together.report()
    assert report.copies_on_write > count
    if case.preempt_every or case.blocks < 200:
        assert report.preemptions > 0
    assert alone.report().copies_on_write == 0
    record(requests=count, choices=len(texts), copies_on_write=report.copies_on_write,
           preemptions=report.preemptions, seed=scale.seed)  # fmt: skip
