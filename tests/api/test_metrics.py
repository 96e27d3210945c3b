"""Metrics under streamserve's and vLLM's names, and the Grafana dashboard."""

import asyncio
import json
import re
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from streamserve.api.generator import Item
from streamserve.api.metrics.metrics import VLLM_NAMES, VLLM_PREFIX
from streamserve.api.metrics.worker_metrics import PREFIX
from streamserve.fleet.view import MachineView, RouterView, WorkerView
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.reports import REPORT
from tests.api.serving import ScriptedGenerator, Served, scripted, until

BOARD = Path(__file__).parents[2] / "docs" / "operations" / "grafana.json"


VIEW = RouterView(
    "random",
    [
        WorkerView("unified-0", True, False, 1, 0, 0, 0, 1, 8, 0.0, "red"),
        WorkerView("unified-1", False, False, 1, 0, 0, 0, 0, 0, 0.0, ""),
    ],
    0,
    [],
    [MachineView("red", 2, ["unified-0"], 75.0, 0.25), MachineView("local", None, [], 9.0, 0.0)],
)


def samples(server: Served) -> dict[str, float]:
    """Return every sample by its name and labels, after checking that Prometheus can parse them."""
    metrics = {}
    for family in text_string_to_metric_families(server.http.get("/metrics").text):
        for sample in family.samples:
            labels = {name: value for name, value in sample.labels.items() if name != "model_name"}
            metrics[sample.name + (str(labels) if labels else "")] = sample.value
    return metrics


def test_workers_and_their_machines(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(router_view=VIEW)) as server:
        shown = samples(server)
    assert shown[f"{PREFIX}worker_ready{{'host': 'red', 'worker': 'unified-0'}}"] == 1
    assert shown[f"{PREFIX}worker_ready{{'host': '', 'worker': 'unified-1'}}"] == 0
    assert shown[f"{PREFIX}machine_slots{{'host': 'red'}}"] == 2
    assert shown[f"{PREFIX}machine_workers{{'host': 'red'}}"] == 1
    assert shown[f"{PREFIX}machine_joined_seconds{{'host': 'red'}}"] == 75
    assert shown[f"{PREFIX}machine_silence_seconds{{'host': 'red'}}"] == 0.25
    assert f"{PREFIX}machine_slots{{'host': 'local'}}" not in shown, "not limited"


def test_the_phases_of_a_request(generator: ScriptedGenerator) -> None:
    """The request waits 0.1 s in the queue, takes 0.2 s to compute its prompt, and gets three more tokens 0.1
    s apart."""

    async def timed(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        await asyncio.sleep(0.3)
        for number in range(4):
            yield ChoiceDelta(0, "x", (72,), finish="length" if number == 3 else None)
            if number < 3:
                await asyncio.sleep(0.1)
        yield Usage(len(prompt), 4, queued_seconds=0.1)

    with scripted(generator.replaced(script=timed)) as server:
        start = time.perf_counter()
        assert server.post("/v1/completions", prompt=[5, 6, 7], max_tokens=4).status_code == 200
        # On a busy machine each phase may take longer, but never longer than this.
        whole = time.perf_counter() - start
        seconds = {
            "request_queue_time": (0.1, 0.1),
            "request_prefill_time": (0.2, whole - 0.4),
            "request_decode_time": (0.3, whole - 0.3),
            "request_inference_time": (0.5, whole - 0.1),
            "request_time_per_output_token": (0.1, (whole - 0.3) / 3),
            "time_to_first_token": (0.3, whole - 0.3),
            "inter_token_latency": (0.3, whole - 0.3),
            "e2e_request_latency": (0.6, whole),
        }
        sums = {f"{name}_seconds": bounds for name, bounds in seconds.items()}
        counts = {"prompt_tokens": 3, "generation_tokens": 4, "params_n": 1, "params_max_tokens": 4}
        sums |= {f"request_{name}": (count, count) for name, count in counts.items()}
        for name, (low, high) in sums.items():
            assert low <= server.metric(f"{name}_sum") + 1e-9, name
            assert server.metric(f"{name}_sum") <= high + 1e-9, name
            assert server.metric(f"{name}_count") == (3 if name.startswith("inter") else 1), name


def test_several_tokens_at_once_count_as_several(generator: ScriptedGenerator) -> None:
    async def leaps(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        yield ChoiceDelta(0, "x", (72,))
        yield ChoiceDelta(0, "xyz", (72, 73, 74), finish="stop")
        yield Usage(len(prompt), 4)

    with scripted(generator.replaced(script=leaps)) as server:
        server.post("/v1/completions", prompt="hi")
        assert server.metric("inter_token_latency_seconds_count") == 3


def test_vllm_metrics_have_the_same_values(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=REPORT)) as server:
        server.post("/v1/completions", prompt=[5, 6, 7], n=2)
        metrics = samples(server)
        vllm_metrics = {name for name in metrics if name.startswith(VLLM_PREFIX)}
        assert vllm_metrics == {
            name.replace(PREFIX, VLLM_PREFIX)
            for name in metrics
            if name.startswith(tuple(PREFIX + known for known in VLLM_NAMES))
        }
        assert {
            "vllm:num_requests_running": 3,
            "vllm:num_requests_waiting": 4,
            "vllm:kv_cache_usage_perc": 0.5,
            "vllm:prefix_cache_queries_total": 9,
            "vllm:prefix_cache_hits_total": 2,
            "vllm:num_preemptions_total": 1,
            "vllm:spec_decode_num_drafts_total": 6,
            "vllm:spec_decode_num_draft_tokens_total": 15,
            "vllm:spec_decode_num_accepted_tokens_total": 9,
            "vllm:spec_decode_num_accepted_tokens_per_pos_total{'position': '1'}": 3,
            "vllm:prompt_tokens_total": 3,
            "vllm:generation_tokens_total": 4,
            "vllm:request_success_total{'finished_reason': 'stop'}": 2,
            "vllm:time_to_first_token_seconds_count": 1,
            "vllm:inter_token_latency_seconds_count": 2,
            "vllm:e2e_request_latency_seconds_count": 1,
            "vllm:request_queue_time_seconds_count": 1,
            "vllm:request_prefill_time_seconds_count": 1,
            "vllm:request_decode_time_seconds_count": 1,
            "vllm:request_inference_time_seconds_count": 1,
            "vllm:request_params_n_sum": 2,
            "vllm:request_params_max_tokens_sum": 16,
            "vllm:iteration_tokens_total_count": 6,
            "vllm:iteration_tokens_total_sum": 20_030,
            "vllm:iteration_tokens_total_bucket{'le': '1.0'}": 2,
            "vllm:iteration_tokens_total_bucket{'le': '16384.0'}": 5,
        }.items() <= metrics.items()
        for name in vllm_metrics:
            assert metrics[name] == metrics[name.replace(VLLM_PREFIX, PREFIX)], name


def test_every_known_name_of_vllm_is_exposed(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=REPORT)) as server:
        server.post("/v1/completions", prompt="hi")
        families = {f.name for f in text_string_to_metric_families(server.http.get("/metrics").text)}
        assert {VLLM_PREFIX + name for name in VLLM_NAMES} <= families


def test_the_queue_of_the_real_engine_is_timed(server: Served) -> None:
    before = server.metric("request_queue_time_seconds_count")
    server.post("/v1/completions", prompt="the quick", max_tokens=3)
    assert server.metric("request_queue_time_seconds_count") == before + 1
    total = server.metric("e2e_request_latency_seconds_sum")
    parts = sum(server.metric(f"request_{part}_time_seconds_sum") for part in ("queue", "prefill", "decode"))
    assert 0 < parts <= total
    until(lambda: server.active_sequences() == 0)


def test_speculation_and_the_parts_of_step_time(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=REPORT)) as server:
        metrics = samples(server)
        expected: dict[str, float] = {
            "spec_decode_num_drafts_total": 6,
            "spec_decode_drafted_tokens_total": 30,
            "spec_decode_num_draft_tokens_total": 15,
            "spec_decode_num_accepted_tokens_total": 9,
            "spec_decode_num_accepted_tokens_per_pos_total{'position': '1'}": 3,
            "spec_decode_expected_tokens_total": 8.5,
            "spec_decode_tree_nodes_bucket{'le': '1.0'}": 2,
            "spec_decode_tree_nodes_bucket{'le': '3.0'}": 5,
            "spec_decode_tree_nodes_bucket{'le': '+Inf'}": 6,
            "spec_decode_tree_nodes_sum": 15,
            "spec_decode_tree_depth_bucket{'le': '2.0'}": 5,
            "spec_decode_tree_depth_count": 6,
            "step_part_seconds_total{'part': 'draft'}": 0.1,
            "step_part_share{'part': 'scheduling'}": 0.1,
            "step_part_share{'part': 'target'}": 0.6,
        }
        assert {PREFIX + name: value for name, value in expected.items()}.items() <= metrics.items()


def test_cache_copies_are_told_from_the_transfers_of_requests(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=REPORT)) as server:
        expected = {
            "kv_transfers_total": 7,
            "kv_cache_copies_total{'kind': 'arriving'}": 20,
            "kv_cache_copies_total{'kind': 'writeback'}": 5,
            "kv_transfer_bytes_total": 900,
            "kv_transfer_arriving_bytes_total": 600,
            "kv_transfer_writeback_bytes_total": 100,
        }
        assert {PREFIX + name: value for name, value in expected.items()}.items() <= samples(server).items()


def board() -> dict[str, object]:
    dashboard: dict[str, object] = json.loads(BOARD.read_text())
    return dashboard


def test_every_metric_of_the_dashboard_exists(generator: ScriptedGenerator) -> None:
    with scripted(generator.replaced(latest_report=REPORT, router_view=VIEW)) as server:
        server.post("/v1/completions", prompt="hi")
        there = {name.partition("{")[0] for name in samples(server)}
        named = set(re.findall(r"streamserve:\w+", BOARD.read_text()))
        assert len(named) > 15
        assert named - there <= {"streamserve:step_floor_seconds_total"}


def test_the_dashboard_is_one_that_grafana_can_import() -> None:
    made = board()
    panels = made["panels"]
    assert isinstance(panels, list)
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24
        assert panel["title"]
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        assert all('{model_name=~"$model"' in target["expr"] for target in panel["targets"])
    for first in panels:
        for second in panels:
            assert first is second or not overlap(first["gridPos"], second["gridPos"])


def overlap(a: dict[str, int], b: dict[str, int]) -> bool:
    return (
        a["x"] < b["x"] + b["w"] and b["x"] < a["x"] + a["w"]
        and a["y"] < b["y"] + b["h"] and b["y"] < a["y"] + a["h"]
    )  # fmt: skip


def test_failures_are_not_successes(generator: ScriptedGenerator) -> None:
    async def fails(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        yield ChoiceDelta(0, "x", (72,))
        raise ValueError("a fault")

    with scripted(generator.replaced(script=fails)) as server:
        server.post("/v1/completions", prompt="hi")
        assert server.metric("requests_total", finish_reason="error") == 1
        assert server.metric("request_success_total", finished_reason="error") == 0
