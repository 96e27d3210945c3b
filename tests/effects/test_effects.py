"""Every setting of a server does something, or is refused by name.

Each setting is changed in several contexts (other settings). There it must be refused by name, or have an
effect: on what clients receive in virtual time, or on what is loaded; or the API server must read it. A new
setting fails these tests until it is in one of the tables of `tables.py`.
"""

import ast
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from streamserve import embedded
from streamserve.api.settings import ApiSettings
from streamserve.cli.serving import api_settings
from streamserve.execution.loading.load import load
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.keys import digest
from streamserve.settings.effects import NEEDS
from streamserve.settings.options import Settings, SettingsError, options
from streamserve.settings.resolve import resolve
from streamserve.settings.server_config import ServerConfig
from tests.conftest import Scale
from tests.effects.simulated import observed
from tests.effects.tables import CONTEXTS, KEY_FILES, LOADED, OF_TEXT, SERVED, SIMULATED, TESTED
from tests.extras.cluster.fakes import key_file
from tests.sources import parse

ROOT = Path(__file__).parents[2]
NONE: dict[str, str] = {}


def test_every_setting_is_in_one_table() -> None:
    tables = [*SIMULATED, *LOADED, *SERVED, *KEY_FILES, *TESTED]
    assert sorted(tables) == sorted(option.name for option in options())


@pytest.mark.parametrize("name", TESTED)
def test_the_test_of_a_setting_exists(name: str) -> None:
    file, _, function = TESTED[name].partition("::")
    assert re.search(rf"^(async )?def {function}\(", (ROOT / "tests" / file).read_text(), re.MULTILINE), (
        TESTED[name]
    )


def changed(context: dict[str, Any], name: str, value: Any, model: str = "embedded") -> Settings | None:
    """Return the settings of a context with one setting changed; None if the change is refused by name."""
    try:
        return resolve(model, {**context, name: value}, environ=NONE)
    except SettingsError as error:
        if re.search(rf"\b{name}\b", str(error)):
            return None
        raise


@cache
def in_context(context: str) -> Any:
    return observed(resolve("embedded", CONTEXTS[context], environ=NONE))


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_setting_changes_what_clients_receive_or_is_refused(
    context: str, scale: Scale, record: Callable[..., None]
) -> None:
    refused, acting, idle = 0, 0, []
    names = [name for name in SIMULATED if name not in CONTEXTS[context]]
    if not scale.full:
        names = names[list(CONTEXTS).index(context) % 12 :: 12]
    for name in names:
        settings = changed(CONTEXTS[context], name, SIMULATED[name])
        if settings is None:
            refused += 1
        elif observed(settings) == in_context(context):
            idle.append(name)
        else:
            acting += 1
    assert not idle, f"accepted without effect in the context {context!r}"
    assert acting
    record(refused=refused, acting=acting)


def test_every_need_is_refused_where_it_is_not_met(tmp_path: Path) -> None:
    """Each rule of `settings.effects` refuses all its settings in some context."""
    values = {**SIMULATED, **LOADED, **SERVED, **OF_TEXT}
    names = ("one worker", "no drafter", "no speculation", "another order", "recomputing", "little memory")
    contexts = [*(CONTEXTS[name] for name in names), {"max_stored_responses": 0}]
    contexts.append(CONTEXTS["pairs without a prefix cache"])
    refused = {
        name
        for name, value in values.items()
        for context in contexts
        if name not in context and changed(context, name, value) is None
    }
    refused |= {name for name, value in values.items() if changed({"task": "score"}, name, value) is None}
    joining = {"launcher": "join", "join_key": str(key_file(tmp_path))}
    refused |= {name for name in ["fork_workers"] if changed(joining, name, False) is None}
    assert {name for need in NEEDS for name in need.settings} <= refused


def loaded(**settings: Any) -> tuple[Any, ...]:
    """Return the parts of the loaded objects that settings decide."""
    config = {"num_blocks": 64, "draft": "self:1", "threads": 2} | settings
    result = load(ModelConfig(path=str(embedded.path("embedded-draft")), **config))
    assert result.pool is None or result.pool.threads == config["threads"]
    rejection = getattr(result.drafter, "_rejection_sampling", None)
    threads = result.pool and result.pool.threads
    return result.model_info, result.engine_config, result.cache.dtype, threads, rejection


@pytest.mark.parametrize("name", LOADED)
def test_a_setting_changes_what_is_loaded(name: str) -> None:
    assert loaded(**{name: LOADED[name]}) != loaded()


@pytest.mark.parametrize("name", KEY_FILES)
def test_the_keys_of_a_file_are_among_the_keys_that_the_api_is_given(name: str, tmp_path: Path) -> None:
    (tmp_path / "keys").write_text("a-key\n")
    settings = changed({}, name, str(tmp_path / "keys"))
    assert settings, f"{name} is refused"
    keys = getattr(api_settings(settings, local_only=True), name.removesuffix("_file"))
    assert keys == (digest("a-key"),)


@pytest.mark.parametrize("name", SERVED)
def test_a_setting_of_the_api_is_accepted(name: str, tmp_path: Path) -> None:
    needed = {"batch_folder": str(tmp_path), "api_key": ("another-key", "third-key")}
    needed.pop(name, None)
    settings = changed(needed, name, SERVED[name])
    assert settings, f"{name} is refused"
    assert settings != resolve("embedded", needed, environ=NONE)


def read_from(name: str, *files: Path) -> set[str]:
    """Return the attributes that the files read from a variable or attribute `name`."""
    return {
        node.attr
        for file in files
        for node in ast.walk(parse(file))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name | ast.Attribute)
        and (node.value.id if isinstance(node.value, ast.Name) else node.value.attr) == name
    }


def test_every_setting_of_the_api_is_used() -> None:
    """Each setting of the API is read by the API or by the server of its connections."""
    package = ROOT / "src/streamserve"
    of_api = read_from(
        "settings", *(file for part in ("api", "extras") for file in (package / part).rglob("*.py"))
    )
    own = set(ApiSettings.__struct_fields__) - set(ServerConfig.__struct_fields__)
    assert own <= of_api
    assert set(SERVED) <= of_api | read_from("server", package / "cli/serving.py")
