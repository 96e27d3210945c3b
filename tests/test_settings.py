"""Settings come from flags, environment and a file, in this order; errors name the setting and its source."""

import math
import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from streamserve import __version__, embedded
from streamserve.cli.answers import only_adapter
from streamserve.cli.main import app
from streamserve.execution.formats.inflate import ModelShape, inflate
from streamserve.protocol import files
from streamserve.protocol.config import ModelConfig
from streamserve.protocol.errors import CheckpointError
from streamserve.protocol.numbers import plain
from streamserve.settings.commands import Use, acting, other_options
from streamserve.settings.options import Settings, SettingsError, options
from streamserve.settings.resolve import resolve, to_toml
from streamserve.settings.server_config import ServerConfig
from streamserve.settings.several import resolve_served
from tests.checkpoints import make_checkpoint

NONE: dict[str, str] = {}
COMMAND = get_command(app)
"""The command line, built once, because building it takes longer than most refusals."""


def test_flags_win_over_the_environment_and_that_over_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 1\nmax_num_seqs = 2\nblock_size = 3\nserved_model_name = ["a", "b"]\n')
    environ = {"STREAMSERVE_PORT": "11", "STREAMSERVE_MAX_NUM_SEQS": "12", "PATH": "/bin"}
    settings = resolve("embedded", {"port": 21, "block_size": None}, file, environ)
    assert (settings.server.port, settings.model.max_num_seqs, settings.model.block_size) == (21, 12, 3)
    assert settings.server.served_model_name == ("a", "b")


def test_environment_variables_are_converted_from_text() -> None:
    environ = {"STREAMSERVE_ENABLE_PREFIX_CACHING": "false", "STREAMSERVE_SERVED_MODEL_NAME": "a,b"}
    settings = resolve("embedded", environ=environ)
    assert settings.model.enable_prefix_caching is False
    assert settings.server.served_model_name == ("a", "b")


def test_a_file_can_set_the_model_and_an_environment_variable_the_file(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('model = "embedded-draft"\n')
    assert resolve(environ={"STREAMSERVE_CONFIG": str(file)}).name == "embedded-draft"


def test_the_packaged_draft_is_the_default_of_the_packaged_model_and_its_inflated_versions(
    tmp_path: Path,
) -> None:
    target, draft = embedded.path("embedded"), str(embedded.path("embedded-draft"))
    inflate(target, tmp_path / "inflated", ModelShape(hidden=256, layers=9))
    other = make_checkpoint(tmp_path / "other")
    drafts = [
        resolve(str(model), environ=NONE).model.draft
        for model in ("embedded", tmp_path / "inflated", other, "embedded-draft")
    ]
    assert drafts == [draft, draft, "none", "none"]
    assert resolve("embedded", {"draft": "none"}, environ=NONE).model.draft == "none"


def test_no_draft_model_is_the_default_of_a_model_that_is_divided() -> None:
    divided = {"tensor_parallel_size": 2, "backend": "device"}
    assert resolve("embedded", divided, environ=NONE).model.draft == "none"
    named = resolve("embedded", {**divided, "draft": "embedded-draft"}, environ=NONE)
    assert named.model.draft == str(embedded.path("embedded-draft"))  # refused when the file is loaded


def test_printed_settings_read_back_to_the_same(tmp_path: Path) -> None:
    settings = resolve("embedded", {"port": 0, "kv_cache_bytes": 1 << 30, "dtype": "float32"}, environ=NONE)
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(settings))
    assert resolve(config=file, environ=NONE) == settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"port": 70000}, "port = 70000"),
        ({"dtype": "float8"}, "dtype = 'float8'"),
        ({"eviction": "swop"}, "eviction = 'swop': must be one of recompute, swap, cost"),
        ({"max_num_seqs": 0}, "max_num_seqs = 0"),
        ({"max_num_seq": 1}, r"no setting 'max_num_seq' .*: did you mean max_num_seqs\?"),
        ({"xyzzy": 1}, "no setting 'xyzzy' .*: `streamserve serve --help-all` shows all settings"),
        ({"kv_cache_bytes": "2GG"}, "kv_cache_bytes = '2GG': must be a number of bytes, or one with a unit"),
        ({"kv_cache_bytes": "0.5B"}, "kv_cache_bytes = '0.5B': is not a whole number of bytes"),
        ({"kv_cache_bytes": "-1GB"}, "kv_cache_bytes = '-1GB'"),
        ({"cors_origin": ["foo"]}, "cors_origin = 'foo': must be"),
        ({"cors_origin": ["https://app.example/x"]}, "cors_origin = 'https://app.example/x': must be"),
        ({"otlp_traces_endpoint": "localhost:4318"}, "otlp_traces_endpoint = 'localhost:4318': must be"),
        ({"draft": "tcp://127.0.0.1:7700", "draft_key": "/nowhere"}, "/nowhere cannot be read"),
        ({"draft_key": "/nowhere"}, "draft_key = .*: only draft services use it"),
    ],
)
def test_bad_settings_are_named(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        resolve("embedded", overrides, environ=NONE)


def test_names_in_a_file_may_have_dashes(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text("max-num-seqs = 2\nblock_size = 8\n")
    settings = resolve("embedded", config=file, environ=NONE)
    assert (settings.model.max_num_seqs, settings.model.block_size) == (2, 8)
    file.write_text("max-num-seqs = 2\nmax_num_seqs = 3\n")
    with pytest.raises(SettingsError, match=r"max_num_seqs is set twice \(in .*settings.toml\)"):
        resolve("embedded", config=file, environ=NONE)
    file.write_text("max-num-sqs = 2\n")
    with pytest.raises(SettingsError, match="did you mean max_num_seqs"):
        resolve("embedded", config=file, environ=NONE)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("123", 123),
        ("2GB", 2 * 10**9),
        ("1.5 GiB", 3 << 29),
        ("512MiB", 512 << 20),
        ("64kB", 64_000),
        ("64KB", 64_000),
    ],
)
def test_sizes_may_have_a_unit(text: str, size: int) -> None:
    assert resolve("embedded", {"kv_cache_bytes": text}, environ=NONE).model.kv_cache_bytes == size
    environ = {"STREAMSERVE_MAX_BODY_BYTES": text}
    if size >= 1024:
        assert resolve("embedded", environ=environ).server.max_body_bytes == size


def test_a_size_as_a_flag() -> None:
    command = ["serve", "embedded", "--kv-cache-bytes", "2GB", "--print-config"]
    assert "kv_cache_bytes = 2000000000\n" in CliRunner().invoke(COMMAND, command).output


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("flag", "value"), [("temperature", "-1"), ("top-p", "2"), ("max-tokens", "-1"), ("seed", "-1")]
)
def test_sampling_flags_are_checked_before_a_model_is_loaded(command: str, flag: str, value: str) -> None:
    words = ["hello"] if command == "generate" else []
    result = CliRunner().invoke(COMMAND, [command, *words, f"--{flag}={value}", "--print-config"])
    assert result.exit_code == 2
    assert f"--{flag} must be between" in result.output


def test_bad_variables_and_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="STREAMSERVE_PROT"):
        resolve("embedded", environ={"STREAMSERVE_PROT": "1"})
    with pytest.raises(SettingsError, match="cannot read"):
        resolve("embedded", config=tmp_path / "none.toml", environ=NONE)
    (tmp_path / "bad.toml").write_text("port: 1")
    with pytest.raises(SettingsError, match="not TOML"):
        resolve("embedded", config=tmp_path / "bad.toml", environ=NONE)


ODD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a pipe": (os.mkfifo, "nothing arrived from it within|it is a pipe, a device or a socket"),
    "a device": (lambda path: path.symlink_to("/dev/zero"), "it has more than|it is a pipe, a device"),
    "a folder": (lambda path: path.mkdir(), "Is a directory"),
    "a gigabyte": (lambda path: (path.touch(), os.truncate(path, 1 << 30)), "it has more than"),
}
"""How to make files that no setting can have, and the reason of the refusal."""
FILE_SETTINGS: dict[str, dict[str, str]] = {
    "config": {},
    "api_key_file": {},
    "admin_key_file": {},
    "ssl_certfile": {},
    "join_key": {"launcher": "join", "join_clients": "key"},
    "join_clients": {"launcher": "join", "join_key": "key"},
    "draft_key": {"draft": f"tcp://{'0' * 64}@127.0.0.1:7000"},
}
"""Settings that name files, and the other settings that each needs."""


@pytest.mark.parametrize("kind", ODD_FILES)
@pytest.mark.parametrize("setting", FILE_SETTINGS)
def test_an_odd_file_in_a_setting_is_refused_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, setting: str, kind: str
) -> None:
    monkeypatch.setattr(files, "PIPE_SECONDS", 0.02)
    monkeypatch.chdir(tmp_path)
    Path("key").write_text(f"public = {'0' * 64}\nsecret = {'1' * 64}\n", encoding="utf-8")
    make, reason = ODD_FILES[kind]
    make(Path("odd"))
    given = FILE_SETTINGS[setting] | {setting: "odd"}
    config = given.pop("config", None)
    with pytest.raises(SettingsError, match=rf"odd.*({reason})"):
        resolve("embedded", given, config, NONE)


def test_a_file_nested_without_end_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(f"port = {'[' * 5000}")
    with pytest.raises(SettingsError, match="is nested too deeply"):
        resolve("embedded", config=file, environ=NONE)


@pytest.mark.parametrize("model", ["/no/such/folder", "embeded", "a/b/c", __file__])
def test_a_missing_model_is_named(model: str) -> None:
    with pytest.raises(CheckpointError, match=model):
        resolve(model, environ=NONE)


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_text("")
    with pytest.raises(CheckpointError, match=r"has no config.json: give the folder that contains it"):
        resolve(str(tmp_path), environ=NONE)


def test_the_home_of_an_unknown_user_is_named() -> None:
    for resolved in (resolve, lambda model, environ: resolve_served([f"name={model}"], {}, None, environ)):
        with pytest.raises(CheckpointError, match="there is no folder ~no-such-user/model"):
            resolved("~no-such-user/model", environ=NONE)


def test_every_option_has_a_help_text() -> None:
    assert all(option.help for option in options())
    shown = (
        CliRunner()
        .invoke(COMMAND, ["serve", "--help-all"], env={"COLUMNS": "200", "TERMINAL_WIDTH": "200"})
        .output
    )
    for option in options():
        assert f"--{option.name.replace('_', '-')}" in shown


def test_print_config_prints_toml_and_exits() -> None:
    result = CliRunner().invoke(COMMAND, ["serve", "embedded", "--port", "77", "--print-config"])
    assert result.exit_code == 0
    assert "port = 77\n" in result.output


def test_version() -> None:
    for words in (["version"], ["--version"]):
        result = CliRunner().invoke(COMMAND, words)
        assert (result.output.strip(), result.exit_code) == (__version__, 0)


def test_a_bad_setting_is_exit_status_2() -> None:
    result = CliRunner().invoke(COMMAND, ["serve", "embedded", "--port", "77777", "--print-config"])
    assert result.exit_code == 2
    assert "port = 77777" in result.output


def digests(*keys: str) -> tuple[str, ...]:
    return tuple("sha256:" + sha256(key.encode()).hexdigest() for key in keys)


def test_keys_are_known_by_their_digests_wherever_they_come_from(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("\ufeff# of the team\nkey-three\n\n  key-four\n  # indented\n", encoding="utf-8")
    overrides = {"api_key": ["key-one", "env:TEAM_KEY"], "api_key_file": str(file), "admin_key": ["key-five"]}
    settings = resolve("embedded", overrides, environ={"TEAM_KEY": "key-two"})
    assert settings.server.api_key == digests("key-one", "key-two", "key-three", "key-four")
    assert settings.server.admin_key == digests("key-five")
    assert resolve("embedded", environ={"STREAMSERVE_API_KEY": "key-1,key-2"}).server.api_key == digests(
        "key-1", "key-2"
    )


def test_a_key_file_names_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-one team\nkey-two   team\nkey-three\n")
    settings = resolve("embedded", {"api_key_file": str(file), "share_prefixes": True}, environ=NONE)
    one, two, three = digests("key-one", "key-two", "key-three")
    assert settings.server.api_key == (f"{one} team", f"{two} team", three)
    printed = tmp_path / "settings.toml"
    printed.write_text(to_toml(settings))
    assert resolve(config=printed, environ=NONE).server.api_key == settings.server.api_key


@pytest.mark.parametrize(
    ("lines", "overrides", "message"),
    [
        ("key-one team\nkey-one other\n", {}, "api_key: a key has two tenants"),
        ("key-one team\nkey-one\n", {}, "api_key: a key has two tenants"),
        ("key-one two words\n", {}, "api_key: a tenant must have"),
        ("key-one team\nkey-two team\n", {"share_prefixes": True}, "share_prefixes = True: there are no"),
        (
            "key-one\nkey-two\n",
            {"share_prefixes": True, "enable_prefix_caching": False},
            "leaves no prefixes",
        ),
    ],
)
def test_tenants_that_cannot_be_are_refused(
    tmp_path: Path, lines: str, overrides: dict[str, Any], message: str
) -> None:
    file = tmp_path / "keys"
    file.write_text(lines)
    with pytest.raises(SettingsError, match=message):
        resolve("embedded", {"api_key_file": str(file), **overrides}, environ=NONE)


def test_other_keys_have_no_tenants(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("key-one team\n")
    for secret in ("admin_key", "metrics_key"):
        with pytest.raises(SettingsError, match=f"{secret}: a key must have"):
            resolve("embedded", {f"{secret}_file": str(file)}, environ=NONE)


def test_printed_settings_show_no_key_and_read_back_to_the_same(tmp_path: Path) -> None:
    settings = resolve("embedded", {"api_key": ["key-one"]}, environ={"STREAMSERVE_ADMIN_KEY": "key-two"})
    text = to_toml(settings) + repr(settings)
    assert "key-one" not in text
    assert "key-two" not in text
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(settings))
    assert resolve(config=file, environ=NONE) == settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"api_key": ["two words"]}, "api_key: a key must have"),
        ({"api_key": [""]}, "api_key: a key must have"),
        ({"api_key": ["env:NOWHERE"]}, "api_key = 'env:NOWHERE': the environment has no such variable"),
        ({"admin_key": ["sha256:12"]}, "admin_key: a digest must be"),
        ({"metrics_key": ["two words"]}, "metrics_key: a key must have"),
        ({"api_key": [17]}, "api_key: must be strings"),
        ({"api_key_file": "/no/such/file"}, "api_key_file = '/no/such/file': cannot be read"),
    ],
)
def test_bad_keys_are_refused_unquoted(overrides: dict[str, object], message: str) -> None:
    with pytest.raises(SettingsError, match=message) as refused:
        resolve("embedded", overrides, environ=NONE)
    assert "two words" not in str(refused.value)


def test_an_empty_file_of_keys_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# none yet\n")
    with pytest.raises(SettingsError, match="contains no key"):
        resolve("embedded", {"api_key_file": str(file)}, environ=NONE)


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"prefill_share": 0.5, "order": "prefill-first"}, "prefill_share"),
        ({"swap_space": 0.01, "eviction": "recompute"}, "swap_space"),
        ({"draft_key": "some.key", "draft": "ngram"}, "draft_key"),
        ({"draft_model": ("0" * 64,), "draft": "none"}, "draft_model"),
        ({"kv_bytes_per_second": 1e6}, "kv_bytes_per_second"),
        ({"continue_tokens": 8}, "continue_tokens"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_setting_without_effect_is_refused(settings: dict[str, object], named: str) -> None:
    with pytest.raises(SettingsError, match=named):
        resolve("embedded", settings, environ={})


@pytest.mark.parametrize(("use", "level"), [("serve", "info"), ("batch", "warning"), ("llm", "warning")])
def test_messages_do_not_stand_between_answers(use: Use, level: str) -> None:
    assert resolve(environ={}, use=use).server.log_level == level
    assert resolve(overrides={"log_level": "debug"}, environ={}, use=use).server.log_level == "debug"


@pytest.mark.parametrize(
    ("name", "value"),
    [("kv_cache_bytes", "99999999999999999TB"), ("kv_cache_bytes", 10**30), ("swap_space", math.inf)],
)
def test_numbers_that_no_worker_can_be_told_are_refused(name: str, value: object) -> None:
    with pytest.raises(SettingsError, match=f"{name} = .*must be (between|a finite number)"):
        resolve("embedded", {name: value})


def test_an_empty_name_is_no_model() -> None:
    """An empty name is not a model; an unset variable of a shell results in one."""
    with pytest.raises(CheckpointError, match="name is empty"):
        resolve("embedded", {"draft": ""})


@pytest.mark.parametrize("name", ["", " "])
def test_a_model_has_a_name(name: str) -> None:
    with pytest.raises(SettingsError, match="served_model_name: a name is empty"):
        resolve("embedded", {"served_model_name": (name,)}, environ={})


COMMANDS: dict[Use, tuple[str, ...]] = {
    "batch": ("batch", "requests.jsonl"),
    "llm": ("generate", "Hello"),
    "profile": ("profile",),
}


@pytest.mark.parametrize("use", COMMANDS)
def test_a_command_refuses_the_flags_that_do_not_act_in_it(use: Use) -> None:
    """A command refuses the flags that have no effect in it: each flag is accepted, or refused by name with
    the command in which it applies."""
    shown = CliRunner().invoke(COMMAND, [*COMMANDS[use][:1], "--help-all"]).output
    listed = {
        name for option in options() for name in [option.name] if f"--{name.replace('_', '-')} " in shown
    }
    assert listed == acting(use)
    others = other_options(use)
    assert {"port", "api_key", "idle_unload"} <= {option.name for option in others}
    for option in others:
        values = {bool: [], int: ["1"], float: ["1.5"]}.get(option.kind, ["x"])
        done = CliRunner().invoke(COMMAND, [*COMMANDS[use], f"--{option.name.replace('_', '-')}", *values])
        assert done.exit_code == 2, option.name
        assert f"{option.name}: it has no effect in " in done.output, option.name
        assert "it acts in `streamserve serve`" in done.output


def test_a_server_s_file_is_taken_by_other_commands_and_what_does_not_act_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('port = 9000\nmax_num_seqs = 7\napi_key_file = "/nowhere"\nhost = "127.0.0.1"\n')
    environ = {"STREAMSERVE_BATCH_FOLDER": "/nowhere"}
    settings = resolve("embedded", config=file, environ=environ, use="llm")
    assert (settings.model.max_num_seqs, settings.server.port) == (7, 8000)
    assert [record.getMessage() for record in caplog.records] == [
        "api_key_file, batch_folder, port: without effect in `LLM`, `streamserve generate` and "
        "`streamserve chat`"
    ]


def test_printed_settings_of_a_server_are_taken_by_all_commands_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(to_toml(resolve("embedded", {"num_blocks": 99}, environ=NONE)))
    for use in COMMANDS:
        settings = resolve(config=file, environ=NONE, use=use)
        assert settings.model.num_blocks == 99
        assert "\nport = " not in to_toml(settings, use)
    assert not caplog.records


def test_the_width_of_a_batch_file_needs_no_batch_folder() -> None:
    given = {"batch_concurrency": 3}
    assert resolve("embedded", given, environ=NONE, use="batch").server.batch_concurrency == 3
    with pytest.raises(SettingsError, match="batch_concurrency = 3: without batch_folder"):
        resolve("embedded", given, environ=NONE)


def test_one_adapter_answers_in_a_terminal() -> None:
    def settings(*lora: str) -> Settings:
        return Settings("m", ModelConfig(path=""), ServerConfig(lora=lora))

    assert only_adapter(settings()) == ""
    assert only_adapter(settings("a=/x")) == "a"
    with pytest.raises(SettingsError, match="there are a, b: give only one"):
        only_adapter(settings("a=/x", "b=/y"))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"port": -1}, "port = -1: must be a whole number of at least 0"),
        ({"threads": "many"}, "threads = 'many': must be a whole number"),
        ({"kv_bytes_per_second": -3.0}, "kv_bytes_per_second = -3.0: must be a number above 0"),
        ({"join_lease": 1e9}, "join_lease = 1000000000.0: must be a number of at most 600"),
        ({"swap_space": math.nan}, "swap_space = nan: must be a finite number"),
        ({"check": "perhaps"}, "check = 'perhaps': must be true or false"),
        ({"host": 5}, "host = 5: must be a text"),
    ],
)
def test_wrong_values_are_told_in_words(values: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        resolve("embedded", values, environ=NONE)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("value", "text"),
    [(2**31 - 1, "2147483647"), (64.0, "64"), (0.5, "0.5"), (-2.0, "-2"), (1e30, "1e+30"), (1e-30, "1e-30")],
)
def test_whole_numbers_keep_their_digits(value: float, text: str) -> None:
    assert plain(value) == text


def test_a_misspelt_packaged_model_is_recognized() -> None:
    with pytest.raises(CheckpointError, match="there is no folder embeded: did you mean embedded"):
        resolve("embeded", environ=NONE)
