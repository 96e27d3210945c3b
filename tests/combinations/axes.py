"""The axes of the combination matrix. A row has one value of each.

To add an axis, add a table here with its default first; to add a value, add an entry. test_combinations.py
combines them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any, get_args

from streamserve.baselines.routers import parse_router
from streamserve.baselines.speculation import NAMES
from streamserve.fleet.worker_state import mixed, pairs, pools, unified
from streamserve.protocol.adapters import CONFIG_FILE
from streamserve.protocol.config import Order
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.system.nixl import nixl_package
from tests.combinations.covering import Row, draw
from tests.extras.cluster.fakes import key_file
from tests.simulate.settings_fuzz import ADAPTERS

SIMULATED, LIVE = ("simulated",), ("live",)
SERVICE = "tcp://127.0.0.1:7700"
SERVICES = f"{SERVICE},tcp://127.0.0.1:7701"
"""Addresses of one and of two draft services. A live row replaces them by the addresses of running
services."""
ADAPTER = "adapter=/adapters/one"
"""A LoRA adapter's folder, which a live row replaces by an existing one."""
HEAD, KEY = "tcp://127.0.0.1:7800", "cluster.key"
"""The address where machines join, and the key file. A live row replaces them by a running agent's address
and key file."""
CLUSTER = "127.0.0.1:6379"
"""A Ray cluster's address, which a live row replaces by a running cluster's address."""
FOLDER = TemporaryDirectory(prefix="combinations-")
"""A folder that is removed when this process ends."""


@dataclass(frozen=True)
class Value:
    """A value of an axis: the server's `settings`, and its counterpart in virtual time (`simulated`, by the
    names of tests/simulate/settings_fuzz.py). If the value took effect, one of the counters `shown` is above
    0."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    simulated: Mapping[str, Any] = field(default_factory=dict)
    shown: tuple[str, ...] = ()
    in_rows: tuple[str, ...] = ("simulated", "live")
    """Which rows have the value. Values that change only decisions are in simulated rows, and some of them in
    a few live rows (`decisions`); values that change tensors are in live rows."""


def _stream(early: float, appending: float) -> Value:
    return Value({}, {"streaming": 1.0, "early": early, "appending": appending}, ("edits",))


def _rows(name: str, live: tuple[str, ...]) -> tuple[str, ...]:
    return SIMULATED + LIVE if name in live else SIMULATED


def _order(name: str) -> Value:
    return Value({"order": name}, {"order": name}, in_rows=_rows(name, ("slo", "fcfs", "mcps")))


def _policy(name: str) -> Value:
    rows = _rows(name, (*ALWAYS, "adaserve", "specustream"))
    shown = ("accepted",) if name in ALWAYS else ()
    return Value({"speculation_policy": name}, {"policy": name}, shown, rows)


def _router(name: str) -> Value:
    rows = _rows(name, ("round-robin", "cache-aware"))
    needs = {"profile": True} if name == "predictive" else {}  # the cost of a step
    return Value({"router": name} | needs, {"router": parse_router(name)}, in_rows=rows)


ALWAYS = ("fixed:4", "fixed-tree:2x3")
"""Policies that draft in every step."""
POLICIES = (*ALWAYS, *(name for name in NAMES if name not in ("off", *ALWAYS)))
ROUTERS = (
    "flowguard", "flowguard-as-published", "predictive", "round-robin", "random", "least-loaded",
    "cache-aware", "classes:20,50",
)  # fmt: skip
ORDERS = get_args(Order)
LITTLE = {"num_blocks": 26, "block_size": 4, "preempt_every": 5}

AXES: dict[str, dict[str, Value]] = {
    "prompt": {
        "whole": Value({}, {"streaming": 0.0}),
        "append": _stream(0.0, 1.0),
        "update": _stream(0.0, 0.2),
        "early": _stream(0.5, 0.5),
    },
    "placement": {
        "one worker": Value({}, {"topology": unified(1)}),
        "workers": Value({"workers": 2}, {"topology": unified(2)}),
        "a worker and a pair": Value({"workers": 1, "pairs": 1}, {"topology": mixed(1, 1, 1)}),
        "a pair": Value({"pairs": 1}, {"topology": pairs(1)}, ("handed_over",)),
        "pairs": Value({"pairs": 2}, {"topology": pairs(2)}, ("handed_over",)),
        "uneven pools": Value({"prefill": 1, "decode": 2}, {"topology": pools(1, 2)}, ("handed_over",)),
    },
    "transport": {
        "default": Value(),
        "tcp": Value({"kv_transport": "tcp"}, {}, ("handed_over",), in_rows=LIVE),
        "nixl": Value({"kv_transport": "nixl"}, {}, ("handed_over",), in_rows=LIVE),
    },
    "launcher": {
        "local": Value(),
        "join": Value({"launcher": "join", "listen": HEAD, "join_key": KEY}, {}, in_rows=LIVE),
        "ray": Value({"launcher": "ray", "ray_address": CLUSTER}, {}, in_rows=LIVE),
    },
    "draft": {
        "none": Value({"draft": "none"}, {"drafter": "none"}),
        "ngram": Value({"draft": "ngram"}, {"drafter": "plain"}),
        "self": Value({"draft": "self:1"}, {"drafter": "self"}, ("drafted",)),
        "model": Value({"draft": "embedded-draft"}, {"drafter": "kv"}, ("drafted",)),
        "service": Value({"draft": SERVICE}, {"drafter": "service"}, ("served_trees",)),
        "services": Value({"draft": SERVICES}, {"drafter": "services"}, ("shared_trees",)),
    },
    "policy": {"default": Value({}, {"policy": "goodput"})}
    | {name: _policy(name) for name in POLICIES if name != "goodput"},
    "mode": {
        "coupled": Value(),
        "rejection": Value({"speculation_mode": "rejection"}, {}, (), in_rows=LIVE),
    },
    "targets": {
        "none": Value({}, {"targets": 0.0}),
        "slo": Value({}, {"targets": 1.0}),
        "admission": Value({"slo_admission": True}, {"targets": 0.3, "slo_admission": True}),
    },
    "order": {name: _order(name) for name in ORDERS},
    "router": {"default": Value({}, {"router": parse_router("flowguard")})}
    | {name: _router(name) for name in ROUTERS if name != "flowguard"},
    "memory": {
        "ample": Value({"num_blocks": 600}, {"num_blocks": 200, "eviction": "cost", "swap_blocks": 0}),
        "recompute": Value(
            {"num_blocks": 40, "eviction": "recompute"},
            {
                "num_blocks": 26,
                "block_size": 4,
                "eviction": "recompute",
                "swap_blocks": 0,
                "preempt_every": 5,
            },
            ("preempted",),
        ),
        "swap": Value(
            {"num_blocks": 40, "eviction": "swap", "swap_space": 0.02},
            LITTLE | {"eviction": "swap", "swap_blocks": 200},
            ("swapped",),
        ),
    },
    "adapters": {
        "none": Value({}, {"adapters": ()}),
        "two": Value({"max_loras": 2}, {"adapters": ADAPTERS}, ("adapted",), in_rows=SIMULATED),
        "one": Value({"lora": (ADAPTER,)}, {}, ("adapted",), in_rows=LIVE),
    },
    "weights": {
        "16 bits": Value(),
        "int8": Value({"quantization": "int8"}, {}, (), in_rows=LIVE),
        "int4": Value({"quantization": "int4"}, {}, (), in_rows=LIVE),
    },
    "kv": {
        "16 bits": Value(),
        "int8": Value({"kv_cache_dtype": "int8"}, {}, (), in_rows=LIVE),
    },
}
"""All axes by name. Grammars, several choices, penalties and temperatures are not axes: the requests of every
row mix them."""


def values(row: Row) -> dict[str, Value]:
    """Return the values of a row by axis."""
    return {axis: AXES[axis][name] for axis, name in row.items()}


def settings(row: Row) -> dict[str, Any]:
    """Return the settings of a server with a row's values."""
    return {name: each for value in values(row).values() for name, each in value.settings.items()}


def there(chosen: Mapping[str, Any], existing: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings with existing addresses and files in place of the placeholders in the tables."""

    def found(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(map(found, value))
        return existing.get(value, value) if isinstance(value, str) else value

    return {name: found(value) for name, value in chosen.items()}


def simulated(row: Row) -> dict[str, Any]:
    """Return the simulated counterpart of a row."""
    return {name: each for value in values(row).values() for name, each in value.simulated.items()}


def shown(row: Row) -> dict[str, tuple[str, ...]]:
    """Return for each value of a row the counters of which at least one must be above 0."""
    return {f"{axis} = {row[axis]}": value.shown for axis, value in values(row).items() if value.shown}


@cache
def join_key() -> str:
    """Return a key file for machines that join."""
    return str(key_file(Path(FOLDER.name)))


@cache
def adapter() -> str:
    """Return the folder of an adapter that settings may name; it has a configuration and no matrices."""
    folder = Path(FOLDER.name) / "adapter"
    folder.mkdir()
    (folder / CONFIG_FILE).write_text("{}")
    return f"adapter={folder}"


_REFUSALS: dict[tuple[tuple[str, str], ...], str] = {}


def refusal(row: Row) -> str:
    """Return why a server with a row's values does not start; "" if it starts."""
    key = tuple(sorted((name, repr(value)) for name, value in settings(row).items()))
    if key not in _REFUSALS:
        try:
            resolve("embedded", there(settings(row), {KEY: join_key(), ADAPTER: adapter()}), environ={})
            _REFUSALS[key] = ""
        except SettingsError as error:
            _REFUSALS[key] = str(error)
    return _REFUSALS[key]


def missing_packages() -> list[tuple[str, str]]:
    """Return the values whose package is not installed, by axis."""
    found = {("transport", "nixl"): nixl_package() is not None, ("launcher", "ray"): bool(find_spec("ray"))}
    return [value for value, there in found.items() if not there]


SEVERAL = ("workers", "a worker and a pair", "pairs", "uneven pools")
"""Placements in which a router has a choice."""


def decisions(rows: Sequence[Row]) -> list[Row]:
    """Return live rows with the service orders and routers that `rows` lack, one of each in a row. They have
    several workers to choose from and enough memory, since several workers seldom exhaust it together, and
    random values otherwise."""
    lacking = {
        axis: [name for name in AXES[axis] if name not in {row[axis] for row in rows}]
        for axis in ("order", "router")
    }
    found: list[Row] = []
    rng = Random("decisions")
    while len(found) < max(map(len, lacking.values())):
        fixed = {axis: names[len(found) % len(names)] for axis, names in lacking.items() if names}
        row = draw(axes("live"), rng, fixed | {"placement": rng.choice(SEVERAL), "memory": "ample"})
        found += [] if refusal(row) else [row]
    return found


def axes(kind: str) -> dict[str, list[str]]:
    """Return the names of the values in rows of this `kind` by axis, without values whose package is
    missing."""
    named = {
        axis: [name for name, value in table.items() if kind in value.in_rows] for axis, table in AXES.items()
    }
    for axis, value in missing_packages():
        named[axis] = [name for name in named[axis] if name != value]
    return {axis: names for axis, names in named.items() if len(names) > 1}
