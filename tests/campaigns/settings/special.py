"""Generators for settings whose type does not define useful values, and dependencies between settings."""

from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

from streamserve.baselines.routers import ROUTERS
from streamserve.baselines.speculation import NAMES
from streamserve.fleet.tracing.telemetry import telemetry_installed
from streamserve.protocol.config import ModelConfig
from streamserve.settings.effects import NEEDS, Configured
from streamserve.settings.options import SettingsError, convert
from streamserve.settings.resolve import topology
from streamserve.settings.server_config import ServerConfig
from streamserve.system.nixl import nixl_package
from tests.campaigns.settings.draw import Draw

API_KEY, ADMIN_KEY = "campaign-key", "campaign-admin"
ALWAYS = ("port", "profile", "threads", "grammar_timeout", "check")
"""Settings of every trial. Their defaults could fail on a loaded machine or next to another server. Every
step is checked."""


@dataclass(frozen=True)
class Environment:
    """Files and services that settings may name. `drafts` are values of `draft` that fit the checkpoint,
    `adapters` are values of `lora`."""

    folder: Path
    drafts: tuple[str, ...]
    layers: int
    positions: int
    adapters: tuple[str, ...] = ()


def special(environment: Environment) -> dict[str, Draw]:
    """Return generators by name of the setting."""
    return {**_engine(environment), **_server(environment)}


def _engine(environment: Environment) -> dict[str, Draw]:
    positions = environment.positions

    def length(rng: Random) -> int:
        return rng.choice((positions, 512, 512, 500, 300, 256, 200, 200, 64, rng.choice((1, positions + 1))))

    return {
        "task": weighted(("auto", 1), ("generate", 1)),  # other models generate no text to compare
        "dtype": weighted(("auto", 4), ("float32", 6), ("bfloat16", 6), ("float16", 1)),
        "device": weighted(("cpu", 4), ("auto", 4), ("cuda:9", 0.2)),
        "backend": weighted(("auto", 3), ("native", 4), ("reference", 1), ("device", 2)),
        "tensor_parallel_size": weighted((1, 20), (2, 0.5), (64, 0.1)),
        "kernel_path": weighted(("auto", 10), ("portable", 1), ("avx2", 2), ("avx512", 2), ("amx", 0.3)),
        "numerics": weighted(("auto", 8), ("native", 2), ("portable", 1)),
        "quantization": weighted(
            ("none", 5), ("int8", 3), ("int4", 2), ("int4:32", 1), ("w8a8", 1), ("int5", 0.2)
        ),
        "head_quantization": weighted(("auto", 6), ("int8", 2), ("none", 2)),
        "kv_cache_dtype": weighted(("auto", 3), ("int8", 2)),
        "threads": weighted((1, 10), (0, 2), (2, 4), (3, 1), (16, 1)),
        "max_loras": weighted((0, 4), (1, 1), (4, 1)),
        "max_lora_rank": weighted((64, 6), (8, 1), (1, 0.2)),
        "max_lora_bytes": weighted((None, 8), (1 << 20, 2), (1, 0.2)),
        "max_model_len": length,
        "kv_cache_bytes": weighted((1, 0.5), (1 << 50, 0.5), *((1 << n, 1) for n in range(20, 27))),
        "num_blocks": lambda rng: rng.choice((rng.choice((1, 5)), 12, 22, 32, 40, 100, 400, 1000)),
        "swap_space": weighted((0.0, 3), (0.0005, 4), (0.01, 8), (0.05, 4), (1e9, 0.2)),
        "preempt_every": weighted((0, 2), (1, 1), (2, 2), (7, 4), (50, 4)),
        "profile": weighted((False, 12), (True, 1)),
        "check": weighted((True, 1)),
        "draft": weighted(
            ("auto", 4), ("none", 4), ("ngram", 8),
            (f"self:{environment.layers - 1}", 8), (f"self:{environment.layers}", 1),
            (str(environment.folder / "missing"), 1), *((draft, 12) for draft in environment.drafts),
        ),
        "draft_key": weighted((str(environment.folder / "missing.key"), 1), (None, 6)),
        "draft_model": weighted(((), 6), (("0" * 64,), 1)),
        "speculation_mode": weighted(("coupled", 5), ("rejection", 1)),
        "speculation_policy": _policy,
    }  # fmt: skip


def _policy(rng: Random) -> str:
    fixed = f"fixed:{rng.choice((1, 2, 4, 8, 20))}"
    tree = f"fixed-tree:{rng.choice((1, 2, 3, 20))}x{rng.choice((1, 2, 5, 20))}"
    return rng.choice((*NAMES, fixed, fixed, fixed, tree, tree, "fixed:21" if rng.random() < 0.3 else fixed))


def _server(environment: Environment) -> dict[str, Draw]:
    keys = environment.folder / "keys"
    exporting = "http://127.0.0.1:9/v1/traces" if telemetry_installed() else None
    return {
        "host": weighted(("127.0.0.1", 8), ("localhost", 3), ("256.0.0.1", 0.2)),
        "port": weighted((0, 1)),
        "served_model_name": weighted((("tiny",), 3), (("one", "two"), 1), ((), 1)),
        "lora": weighted(
            ((), 4), (environment.adapters, 4), ((f"missing={environment.folder / 'missing'}",), 0.2)
        ),
        "models_memory_bytes": weighted((None, 12), (8 << 30, 1), (1, 0.2)),
        "idle_unload": weighted((None, 8), (60.0, 1), (600.0, 1)),
        "load_timeout": weighted((None, 12), (60.0, 0.4)),
        "memory_timeout": weighted((None, 12), (10.0, 0.4)),
        "max_requests": weighted((1024, 8), (60, 2), (5, 1), (1, 1)),
        "max_waiting_tokens": weighted((1 << 20, 4), (4000, 2), (1, 1)),
        "max_memory_bytes": weighted((256 << 20, 4), (64 << 20, 2), (1 << 20, 0.2)),
        "max_connections": weighted((4096, 4), (100, 2), (1, 0.2)),
        "max_connections_per_address": weighted((2048, 4), (100, 2)),
        "max_requests_per_key": weighted((None, 4), (60, 1)),
        "max_body_bytes": weighted((32 << 20, 4), (1 << 16, 2), (1024, 1)),
        "max_streams": weighted((512, 3), (4, 1), (1, 1)),
        "stream_ttl": seconds(20, 600),
        "max_stored_responses": weighted((1024, 3), (4, 1), (1, 1), (0, 1)),
        "max_stored_response_bytes": weighted((64 << 20, 3), (1 << 16, 1), (0, 1)),
        "stored_response_ttl": seconds(20, 600),
        "batch_folder": weighted(
            (str(environment.folder / "batches"), 4), (str(environment.folder / "keys" / "no"), 0.1)
        ),
        "chat_template": weighted((None, 12), (str(environment.folder / "missing.jinja"), 0.2)),
        "grammar_timeout": seconds(20, 60),
        "request_timeout": seconds(60, 600),
        "read_timeout": seconds(10, 120),
        "write_timeout": seconds(10, 120),
        "drain_timeout": weighted((0.0, 1), (1.0, 1), (30.0, 2)),
        "stuck_after": seconds(20, 60),
        "api_key": weighted(((API_KEY,), 4), (("other", API_KEY), 1), (("env:STREAMSERVE_MISSING",), 0.1)),
        "api_key_file": weighted((str(keys), 4), (str(environment.folder / "missing"), 0.1)),
        "admin_key": weighted(((ADMIN_KEY,), 1)),
        "admin_key_file": weighted((str(keys), 6), (str(environment.folder), 0.1)),
        "metrics_key": weighted((("campaign-metrics",), 1)),
        "share_prefixes": weighted((False, 4), (True, 1)),
        "metrics_key_file": weighted((str(keys), 4), (str(environment.folder / "missing"), 0.1)),
        "ssl_certfile": weighted((None, 8), (str(environment.folder / "missing"), 0.4)),
        "ssl_keyfile": weighted((None, 8), (str(keys), 0.4)),
        "router": _router,
        "kv_transport": weighted(("auto", 6), ("shm", 4), ("tcp", 4), ("nixl", 4 if nixl_package() else 0.3)),
        "kv_bytes_per_second": lambda rng: 10.0 ** rng.uniform(6, 9),
        "timeline": weighted(
            (str(environment.folder / "timeline.json"), 6), (str(environment.folder / "no/where"), 0.2)
        ),
        "otlp_traces_endpoint": weighted((exporting, 1)),
        "launcher": weighted(("local", 12), ("join", 0.2)),  # refused: there is no key
        "listen": weighted((None, 12), ("7800", 0.1)),
        "join_key": weighted((None, 12), (str(environment.folder / "missing.key"), 0.2)),
        "join_clients": weighted((None, 12), (str(environment.folder / "missing"), 0.1)),
        "max_workers": weighted((4, 4), (2, 1), (1, 0.2)),
        "ray_address": weighted((None, 12), ("10.0.0.1:6379", 0.1)),
        "ray_resources": weighted(((), 12), (("fast=1",), 0.1), (("fast",), 0.1)),
        "join_lease": weighted((5.0, 12), (10.0, 0.2)),
        "cors_origin": weighted((("*",), 1), (("https://app.example",), 1)),
        **dict.fromkeys(("workers", "pairs", "prefill", "decode"), weighted((None, 100), (1, 1))),
    }


def _router(rng: Random) -> str:
    parts = sorted(rng.sample(range(1, 100), 3))
    weights = [end - start for start, end in zip([0, *parts], [*parts, 100], strict=True)]
    flowguard = f"flowguard:{','.join(f'{weight / 100:.2f}' for weight in weights)}:{rng.random():.2f}"
    wrong = rng.choice(("classes:5,1", "flowguard:1,1,1,1", "magic"))
    return rng.choice((*ROUTERS, "classes:20,50", flowguard, flowguard, rng.choice((wrong, "flowguard"))))


def consistent(rng: Random, overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings with a random number of workers, without most contradictory settings."""
    workers = rng.choice(
        ({},) * 9
        + ({"pairs": 1},) * 5
        + ({"workers": 2}, {"workers": 1, "pairs": 1}, {"workers": 1, "prefill": 1, "decode": 2})
        + ({"prefill": 1, "decode": 2}, {"prefill": 2, "decode": 1})
    )
    if "router" in overrides and workers == {"pairs": 1}:
        workers = {"prefill": 1, "decode": 2}
    overrides = overrides | workers
    if overrides.keys() & {"speculation_policy", "speculation_mode"}:
        overrides.setdefault("draft", rng.choice(("ngram", "self:1")))
    if overrides.get("router") == "predictive" and rng.random() < 0.9:
        overrides["profile"] = True
    if overrides.get("eviction") == "swap" and rng.random() < 0.9:
        overrides |= {"swap_space": rng.choice((0.001, 0.01, 0.02))}
    if not (overrides.get("lora") or overrides.get("max_loras")) and rng.random() < 0.95:
        overrides = {name: value for name, value in overrides.items() if not name.startswith("max_lora_")}
    if {"num_blocks", "kv_cache_bytes"} & overrides.keys() and rng.random() < 0.9:
        overrides.pop("max_model_len", None)
    return with_effect(overrides) if rng.random() < 0.95 else overrides


def with_effect(overrides: dict[str, Any]) -> dict[str, Any]:
    """Return the settings without settings that would be refused because they have no effect."""
    drafter = overrides.get("draft", "auto")
    fixed = {"path": "", "draft": "none" if drafter == "auto" else drafter}
    try:
        model = convert({**overrides, **fixed}, ModelConfig)
        server = convert(overrides, ServerConfig)
        configured = Configured(model, server, topology(server))
    except SettingsError:
        return overrides
    idle = {name for need in NEEDS for name in need.unmet(configured)}
    return with_effect({k: v for k, v in overrides.items() if k not in idle}) if idle else overrides


def weighted(*choices: tuple[Any, float]) -> Draw:
    """Return a generator of random values with these probabilities."""
    values, weights = zip(*choices, strict=True)
    return lambda rng: rng.choices(values, weights)[0]


def seconds(low: float, high: float) -> Draw:
    """Return a generator of time limits that a loaded machine can meet."""
    return lambda rng: round(rng.uniform(low, high), 2)
