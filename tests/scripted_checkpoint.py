"""A checkpoint whose greedy text is a script: the next token is a function of the last one.

Each piece of a reply is a separate token, so it is always followed by the same token. Prompts are encoded as
bytes, since no merge makes a piece. The chat template ends a prompt with a token that begins the reply: it
looks for the replies' cues in the assistant's last message and in what came after it.
"""

import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

HIDDEN = 128
MAX_POSITIONS = 1_000_000
SCALE = 100.0
"""Distance between logits. The scripted token is the only likely one at any temperature that clients send."""
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>")
MAX_PIECE = 9

TEMPLATE = """\
{%- if tools %}<|im_start|>system
You may call these functions:
<tools>
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}</tools>
Write <tool_call>{"name": <name>, "arguments": <arguments>}</tool_call> for each call.<|im_end|>
{% endif %}
{%- set ns = namespace(since='') %}
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": {{ call.function.name | tojson }}, "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% set ns.since = ('' if message.role == 'assistant' else ns.since) ~ (message.content or '') %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% set ns.entry = ENTRY_OF_OTHERS %}
{%- for cue, tooled, entry in CUES %}
{%- if cue in ns.since and (tools or not tooled) %}{% set ns.entry = entry %}{% endif %}
{%- endfor %}
{{- ns.entry }}
{%- endif %}"""


@dataclass(frozen=True)
class Reply:
    """The text after a prompt whose last messages contain `cue`; an empty cue is for all other prompts.

    If several cues are found, the last reply of the script counts. `tooled`: only for prompts with tools.
    `endless`: the text is repeated until the output is cut.
    """

    cue: str
    text: str
    tooled: bool = True
    endless: bool = False


def make_scripted(folder: Path, replies: Sequence[Reply], seed: int = 0) -> Path:
    """Write a checkpoint that writes `replies`, cut into pieces that depend on `seed`; return its folder.

    The last reply must have the empty cue."""
    *cued, other = replies
    assert not other.cue, "the last reply must be for all other prompts"
    rng, used = random.Random(seed), {*pre_tokenizers.ByteLevel.alphabet()}
    pieces = [_pieces(reply.text, rng, used) for reply in (*cued, other)]
    entries = [f"<|reply_{number}|>" for number in range(len(pieces))]
    names = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *SPECIAL_TOKENS, *entries]
    names += [piece for reply in pieces for piece in reply]
    ids = {name: number for number, name in enumerate(names)}
    follow: dict[int, int] = {}
    for entry, reply_pieces, reply in zip(entries, pieces, (*cued, other), strict=True):
        chain = [entry, *reply_pieces, reply_pieces[0] if reply.endless else SPECIAL_TOKENS[1]]
        follow |= {ids[last]: ids[after] for last, after in pairwise(chain)}
    folder.mkdir(parents=True, exist_ok=True)
    _write_model(folder, len(names), follow, ids[SPECIAL_TOKENS[1]])
    _write_tokenizer(folder, ids, entries)
    cues = [[reply.cue, reply.tooled, entry] for reply, entry in zip(cued, entries, strict=False)]
    template = TEMPLATE.replace("ENTRY_OF_OTHERS", json.dumps(entries[-1]))
    template = template.replace("CUES", json.dumps(cues).replace("true", "True").replace("false", "False"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL_TOKENS[1],
        "chat_template": template,
        "model_max_length": MAX_POSITIONS,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return folder


def _pieces(text: str, rng: random.Random, used: set[str]) -> list[str]:
    """Cut a text into pieces that are not in `used`, as the vocabulary spells them, and add them to it."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    spelled = "".join(piece for piece, _ in level.pre_tokenize_str(text))
    result: list[str] = []
    start = 0
    while start < len(spelled):
        end = start + rng.randint(2, MAX_PIECE)
        while spelled[start:end] in used and end < len(spelled):
            end += 1
        piece, start = spelled[start:end], end
        while piece in used and result:  # The end of a text may be shared with other texts.
            piece = result.pop() + piece
        assert piece not in used, f"two replies have the text {text!r}"
        used.add(piece)
        result.append(piece)
    return result


def _write_model(folder: Path, vocab_size: int, follow: dict[int, int], end: int) -> None:
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 16,
        "dtype": "float32",
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 1,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "bos_token_id": None,
        "eos_token_id": end,
        "tie_word_embeddings": False,
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    # The state after a token is the direction of the token that follows it.
    directions = torch.randn(vocab_size, HIDDEN, generator=torch.Generator().manual_seed(0))
    directions /= directions.norm(dim=1, keepdim=True) / math.sqrt(HIDDEN)
    embedding = torch.zeros(vocab_size, HIDDEN)
    embedding[list(follow)] = directions[list(follow.values())]
    head = directions * (SCALE / HIDDEN)
    sizes = {"q_proj": (16, HIDDEN), "k_proj": (16, HIDDEN), "v_proj": (16, HIDDEN), "o_proj": (HIDDEN, 16)}
    tensors = {f"self_attn.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    sizes = {"gate_proj": (16, HIDDEN), "up_proj": (16, HIDDEN), "down_proj": (HIDDEN, 16)}
    tensors |= {f"mlp.{name}.weight": torch.zeros(size) for name, size in sizes.items()}
    norms = ("input_layernorm", "post_attention_layernorm")
    tensors |= {f"{name}.weight": torch.ones(HIDDEN) for name in norms}
    tensors = {f"model.layers.0.{name}": tensor for name, tensor in tensors.items()}
    tensors |= {"model.embed_tokens.weight": embedding, "lm_head.weight": head}
    tensors["model.norm.weight"] = torch.ones(HIDDEN)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def _write_tokenizer(folder: Path, ids: dict[str, int], entries: Sequence[str]) -> None:
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([*SPECIAL_TOKENS, *entries])
    tokenizer.save(str(folder / "tokenizer.json"))
