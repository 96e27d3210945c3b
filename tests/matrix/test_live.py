"""Each architecture and each format works as users serve it: the text of `LLM` equals the text of a pair over
HTTP."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from streamserve import LLM, SamplingParams
from tests.conftest import Scale
from tests.matrix.cells import Written, diagonal, write_cell
from tests.serving import serving

SETTINGS: dict[str, Any] = {
    "max_model_len": 256, "num_blocks": 200, "threads": 1, "draft": "self:1",
    "speculation_policy": "fixed:2",
}  # fmt: skip
SMALL = [("qwen3_moe", "GGUF IQ4_XS")]
"""The cells that also run without --full."""


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cells = diagonal() if metafunc.config.getoption("--full") else SMALL
    metafunc.parametrize(("architecture", "format"), cells)


def flags(settings: dict[str, Any]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--" + name.replace("_", "-"), str(value))]


def texts_of_a_server(written: Written, settings: dict[str, Any], prompts: list[list[int]]) -> list[str]:
    """Return the texts over HTTP from a stream pair, after KV has moved between its workers."""
    with serving(str(written.path), *flags(settings), "--pairs", "1") as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
        model = client.models.list().data[0].id
        replies = [
            client.completions.create(
                model=model, prompt=prompt, max_tokens=24, temperature=0.8, seed=seed,
                extra_body={"ignore_eos": True},
            )
            for seed, prompt in enumerate(prompts)
        ]  # fmt: skip
        metrics = httpx.get(f"{server.url}/metrics").text
    sent = re.search(r"^\S*kv_transfer_bytes_total\S* (\S+)", metrics, re.MULTILINE)
    assert sent, metrics
    assert float(sent[1]) > 0
    return [reply.choices[0].text for reply in replies]


def test_a_pair_behind_http_gives_the_text_of_the_library(
    tmp_path: Path, architecture: str, format: str, scale: Scale, record: Callable[..., None]
) -> None:
    written = write_cell(tmp_path, architecture, format)
    settings = SETTINGS | written.settings
    prompts = [[5 + (number * 7 + i * i) % 200 for i in range(9 * number + 2)] for number in range(4)]
    params = [
        SamplingParams(temperature=0.8, seed=seed, max_tokens=24, ignore_eos=True)
        for seed in range(len(prompts))
    ]
    with LLM(str(written.path), log_level="warning", **settings) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    expected = [output.outputs[0].text for output in outputs]
    assert texts_of_a_server(written, settings, prompts) == expected
    record(architecture=architecture, format=format, requests=len(prompts))
