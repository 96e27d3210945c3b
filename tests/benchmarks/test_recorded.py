"""A recorded draft is replayed in virtual time: it matches at the recorded positions, and costs its
passes."""

from pathlib import Path

import numpy as np
import pytest

from benchmarks.recorded import KINDS, RecordedDrafter, Recording, pack, unpack
from streamserve.baselines.speculation import NAMES
from streamserve.contracts.engine_config import EngineConfig
from streamserve.fleet.config import FleetConfig
from streamserve.fleet.events import Deliver, Open
from streamserve.protocol.messages import Token
from streamserve.protocol.sampling import SamplingParams, Slo
from streamserve.simulate.simulation import Simulation
from streamserve.simulate.worker import WorkerSpec
from tests.engine.drive import assert_engine_empty, expected, model_info

ENGINE = EngineConfig(num_blocks=200, block_size=4, max_model_len=96, max_num_seqs=8)
HALF = (((0, 0.75, True), (1, 0.5, False)), ((0, 0.25, False), (0, 0.25, True)))
"""Two positions: the first draft token of a chain matches, its second does not; a second sibling matches."""
RECORDING = Recording({kind: list(HALF) for kind in KINDS}, (0, 2), ("synthetic",))
RECORDING_FILE = Path(__file__).parents[2] / "benchmarks" / "data" / "acceptance.npz"


def serve(policy: str, recording: Recording = RECORDING, slo: Slo | None = None):
    simulation = Simulation(
        FleetConfig(),
        WorkerSpec(
            ENGINE,
            model_info(96),
            lambda tokens, kv: 1.0 + tokens / 64,
            start_seconds=0.0,
            policy=policy,
            drafter=lambda executor: RecordedDrafter(recording, executor, lambda tokens: 0.01),
        ),
    )
    requests = [
        Open(str(n), [n + 1, 5, 7], SamplingParams(
            temperature=0.0, seed=n, max_tokens=40, slo=slo or Slo()))
        for n in range(3)
    ]  # fmt: skip
    for request in requests:
        simulation.at(0.0, request)
    texts: dict[str, list[int]] = {}
    received = simulation.run()
    for item in received:
        assert isinstance(item.message, Deliver)
        for event in item.message.events:
            if isinstance(event, Token):
                texts.setdefault(event.request, []).append(event.token)
    for request in requests:
        assert texts[request.request] == expected(request.prompt, request.params, 0, 96)
    engine = simulation.workers["unified-0"].engine
    assert_engine_empty(engine)
    return engine.speculation.counters, received[-1].time


@pytest.mark.parametrize("policy", [*NAMES, "fixed:2"])
@pytest.mark.parametrize("slo", [Slo(), Slo(tpot_ms=700.0)], ids=["blind", "targets"])
def test_every_policy_gives_the_text_of_plain_decoding(policy: str, slo: Slo) -> None:
    counters, _ = serve(policy, slo=slo)
    assert policy == "off" or counters.accepted > 0


def test_matching_nodes_are_accepted_and_save_time() -> None:
    counters, end = serve("fixed:2")
    assert 0 < counters.accepted < counters.verified
    assert counters.draft_seconds > 0
    assert end < serve("off")[1]


def test_a_step_takes_what_drafting_and_verifying_take() -> None:
    counters, end = serve("fixed:2")
    assert abs(counters.draft_seconds - 0.01 * round(counters.draft_seconds / 0.01)) < 1e-9, (
        "one pass for each level"
    )
    assert end > counters.draft_seconds


def test_a_recording_survives_packing() -> None:
    unpacked = unpack(pack(RECORDING))
    assert unpacked.starts == RECORDING.starts
    assert unpacked.families == RECORDING.families
    for kind, trees in RECORDING.trees.items():
        for nodes, other in zip(trees, unpacked.trees[kind], strict=True):
            assert [(p, r) for p, _, r in nodes] == [(p, r) for p, _, r in other]
            assert all(abs(a - b) < 1 / 255 for (_, a, _), (_, b, _) in zip(nodes, other, strict=True))


def test_the_shipped_recording_is_of_real_trees() -> None:
    with np.load(RECORDING_FILE, allow_pickle=False) as arrays:
        recording = unpack({name: arrays[name] for name in arrays.files})
    assert len(recording.families) == len(recording.starts) - 1
    for trees in recording.trees.values():
        assert len(trees) == recording.starts[-1]
        for tree in trees:
            matched = {0} | {n for n, (_, _, match) in enumerate(tree, 1) if match}
            assert all(parent in matched for parent, _, match in tree if match), (
                "hits are paths from the root"
            )
            assert all(parent < node for node, (parent, _, _) in enumerate(tree, 1))
    hits = [tree[0][2] for tree in recording.trees["1"] if tree]
    assert 0.3 < sum(hits) / len(hits) < 1.0
