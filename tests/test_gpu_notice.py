"""Models on a GPU say that this version has not yet run on one, until there are results of one."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import torch

from streamserve.api.ops.models import card_of
from streamserve.cli.run_server import _notice
from streamserve.execution.cuda.device import NOT_YET_RUN, notice
from streamserve.protocol.messages import ModelInfo

MODEL = ModelInfo(
    architecture="LlamaForCausalLM", parameters=1, vocab_size=320, max_model_len=64, eos_token_ids=(3,),
    weight_bytes=4, dtype="bfloat16", row_invariant=False, fingerprint="0",
)  # fmt: skip
RESULTS = Path(__file__).parent.parent / "benchmarks" / "results"


def card(info: Any) -> dict[str, Any]:
    llm: Any = SimpleNamespace(model=info, created=0, root="/")
    return msgspec.to_builtins(card_of(llm, "m"))


def test_the_notice_stands_until_there_are_results_of_a_gpu() -> None:
    """With the first result file, `notice` returns nothing."""
    measured = list(RESULTS.glob("gpu-*.json"))
    assert bool(notice(torch.device("cuda", 0))) == (not measured)
    assert notice(torch.device("cpu")) == ""


def test_clients_and_the_start_of_a_server_show_it() -> None:
    info = msgspec.structs.replace(MODEL, notice=NOT_YET_RUN)
    assert "has not yet run on a GPU" in card(info)["notice"]
    assert "has not yet run on a GPU" in _notice(info)
    assert "notice" not in card(MODEL)
    assert _notice(MODEL) == ""
