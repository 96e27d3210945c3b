"""Requests can begin with outputs that the workers of another head have stored."""

import msgspec

from streamserve.fleet.events import Deliver, Send, Tick, WorkerMessage
from streamserve.fleet.fleet import Fleet
from streamserve.fleet.kept_outputs import MAX_OUTPUTS, KeptOutputStore
from streamserve.protocol.kept import KEPT_SECONDS, digest_of
from streamserve.protocol.messages import KeptOutput, KeptOutputs, KeptToken, Token
from streamserve.protocol.sampling import Pooling, SamplingParams
from tests.fleet.fakes import OPEN, READY, W, send_events, started, submitted

DIGEST = b"d" * 16
MODEL = READY.model.kv_name
AGAIN = msgspec.structs.replace(OPEN, keep=DIGEST)
SCORED = msgspec.structs.replace(AGAIN, params=SamplingParams(seed=1, max_tokens=9, logprobs=0))


def kept(choices: dict[int, list[KeptToken]], model: str = MODEL, digest: bytes = DIGEST) -> KeptOutputs:
    return KeptOutputs(model, [KeptOutput(digest, choices)])


def with_kept(choices: dict[int, list[KeptToken]], model: str = MODEL) -> Fleet:
    fleet = started()
    assert fleet.handle(WorkerMessage(W, 1, kept(choices, model)), 0.0) == []
    return fleet


def delivered(commands) -> list[Deliver]:
    return [command for command in commands if isinstance(command, Deliver)]


def test_a_repeated_request_gets_its_tokens_at_once_and_the_rest_is_computed() -> None:
    fleet = with_kept({0: [KeptToken(7), KeptToken(8)]})
    commands = fleet.handle(AGAIN, 1.0)
    assert delivered(commands) == [Deliver("r", [Token("r", 0, 0, 0, 7), Token("r", 0, 0, 1, 8)], False)]
    assert submitted(commands).outputs == {0: [7, 8]}
    assert submitted(commands).keep == DIGEST
    assert submitted(commands).began == {0: 1.0}
    (last,) = delivered(send_events(fleet, Token("r", 0, 0, 1, 8), Token("r", 0, 0, 2, 9, finish="stop")))
    assert last == Deliver("r", [Token("r", 0, 0, 2, 9, finish="stop")], True)
    assert (fleet.incidents().resumed_outputs, fleet.incidents().resumed_tokens) == (1, 2)


def test_a_complete_answer_needs_no_worker() -> None:
    fleet = with_kept({0: [KeptToken(7), KeptToken(8, finish="length")]})
    commands = fleet.handle(AGAIN, 1.0)
    assert [command.last for command in delivered(commands)] == [True]
    assert not [command for command in commands if isinstance(command, Send)]
    assert not fleet.requests
    assert not fleet.dispatcher.waiting


def test_each_choice_begins_with_its_own_tokens() -> None:
    fleet = with_kept({0: [KeptToken(7, finish="stop")], 1: [KeptToken(5)], 5: [KeptToken(1)]})
    params = SamplingParams(seed=1, max_tokens=9, n=3)
    commands = fleet.handle(msgspec.structs.replace(AGAIN, params=params), 1.0)
    assert submitted(commands).outputs == {1: [5], 2: []}
    assert fleet.requests["r"].open_choices == {1, 2}


def test_another_request_or_another_model_gets_nothing() -> None:
    fleet = with_kept({0: [KeptToken(7)]})
    stream = msgspec.structs.replace(AGAIN, open=True)
    for other in (OPEN, msgspec.structs.replace(OPEN, keep=b"e" * 16), stream):
        commands = fleet.handle(msgspec.structs.replace(other, request=f"x{other.keep!r}{other.open}"), 1.0)
        assert not delivered(commands)
    fleet = with_kept({0: [KeptToken(7)]}, model="another")
    assert submitted(fleet.handle(AGAIN, 1.0)).outputs == {0: []}
    assert fleet.incidents().resumed_outputs == 0


def test_outputs_of_several_workers_are_merged() -> None:
    store = KeptOutputStore()
    store.add(kept({0: [KeptToken(7), KeptToken(8, -0.2)]}), 0.0)
    assert store.find(MODEL, SCORED, 0.0) == {}, "the first log-probability is not known"
    store.add(kept({0: [KeptToken(7, -0.1)]}), 0.0)
    assert store.find(MODEL, SCORED, 0.0) == {0: [KeptToken(7, -0.1), KeptToken(8, -0.2)]}
    store.add(kept({0: [KeptToken(7), KeptToken(9), KeptToken(9)]}), 0.0)
    assert store.find(MODEL, SCORED, 0.0) == {0: [KeptToken(7, -0.1)]}, (
        "the stored outputs contradict each other"
    )
    assert len(store) == 1


def test_they_are_forgotten_though_no_client_asks() -> None:
    fleet = with_kept({0: [KeptToken(7)]})
    fleet.handle(Tick({}), KEPT_SECONDS)
    assert len(fleet.kept) == 1
    fleet.handle(Tick({}), KEPT_SECONDS + 1)
    assert not len(fleet.kept)


def test_they_are_forgotten_after_a_time_and_beyond_a_number() -> None:
    store = KeptOutputStore()
    store.add(kept({0: [KeptToken(7)]}), 0.0)
    assert store.find(MODEL, AGAIN, KEPT_SECONDS)
    assert not store.find(MODEL, AGAIN, KEPT_SECONDS + 1)
    assert not len(store)
    for number in range(MAX_OUTPUTS + 3):
        store.add(kept({0: [KeptToken(7)]}, digest=number.to_bytes(16, "big")), 0.0)
    assert len(store) == MAX_OUTPUTS


def test_the_digest_is_that_of_the_whole_request() -> None:
    params = SamplingParams(seed=1)
    digests = {
        digest_of("k", [1, 2], params, "", ""),
        digest_of("other", [1, 2], params, "", ""),
        digest_of("k", [1, 3], params, "", ""),
        digest_of("k", [1, 2], SamplingParams(seed=2), "", ""),
        digest_of("k", [1, 2], SamplingParams(seed=1, max_tokens=17), "", ""),
        digest_of("k", [1, 2], params, "salt", ""),
        digest_of("k", [1, 2], params, "", "ab"),
    }
    assert len(digests) == 7
    assert digest_of("k", [1, 2], SamplingParams(seed=1), "", "") in digests
    assert digest_of("", [1, 2], params, "", "") == b""
    assert digest_of("k", [1], SamplingParams(max_tokens=0, pooling=Pooling()), "", "") == b""
    assert digest_of("k", [1], SamplingParams(prompt_logprobs=1), "", "") == b""


def test_an_adopted_worker_is_counted() -> None:
    fleet = Fleet(started().config)
    fleet.start(0.0)
    fleet.handle(WorkerMessage(W, 1, msgspec.structs.replace(READY, adopted=True)), 0.0)
    assert fleet.incidents().adopted == 1
