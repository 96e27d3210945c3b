"""The routes that do not generate: models, health, version, metrics."""

import subprocess
import sys

import pytest

from streamserve import __version__
from streamserve.api.app import create_app
from streamserve.api.settings import ApiSettings
from streamserve.protocol.reports import Report
from tests.api.serving import ScriptedGenerator, Served, scripted, until


def test_models_are_listed_under_every_name(hello: Served) -> None:
    models = hello.client.models.list().data
    assert [model.id for model in models] == ["scripted", "owner/scripted"]
    assert {model.owned_by for model in models} == {"streamserve"}
    assert models[0].created == 1_700_000_000


def test_a_model_card_has_its_context_length_and_row_invariance(hello: Served) -> None:
    card = hello.http.get("/v1/models/owner/scripted").json()
    assert card == {
        "id": "owner/scripted",
        "object": "model",
        "created": 1_700_000_000,
        "owned_by": "streamserve",
        "root": "owner/scripted",
        "parent": None,
        "max_model_len": 64,
        "row_invariant": True,
        "default_sampling": {
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
        },
        "precision": "float32",
        "numerics": f"scripted, float32, streamserve {__version__}",
    }
    assert hello.client.models.retrieve("scripted").id == "scripted"


@pytest.mark.parametrize("name", ["scripted", "owner/scripted"])
def test_replies_carry_the_name_that_was_asked_for(hello: Served, name: str) -> None:
    assert hello.post("/v1/completions", model=name, prompt="hi").json()["model"] == name


def test_a_request_without_model_gets_the_first(hello: Served) -> None:
    assert hello.post("/v1/completions", prompt="hi").json()["model"] == "scripted"


def test_health_of_a_server_that_is_ready(server: Served) -> None:
    response = server.http.get("/health")
    assert (response.status_code, response.json()["status"]) == (200, "ready")


def test_ping_and_version(hello: Served) -> None:
    assert hello.http.get("/ping").status_code == 200
    assert hello.http.get("/version").json() == {"version": __version__}


def test_metrics_count_tokens_and_reasons(generator: ScriptedGenerator) -> None:
    with scripted(generator) as server:
        server.post("/v1/completions", prompt=[5, 6, 7], n=2, max_tokens=5)
        assert server.metric("requests_total", finish_reason="stop", model_name="scripted") == 2
        assert server.metric("prompt_tokens_total") == 3
        assert server.metric("generation_tokens_total") == 4
        assert server.metric("time_to_first_token_seconds_count") == 1
        assert server.metric("inter_token_latency_seconds_count") == 2
        assert server.metric("e2e_request_latency_seconds_count") == 1
        assert server.http.get("/metrics").headers["content-type"].startswith("text/plain")


def test_metrics_show_the_workers_report(generator: ScriptedGenerator) -> None:
    report = Report(
        running=3,
        waiting=4,
        blocks_total=10,
        blocks_live=5,
        steps=6,
        prompt_tokens=7,
        generation_tokens=8,
        prefix_queries=9,
        prefix_hits=2,
        preemptions=1,
        copies_on_write=0,
        step_seconds=0.5,
    )
    with scripted(generator.replaced(latest_report=report)) as server:
        assert server.metric("num_requests_running") == 3
        assert server.metric("num_requests_waiting") == 4
        assert server.metric("kv_cache_usage_perc") == 0.5
        assert server.metric("prefix_cache_queries_total") == 9
        assert server.metric("prefix_cache_hits_total") == 2
        assert server.metric("num_preemptions_total") == 1


def test_metrics_before_the_first_report(hello: Served) -> None:
    text = hello.http.get("/metrics").text
    assert "streamserve:num_requests_running" not in text


def test_metrics_of_the_real_engine(server: Served) -> None:
    before = server.metric("generation_tokens_total")
    server.post("/v1/completions", prompt="the quick", max_tokens=7)
    assert server.metric("generation_tokens_total") == before + 7
    assert 0 <= server.metric("kv_cache_usage_perc") <= 1
    until(lambda: server.metric("steps_total") > 0)  # the worker's report arrives after its last step


def test_two_servers_in_one_process_count_apart(generator: ScriptedGenerator) -> None:
    with scripted(generator) as first, scripted(generator) as second:
        first.post("/v1/completions", prompt="hi")
        assert first.metric("requests_total", finish_reason="stop") == 1
        assert second.metric("requests_total", finish_reason="stop") == 0


def test_a_model_card_has_the_checkpoint_s_sampling(generator: ScriptedGenerator) -> None:
    with scripted(generator, ApiSettings(default_sampling={"temperature": 0.6, "top_k": 20})) as server:
        sampling = server.http.get("/v1/models/scripted").json()["default_sampling"]
    assert (sampling["temperature"], sampling["top_p"], sampling["top_k"]) == (0.6, 1.0, 20)


def test_default_sampling_must_be_sampling(generator: ScriptedGenerator) -> None:
    with pytest.raises(TypeError, match="heat"):
        create_app(generator, ApiSettings(default_sampling={"heat": 1}))


def test_the_api_imports_neither_torch_nor_transformers() -> None:
    code = (
        "import sys; from streamserve.api import app; from streamserve.api.http import server;"
        "print({'torch', 'transformers', 'streamserve.execution'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr
