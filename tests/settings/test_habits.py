"""Settings under the names of vLLM, SGLang, llama.cpp and Ollama: each is taken, accepted with a warning, or
refused with what to use."""

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from typer.main import get_command

from streamserve.cli.main import app
from streamserve.protocol.config import ModelConfig
from streamserve.settings.commands import acting
from streamserve.settings.habits.habit import Habit, Kind, key_of, named_settings
from streamserve.settings.habits.table import HABITS, SAME, adopt, habits_by_name
from streamserve.settings.options import SettingsError
from streamserve.settings.resolve import resolve
from streamserve.settings.several import resolve_served

COMMAND: Any = get_command(app)
NONE: dict[str, str] = {}
NGRAM = '{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}'

TAKEN: list[tuple[str, Any, dict[str, Any]]] = [
    ("--model", "embedded", {"model": "embedded"}),
    ("--model-path", "embedded", {"model": "embedded"}),
    ("-m", "model.gguf", {"model": "model.gguf"}),
    ("-hf", "owner/model:Q4_K_M", {"model": "owner/model:Q4_K_M"}),
    ("--hf-repo", "owner/model", {"model": "owner/model"}),
    ("--alias", "small", {"served_model_name": ["small"]}),
    ("--dtype", "half", {"dtype": "float16"}),
    ("dtype", "float", {"dtype": "float32"}),
    ("dtype", "torch.bfloat16", {"dtype": "bfloat16"}),
    ("dtype", "auto", {"dtype": "auto"}),
    ("max_model_len", 4096, {"max_model_len": 4096}),
    ("--max-model-len", "4k", {"max_model_len": 4000}),
    ("--max-model-len", "4K", {"max_model_len": 4096}),
    ("--max-model-len", "auto", {"max_model_len": None}),
    ("max_model_len", -1, {"max_model_len": None}),
    ("-c", "4096", {"max_model_len": "4096"}),
    ("--ctx-size", "4096", {"max_model_len": "4096"}),
    ("-c", "0", {"max_model_len": None}),
    ("--context-length", "4096", {"max_model_len": "4096"}),
    ("num_ctx", 4096, {"max_model_len": 4096}),
    ("--tp", "2", {"tensor_parallel_size": "2"}),
    ("--data-parallel-size", "2", {"workers": "2"}),
    ("--kv-cache-dtype", "int8", {"kv_cache_dtype": "int8"}),
    ("kv_cache_memory_bytes", 1 << 30, {"kv_cache_bytes": 1 << 30}),
    ("num_gpu_blocks_override", 99, {"num_blocks": 99}),
    ("--max-running-requests", "8", {"max_num_seqs": "8"}),
    ("--parallel", "4", {"max_num_seqs": "4"}),
    ("-np", "-1", {"max_num_seqs": ModelConfig(path="").max_num_seqs}),
    ("-t", "2", {"threads": "2"}),
    ("num_thread", 2, {"threads": 2}),
    ("-b", "256", {"max_num_batched_tokens": "256"}),
    ("num_batch", 256, {"max_num_batched_tokens": 256}),
    ("--disable-radix-cache", True, {"enable_prefix_caching": False}),
    ("quantization", "int8", {"quantization": "int8"}),
    ("-ctk", "q8_0", {"kv_cache_dtype": "int8"}),
    ("-ctv", "f16", {"kv_cache_dtype": "auto"}),
    ("-ngl", "0", {"device": "cpu"}),
    ("num_gpu", 0, {"device": "cpu"}),
    ("speculative_model", "[ngram]", {"draft": "ngram"}),
    ("speculative_config", {"model": "small"}, {"draft": "small"}),
    ("--model-draft", "draft.gguf", {"draft": "draft.gguf"}),
    ("draft", "self:4", {"draft": "self:4"}),
    ("enable_lora", True, {"max_loras": 1}),
    ("enable_lora", False, {}),
    ("--lora-modules", ["a=/a", "b=/b"], {"lora": ["a=/a", "b=/b"]}),
    ("--lora-modules", ['{"name": "a", "path": "/a"}'], {"lora": ["a=/a"]}),
    ("--lora-paths", ['{"lora_name": "a", "lora_path": "/a"}'], {"lora": ["a=/a"]}),
    ("--max-loras-per-batch", "2", {"max_loras": "2"}),
    ("--tool-call-parser", "hermes", {"tool_parser": "hermes"}),
    ("--tool-call-parser", "openai", {"tool_parser": "harmony"}),
    ("--reasoning-parser", "openai_gptoss", {"reasoning_parser": "harmony"}),
    ("runner", "pooling", {"task": "embed"}),
    ("--runner", "generate", {"task": "generate"}),
    ("task", "embedding", {"task": "embed"}),
    ("--is-embedding", True, {"task": "embed"}),
    ("--embedding", True, {"task": "embed"}),
    ("--reranking", True, {"task": "score"}),
    ("hf_overrides", {"classifier_from_token": ["no", "yes"]}, {"task": "score"}),
    ("--allowed-origins", '["https://a.example"]', {"cors_origin": ["https://a.example"]}),
    ("--uvicorn-log-level", "warning", {"log_level": "warning"}),
    ("-v", True, {"log_level": "debug"}),
    ("--chat-template-file", "/template", {"chat_template": "/template"}),
    ("--ssl-cert-file", "/cert", {"ssl_certfile": "/cert"}),
    ("--ssl-key-file", "/key", {"ssl_keyfile": "/key"}),
    ("keep_alive", "10m", {"idle_unload": "10m"}),
]
"""A name and a value of another program, and the settings that they mean."""

QUIET: list[tuple[str, Any]] = [
    ("trust_remote_code", False),
    ("pipeline_parallel_size", 1),
    ("cpu_offload_gb", 0),
    ("generation_config", "auto"),
    ("hf_overrides", {}),
    ("load_format", "auto"),
    ("--distributed-executor-backend", "mp"),
    ("tokenizer", None),
]
"""Values that change nothing here."""

PARTLY: list[tuple[str, Any, dict[str, Any], list[str]]] = [
    (
        "--speculative-config",
        NGRAM,
        {"draft": "ngram"},
        [
            f"--speculative-config {NGRAM}: its entry num_speculative_tokens has no effect: the policy "
            "chooses the number of draft tokens in each step: `--speculation-policy fixed:5` drafts 5",
            f"--speculative-config {NGRAM}: its entry prompt_lookup_max has no effect: the n-gram drafter "
            "chooses the length of a match",
        ],
    ),
    (
        "n_gpu_layers",
        -1,
        {},
        ["n_gpu_layers = -1: the whole model is on the GPU if there is one: see `device`"],
    ),
]
"""Values of which a part has no effect, with the settings and the warnings."""

SAID: list[tuple[str, Any, str]] = [
    (
        "--gpu-memory-utilization",
        "0.9",
        "--gpu-memory-utilization 0.9: the KV cache takes 40 % of a CPU's free memory, or 90 % of a GPU's; "
        "`--kv-cache-bytes 8GB` sets it",
    ),
    (
        "gpu_memory_utilization",
        0.9,
        "gpu_memory_utilization = 0.9: the KV cache takes 40 % of a CPU's free memory, or 90 % of a GPU's; "
        "`kv_cache_bytes = 8GB` sets it",
    ),
    (
        "--kv-cache-dtype",
        "fp8",
        "--kv-cache-dtype fp8: 8 bits are integers with a scale for each token and head here: "
        "`--kv-cache-dtype int8`",
    ),
    (
        "quantization",
        "awq",
        "quantization = 'awq': a quantized checkpoint says its method itself: leave this out; `quantization "
        "= int8` and `quantization = int4` round the weights of a checkpoint of 16 bits",
    ),
    (
        "--draft",
        "16",
        "--draft 16: `--draft` is the drafter here; `--speculation-policy fixed:16` drafts 16 tokens",
    ),
    (
        "speculative_config",
        {"method": "eagle3", "model": "x"},
        "speculative_config = {'method': 'eagle3', 'model': 'x'}: drafters are a small model with the same "
        "tokenizer (`draft = FOLDER`), `draft = ngram`, or the model's own first layers (`draft = self:4`)",
    ),
    (
        "speculative_config",
        {"method": "ngram", "disable_by_batch_size": 4},
        "speculative_config = {'method': 'ngram', 'disable_by_batch_size': 4}: its entry "
        "disable_by_batch_size is not supported: give `draft = ngram` instead",
    ),
    ("--speculative-config", "{", "--speculative-config {: is not JSON: Expecting property name"),
    ("-ctk", "q4_0", "-ctk q4_0: keys have the model's data type, or 8 bits: `--kv-cache-dtype int8`"),
    (
        "revision",
        "v1",
        "revision = 'v1': a version is a part of the model's name: owner/model@REVISION",
    ),
    (
        "hf_overrides",
        {"rope_theta": 1},
        "hf_overrides = {'rope_theta': 1}: config.json is not overridden: change it in a copy of the model's "
        "folder",
    ),
    ("--hf-token", "hf_secret", "--hf-token: the environment variable `HF_TOKEN`"),
    ("hf_token", "hf_secret", "hf_token: the environment variable `HF_TOKEN`"),
    (
        "--lora-modules",
        ['{"name": "a"}'],
        "--lora-modules: an adapter must have a name and a path: `--lora NAME=PATH`",
    ),
    ("--jinja", False, "--no-jinja: the model's chat template is always rendered"),
    ("enable_lora", "maybe", "enable_lora = 'maybe': must be true or false"),
]
"""Values that are refused, and the error."""

WAYS_ON = (
    "`", "leave", "use a proxy", "put", "change", "give", "shorten", "owner/model@", "owner/model:", "a file",
    "a proxy", "in generation_config.json", "refused", "folder",
)  # fmt: skip
"""Parts of a text that say what to do instead."""


def of_kinds(*kinds: Kind) -> list[Habit]:
    return [habit for habit in HABITS if habit.kind in kinds]


def typed(name: str) -> bool:
    """Return whether a name is not an environment variable of another program."""
    return not name.isupper()


@pytest.mark.parametrize(("name", "value", "settings"), TAKEN)
def test_a_setting_of_another_name_or_form_is_taken(name: str, value: Any, settings: dict[str, Any]) -> None:
    adopted = adopt({name: value})
    assert (adopted.settings, adopted.warnings) == (settings, ())


def test_every_taken_habit_has_a_case() -> None:
    names = [case[0] for case in TAKEN] + [case[0] for case in PARTLY]
    shown = {id(habits_by_name()[name]) for name in names}
    assert [habit.names for habit in of_kinds("taken") if id(habit) not in shown] == []


@pytest.mark.parametrize(("name", "value"), QUIET)
def test_a_value_that_changes_nothing_is_accepted_without_a_word(name: str, value: Any) -> None:
    adopted = adopt({name: value})
    assert (adopted.settings, adopted.warnings) == ({}, ())


@pytest.mark.parametrize(("name", "value", "settings", "warnings"), PARTLY)
def test_a_part_without_effect_is_named(
    name: str, value: Any, settings: dict[str, Any], warnings: list[str]
) -> None:
    adopted = adopt({name: value})
    assert (adopted.settings, list(adopted.warnings)) == (settings, warnings)


@pytest.mark.parametrize(("name", "value", "error"), SAID)
def test_a_refusal_says_what_to_use(name: str, value: Any, error: str) -> None:
    with pytest.raises(SettingsError) as caught:
        adopt({name: value})
    assert str(caught.value).startswith(error)


@pytest.mark.parametrize("habit", of_kinds("idle"), ids=lambda habit: habit.names[0])
def test_a_setting_without_effect_is_accepted_with_one_warning(habit: Habit) -> None:
    for name in habit.names:
        adopted = adopt({name: True if habit.values == "none" else "value"})
        assert adopted.settings == {}
        (warning,) = adopted.warnings
        assert warning.startswith(name)
        assert ": without effect: " in warning


@pytest.mark.parametrize("habit", of_kinds("instead", "refused"), ids=lambda habit: habit.names[0])
def test_every_refusal_has_a_way_on(habit: Habit) -> None:
    for name in filter(typed, habit.names):
        with pytest.raises(SettingsError) as caught:
            adopt({name: True if habit.values == "none" else "value"})
        assert str(caught.value).startswith(name)
        assert any(way_on in str(caught.value) for way_on in WAYS_ON)


def test_names_are_unique_and_texts_name_existing_settings() -> None:
    names = [name for habit in HABITS for name in habit.names]
    keys = [key for name in names if (key := key_of(name))]
    assert len(names) == len(set(names))
    assert len(keys) == len(set(keys))
    for habit in HABITS:
        assert set(named_settings(habit.here)) <= acting("serve"), habit.names
        assert (habit.convert is not None) == (habit.kind == "taken")
    for program, same in SAME.items():
        assert set(same) <= acting("serve"), program
        assert not {name for name in same if name in habits_by_name() and program == "vllm"}


def test_a_setting_under_two_names_is_refused() -> None:
    assert adopt({"max_model_len": 5, "num_ctx": 5}).settings == {"max_model_len": 5}
    with pytest.raises(SettingsError, match="max_model_len and num_ctx both set max_model_len: give only"):
        adopt({"max_model_len": 5, "num_ctx": 6})
    both = {"enable_lora": True, "--lora-modules": ["a=/a", "b=/b"]}
    assert adopt(both).settings == {"lora": ["a=/a", "b=/b"]}


def test_a_reranker_has_the_runner_of_all_models_that_pool() -> None:
    """As in vLLM's example of Qwen3-Reranker."""
    overrides = {"architectures": ["Qwen3ForSequenceClassification"], "classifier_from_token": ["no", "yes"]}
    assert adopt({"runner": "pooling", "hf_overrides": overrides}).settings == {"task": "score"}
    assert adopt({"runner": "pooling", "hf_overrides": {}}).settings == {"task": "embed"}
    assert adopt({"--runner": "pooling", "--task": "score"}).settings == {"task": "score"}


@pytest.mark.parametrize(
    ("file", "variables", "flags", "name", "value"),
    [
        ("max_model_len = 256", {}, {"--max-model-len": "auto"}, "max_model_len", None),
        ("threads = 3", {"THREADS": "2"}, {"-t": "-1"}, "threads", 0),
        ("max_num_seqs = 3", {"PARALLEL": "-1"}, {}, "max_num_seqs", 64),
        ("max_loras = 4", {}, {"--enable-lora": True}, "max_loras", 4),
        ("", {"ENABLE_LORA": "1", "MAX_LORAS": "4"}, {}, "max_loras", 4),
        ("", {"MAX_LORAS": "4", "ENABLE_LORA": "1"}, {}, "max_loras", 4),
        ("max_loras = 4\n[models.a]\nenable_lora = true", {}, {}, "max_loras", 4),
        ('device = "auto"', {}, {"-ngl": "0"}, "device", "cpu"),
        ("", {"N_GPU_LAYERS": "0", "DEVICE": "auto"}, {}, "device", "auto"),
        ("enable_lora = true", {}, {}, "max_loras", 1),
    ],
)
def test_other_names_have_the_precedence_of_their_source(
    tmp_path: Path, file: str, variables: dict[str, str], flags: dict[str, Any], name: str, value: Any
) -> None:
    config = tmp_path / "settings.toml"
    config.write_text(file)
    environ = {f"STREAMSERVE_{variable}": text for variable, text in variables.items()}
    (served,) = resolve_served(("a=embedded",), flags, config, environ).models
    assert getattr(served.model, name) == value


def test_variables_of_two_names_are_refused() -> None:
    environ = {"STREAMSERVE_CTX_SIZE": "256", "STREAMSERVE_MAX_MODEL_LEN": "512"}
    with pytest.raises(SettingsError, match="ctx_size and max_model_len both set max_model_len: give only"):
        resolve("embedded", {}, None, environ)


def test_flags_files_variables_and_arguments_take_them(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "settings.toml"
    file.write_text('ctx-size = 512\ndtype = "float"\nenforce_eager = true\n')
    environ = {"STREAMSERVE_DTYPE": "half", "STREAMSERVE_PARALLEL": "3"}
    settings = resolve(None, {"model": "embedded", "num_thread": 1}, file, environ)
    model = settings.model
    assert (model.max_model_len, model.dtype, model.max_num_seqs, model.threads) == (512, "float16", 3, 1)
    assert [record.getMessage() for record in caplog.records] == [
        "enforce_eager = True: without effect: the output does not depend on CUDA graphs"
    ]
    file.write_text('[models.a]\nmodel = "embedded"\nctx-size = 256\n')
    (served,) = resolve_served((), {"--hf-repo": None}, file, NONE).models
    assert served.model.max_model_len == 256


def test_a_command_line_of_llama_cpp_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    flags = shlex.split("-m embedded -c 512 -np 3 -t 1 -ngl 0 --jinja -fa on --alias small --port 9000")
    done = CliRunner().invoke(COMMAND, ["serve", *flags, "--print-config"])
    assert done.exit_code == 0, done.output
    lines = ['model = "embedded"', "max_model_len = 512", "max_num_seqs = 3", "threads = 1", 'device = "cpu"',
             'served_model_name = ["small"]', "port = 9000"]  # fmt: skip
    assert set(lines) <= set(done.stdout.splitlines())
    assert [record.getMessage() for record in caplog.records] == [
        "--jinja: without effect: the model's chat template is always rendered",
        "-fa on: without effect: there is one implementation of attention for each device",
    ]


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["serve", "embedded", "--gpu-memory-utilization", "0.9"], "`--kv-cache-bytes 8GB` sets it"),
        (["serve", "embedded", "-m", "other"], "there are two models: other is given by a flag, embedded as"),
        (["chat", "embedded", "--hf-repo", "other"], "there are two models: other is given by a flag"),
        (["generate", "Hello", "--temp", "0.7"], "`streamserve generate` and `chat` have `--temperature`"),
        (
            ["serve", "--chat-tempalte", "x"],
            "no flag --chat-tempalte: did you mean --chat-template?",
        ),
    ],
)
def test_a_refused_flag_is_one_line(arguments: list[str], error: str) -> None:
    done = CliRunner().invoke(COMMAND, arguments)
    assert done.exit_code == 2
    (line,) = done.output.splitlines()
    assert line.startswith("streamserve: ")
    assert error in line
