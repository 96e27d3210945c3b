"""A sequence holds its request; a branch for another choice shares it, with a state of its own."""

from streamserve.engine.sequence import EngineSequence, MemoryClaim
from streamserve.engine.validation import make_sequence
from streamserve.protocol.messages import Submit
from streamserve.protocol.sampling import SamplingParams

REQUEST = Submit(
    "r", [1, 2, 3], SamplingParams(n=2), attempt=4, priority=-1, arrival=5.0, adapter="a", tail=2, version=7,
    open=True, answer_early=True, outputs={0: [], 1: []},
)  # fmt: skip


def sequence() -> EngineSequence:
    made = make_sequence(REQUEST, (0, 1), id=1, root=b"root", groups=2, survival=0.5)
    made.stream.retained_lengths.append(2)
    made.stream.claim, made.stream.progress_at = MemoryClaim.FREE, 6.0
    return made


def test_a_branch_has_the_request_and_the_tokens_but_no_blocks() -> None:
    original = sequence()
    original.kv.blocks.append(9)
    branch = original.branch(2, 1)
    assert branch.submitted is REQUEST
    assert (branch.id, branch.choices, branch.request, branch.attempt) == (2, (1,), "r", 4)
    assert branch.tokens == original.tokens
    assert branch.tokens is not original.tokens
    assert (branch.kv.root, branch.kv.blocks, branch.lookup_counted) == (b"root", [], True)


def test_a_branch_of_a_prompt_stream_has_its_version_but_no_history() -> None:
    original = sequence()
    stream = original.branch(2, 1).stream
    kept = (stream.open, stream.tail, stream.version, stream.last_chunk_at, stream.survival)
    assert kept == (True, 2, 7, 5.0, 0.5)
    assert (list(stream.retained_lengths), stream.claim, stream.progress_at) == ([], MemoryClaim.ANY, -1.0)
    stream.open = False
    assert original.stream.open
