"""The service reads prompts before trees are requested for them, but never delays trees for that."""

from streamserve.contracts.plan import DraftRequest
from streamserve.protocol.drafting import DraftRequests, Lost
from streamserve.protocol.sampling import SamplingParams
from tests.draft_service.client_side import Side
from tests.draft_service.service_client import ServiceClient

PROMPT = [number % 50 for number in range(40)]
AHEAD = {"depth": 0, "width": 0, "nodes": 0}


def read(client: ServiceClient) -> list[tuple[int, int]]:
    """Draft one batch; return for each of its requests how many tokens were read, and the depth of its
    tree."""
    batch = client.service.loop.batch(client.now)
    assert batch is not None
    trees = client.drafter.draft(batch)
    assert client.service.loop.drafted(batch, trees, client.now) or not any(r.depth for r in batch.requests)
    return [(request.length - request.computed, request.depth) for request in batch.requests]


def test_a_prompt_is_read_without_an_answer_and_its_tree_needs_no_more_of_it() -> None:
    client = ServiceClient()
    assert client.request("a", client.delta("a", PROMPT, **AHEAD)) == []
    assert read(client) == [(40, 0)]
    assert client.service.loop.batch(client.now) is None, "nothing waits"
    client.request("a", client.delta("a", [7], retained=40))
    assert read(client) == [(1, 4)]


def test_a_tree_that_is_requested_while_its_prompt_is_read_is_drafted_next() -> None:
    client = ServiceClient()
    client.request("a", client.delta("a", PROMPT, **AHEAD))
    batch = client.service.loop.batch(client.now)
    client.request("a", client.delta("a", PROMPT[-1:], retained=39))
    assert client.service.loop.drafted(batch, client.drafter.draft(batch), client.now) == []
    assert read(client) == [(0, 4)]


def test_trees_go_first_and_are_not_drafted_together_with_prompts() -> None:
    client = ServiceClient(max_read=16)
    client.request("a", client.delta("a", PROMPT, **AHEAD), client.delta("a", PROMPT, sequence=2, **AHEAD))
    client.request("b", client.delta("b", [1, 2]))
    client.request("a", client.delta("a", [3, 4], sequence=3))
    assert sorted(read(client)) == [(2, 4), (2, 4)], "both trees"
    assert read(client) == [(16, 0)], "only one chunk is read, because a tree may be requested meanwhile"
    client.request("b", client.delta("b", [5], retained=2))
    assert read(client) == [(1, 4)]
    assert [read(client)[0][1] for _ in range(5)] == [0] * 5
    assert client.service.loop.batch(client.now) is None


def test_an_edit_of_a_prompt_that_arrives_keeps_what_was_read_of_the_prefix() -> None:
    client = ServiceClient()
    client.request("a", client.delta("a", PROMPT, **AHEAD))
    read(client)
    edited = [*PROMPT[:30], 9, 9, 9]
    client.request("a", client.delta("a", edited, epoch=1, **AHEAD))
    assert read(client) == [(3, 0)]


def test_reading_is_not_taken_for_the_time_until_the_next_request() -> None:
    client = ServiceClient()
    client.request("a", client.delta("a", [1, 2]))
    client.draft_batch()
    client.request("a", client.delta("a", PROMPT, sequence=2, **AHEAD))
    assert client.service.statistics.return_seconds.count == 0
    client.draft_batch()
    client.now += 0.05
    client.request("a", client.delta("a", [3], retained=2))
    assert client.service.statistics.return_seconds.count == 1
    assert client.service.sessions[client.welcomes["a"].tag].requested_at == client.now


def foreseen(length: int, epoch: int = 0) -> DraftRequest:
    tokens = [number % 50 for number in range(length)]
    params = SamplingParams(temperature=0.0)
    return DraftRequest(1, epoch, tokens, length, 0, 0, params, 0, 0, 0, 0, [])


def sent(outs: list) -> list:
    return [delta for out in outs if isinstance(out.message, DraftRequests) for delta in out.message.deltas]


def test_a_client_sends_what_is_new_of_a_prompt_and_again_to_another_session() -> None:
    side = Side()
    side.open()
    side.client.sequences.foresee([foreseen(20)])
    assert [(d.base, d.retained, len(d.tokens), d.depth) for d in sent(side.client.tick(side.now))] == [
        (0, 0, 20, 0)
    ]
    assert not sent(side.client.tick(side.now)), "once"
    side.client.sequences.foresee([foreseen(26)])
    assert [(d.retained, len(d.tokens)) for d in sent(side.client.tick(side.now))] == [(20, 6)]
    side.client.sequences.by_id[1].reset()  # as for a restarted service
    assert [(d.base, len(d.tokens)) for d in sent(side.client.tick(side.now))] == [(0, 26)]


def test_a_lost_prompt_is_sent_with_the_request_for_its_tree() -> None:
    client = ServiceClient()
    client.hello("a")
    client.delta("a", PROMPT, **AHEAD)  # lost in transit
    (out,) = client.request("a", client.delta("a", [7], retained=40))
    assert isinstance(out.message, Lost)
