"""The packaged files load in transformers, have tied weights, and their tokenizer reproduces text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from embedded_training.export import config
from embedded_training.model import DRAFT, TARGET, Llama, Shape
from embedded_training.tokenizer import IM_END, render

from streamserve import embedded

transformers = pytest.importorskip("transformers")
SHAPES = {"embedded": TARGET, "embedded-draft": DRAFT}
CHAT = [
    {"role": "user", "content": "What is 17 + 25?"},
    {"role": "assistant", "content": "17 + 25 = 42."},
    {"role": "user", "content": "Thanks!\n\n  def f(x):\n\treturn x"},
]


@pytest.mark.parametrize("name", embedded.NAMES)
def test_loads_in_transformers(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path(name))
    ids = torch.tensor([[1, 3, 300, 400, 4]])
    with torch.inference_mode():
        logits = model(ids).logits
    assert logits.shape == (1, 5, 4096)
    assert logits.isfinite().all()
    assert model.dtype == torch.bfloat16
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert IM_END in model.generation_config.eos_token_id


@pytest.mark.parametrize("name", embedded.NAMES)
def test_training_twin_gives_the_same_logits(name: str) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(embedded.path(name), dtype=torch.float32)
    twin = Llama(SHAPES[name])
    twin.load_state_dict({key: weight.float() for key, weight in model.model.state_dict().items()})
    ids = torch.randint(8, 4096, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        torch.testing.assert_close(twin.head(twin(ids)[-1]), model(ids).logits, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("name", embedded.NAMES)
def test_tokenizer(name: str) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(embedded.path(name))
    assert len(tokenizer) == tokenizer.vocab_size == 4096
    for text in ("Hello, world!", "naïve café ☕ 漢字", "x = 12345\n\tif x:\n        pass  ", "<b>1 < 2</b>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("12345")) == 5
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True) == render(
        CHAT, prompt=True
    )


def test_pair_shares_one_tokenizer() -> None:
    target, draft = (embedded.path(name) for name in embedded.NAMES)
    assert (target / "tokenizer.json").read_bytes() == (draft / "tokenizer.json").read_bytes()


def test_sizes() -> None:
    sizes = {name: (embedded.path(name) / "model.safetensors").stat().st_size for name in embedded.NAMES}
    assert sizes["embedded"] <= 16_000_000
    assert sizes["embedded-draft"] <= 3_000_000
    everything = sum(
        path.stat().st_size for path in Path(embedded.__file__).parent.rglob("*") if path.is_file()
    )
    assert everything <= 20_000_000


def test_unknown_names_are_told() -> None:
    with pytest.raises(ValueError, match="embedded, embedded-draft"):
        embedded.path("embeded")


def test_config_carries_both_spellings() -> None:
    shape = Shape(hidden=128, layers=1, heads=2, kv_heads=1, ffn=256)
    written = config(shape)
    assert written["rope_theta"] == written["rope_parameters"]["rope_theta"]
    assert written["dtype"] == written["torch_dtype"] == "bfloat16"
