"""Settings of a server with several models: arguments, tables and names are read, and errors are refused."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from streamserve.cli.main import app
from streamserve.cli.run_on_demand import loading_line
from streamserve.protocol.errors import CheckpointError
from streamserve.settings.adapters import adapter_paths
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.settings.several import ServedModels, resolve_served, served_names, served_to_toml
from tests.checkpoints import make_checkpoint

NONE: dict[str, str] = {}


def served(*models: str, file: Path | None = None, **flags: object) -> ServedModels:
    return resolve_served(models, flags, file, NONE)


def test_one_model_is_served_as_before() -> None:
    one = served("embedded", port=1)
    assert one.models == (resolve("embedded", {"port": 1}, environ=NONE),)
    assert not one.on_demand
    assert served().first.name == "embedded"
    assert served("small=embedded").first.server.served_model_name == ("small",)


def test_arguments_and_tables_are_models_and_tables_override_the_settings_of_all(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(
        'port = 1\nmax-num-seqs = 2\nidle_unload = "10m"\n'
        "[models.small]\nmax-num-seqs = 3\n"
        '[models."big/one"]\nmodel = "embedded-draft"\nserved-model-name = ["other"]\nidle-unload = "90s"\n'
    )
    several = served("small,tiny=embedded", file=file, max_num_seqs=4)
    assert several.on_demand
    first, second = several.models
    assert [served_names(each) for each in several.models] == [("small", "tiny"), ("big/one", "other")]
    assert (first.name, second.name) == ("embedded", "embedded-draft")
    assert [each.model.max_num_seqs for each in several.models] == [3, 4]
    assert [each.server.idle_unload for each in several.models] == [600.0, 90.0]
    assert second.server.port == 1


def test_a_single_model_is_loaded_on_demand_with_idle_unload() -> None:
    one = served("embedded", idle_unload="1.5h", load_timeout=60)
    assert one.on_demand
    assert one.first.server.idle_unload == 5400.0


def test_printed_settings_read_back_to_the_same(tmp_path: Path) -> None:
    several = served("a,b=embedded", "embedded-draft", models_memory_bytes="2GB", idle_unload="10m")
    file = tmp_path / "settings.toml"
    file.write_text(served_to_toml(several))
    again = resolve_served(config=file, environ=NONE)
    assert [each.model for each in again.models] == [each.model for each in several.models]
    assert [served_names(each) for each in again.models] == [("a", "b"), ("embedded-draft",)]
    assert again.first.server == several.first.server


def test_print_config_shows_every_model() -> None:
    command = ["serve", "a=embedded", "b=embedded-draft", "--print-config"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0
    assert '[models."a"]' in result.output
    assert 'model = "embedded-draft"' in result.output


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            '[models.b]\nmodel = "embedded"\nport = 2\n',
            r"\[models.b\] in .*toml: port is a setting of the whole",
        ),
        ("[models.b]\nmax_num_seqs = 2\n", r"models.b \(in .*\): model is missing"),
        ('[models.a]\nmodel = "embedded"\n', r"models.a: model is given in .*toml and outside of it"),
        ("[models.a]\nmax_num_sqs = 2\n", r"'max_num_sqs' \(in \[models.a\].*did you mean max_num_seqs"),
        ("[models.a]\nmax_num_seqs = 0\n", r"^\[models.a\] in .*settings.toml: max_num_seqs = 0"),
        ("max_num_seqs = 0\n[models.a]\nthreads = 2\n", "^max_num_seqs = 0"),
        ('[models.a]\ndtype = "int5"\n', r"^\[models.a\] in .*settings.toml: dtype = 'int5'"),
        (
            'speculation_policy = "fixed:2"\n[models.a]\ndraft = "none"\n',
            r"^\[models.a\] in .*settings.toml: speculation_policy = 'fixed:2'",
        ),
        ('router = "workers"\n[models.a]\nworkers = 2\n', "^router = 'workers'"),
        ('models = "embedded"\n', "must be tables"),
        ('idle_unload = "10 minutes"\n', "idle_unload = '10 minutes': must be a number of seconds"),
        ('load_timeout = "10s"\n', "load_timeout: a single model"),
        (
            'launcher = "ray"\n[models.b]\nmodel = "embedded"\n',
            "launcher = 'ray': machines can only join a server of one model",
        ),
        ('idle_unload = 5\ntimeline = "x"\n', "timeline: a timeline is only written for one model"),
        (
            'served_model_name = ["x"]\n[models.b]\nmodel = "embedded"\n',
            "served_model_name: with several models",
        ),
        (
            '[models.b]\nmodel = "embedded"\nserved_model_name = ["a"]\n',
            "two models have the name 'a'",
        ),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text)
    with pytest.raises(SettingsError, match=message):
        served("a=embedded", file=file)


def test_only_serve_takes_several_models(tmp_path: Path) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('[models.b]\nmodel = "embedded"\n')
    with pytest.raises(SettingsError, match="only `streamserve serve` serves several models"):
        resolve("embedded", config=file, environ=NONE)


def test_a_path_with_an_equals_sign_is_a_path(tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "seed=1")
    assert served(str(folder)).first.model.path == str(folder)
    with pytest.raises(CheckpointError, match="/no/where"):
        served("name=/no/where")


def test_the_first_line_has_the_names_of_the_api() -> None:
    served = resolve_served(["chat=embedded", "code,coder=embedded"], {}, None)
    assert loading_line(served).endswith(": loading chat …; on demand: code")


def test_adapters_belong_to_the_model_of_their_table(tmp_path: Path) -> None:
    """Adapters belong to the model of their table, also on demand, and printed settings are read back
    unchanged."""
    file, folder = tmp_path / "settings.toml", adapter_folder(tmp_path)
    file.write_text(f'[models.a]\nlora = ["x={folder}", "y={folder}"]\n[models.b]\nmax_loras = 3\n')
    several = served("a=embedded", "b=embedded-draft", file=file)
    assert [adapter_paths(each.server.lora).keys() for each in several.models] == [{"x", "y"}, set()]
    assert [each.model.max_loras for each in several.models] == [2, 3]
    file.write_text(served_to_toml(several))
    again = resolve_served(config=file, environ=NONE)
    assert [(each.model, each.server.lora) for each in again.models] == [
        (each.model, each.server.lora) for each in several.models
    ]
    one = served("embedded", idle_unload="10m", lora=[f"x={folder}"])
    assert one.on_demand
    assert one.first.model.max_loras == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[models.b]\nlora = ["x=F"]\n[models.c]\nlora = ["x=F"]\n', "lora = 'x' of c: another model or"),
        ('[models.b]\nlora = ["c=F"]\n', "two models have the name 'c'"),
        ('[models.c]\nlora = ["b=F"]\n', "lora = 'b' of c: another model or adapter"),
        ('[models.b]\nlora = ["b=F"]\n', "lora = 'b': the name 'b' is in use"),
        ('lora = ["x=F"]\n', "lora: with several models, give the adapters of each model in its table"),
    ],
)
def test_names_of_adapters_are_unique_over_all_models(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "settings.toml"
    file.write_text(text.replace("F", str(adapter_folder(tmp_path))))
    with pytest.raises(SettingsError, match=message):
        served("b=embedded", "c=embedded", file=file)


def adapter_folder(folder: Path) -> Path:
    """Return a folder that settings accept as an adapter."""
    (folder / "adapter").mkdir()
    (folder / "adapter" / "adapter_config.json").write_text("{}")
    return folder / "adapter"
