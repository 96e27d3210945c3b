"""The byte-level BPE tokenizer of 4,096 entries and its ChatML-like template."""

from __future__ import annotations

import json
import random
from pathlib import Path

from embedded_data import Message, sample
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 4096
SPECIALS = [
    "<|pad|>",
    "<|bos|>",
    "<|eos|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|reserved_0|>",
    "<|reserved_1|>",
    "<|reserved_2|>",
]
PAD, BOS, EOS, IM_START, IM_END = range(5)
# A list of tools comes at the end of the system message, one line a function (embedded_data/tools.py); calls
# have the format of Hermes and Qwen.
CHAT_TEMPLATE = (
    "{%- macro kind(schema) -%}{% if schema.enum %}{{ schema.enum | join('|') }}"
    "{% elif schema.type == 'array' %}{{ (schema['items'] or {}).type or 'any' }}[]"
    "{% elif schema.type is string %}{{ schema.type }}{% else %}any{% endif %}{%- endmacro -%}"
    "{%- macro signature(function) -%}{%- set parameters = function.parameters or {} -%}"
    "{{ '- ' + function.name + '(' }}{% for name, schema in (parameters.properties or {}).items() %}"
    "{{ name + ('' if name in (parameters.required or []) else '?') + ': ' + kind(schema) }}"
    "{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}"
    "{% if function.description %}{{ ': ' + function.description }}{% endif %}{%- endmacro -%}"
    "{{ bos_token }}{% if tools %}{{ '<|im_start|>system\\n' }}"
    "{% if messages[0].role == 'system' %}{{ (messages[0].content or '') + '\\n\\n' }}"
    "{% set messages = messages[1:] %}{% endif %}{{ 'Tools:' }}"
    "{% for tool in tools %}{{ '\\n' + signature(tool.function or tool) }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role + '\\n' + (message.content or '') }}"
    "{% for call in message.tool_calls or [] %}{% set function = call.function or call %}"
    "{% if message.content or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": ' + function.name | tojson + ', \"arguments\": ' }}"
    "{{ function.arguments if function.arguments is string else function.arguments | tojson }}"
    "{{ '}\\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def render(messages: list[Message], prompt: bool = False) -> str:
    """What ``CHAT_TEMPLATE`` renders of texts (tools and calls written out), without the template engine."""
    body = "".join(f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages)
    return "<|bos|>" + body + ("<|im_start|>assistant\n" if prompt else "")


def train(path: Path, chats: int = 60_000, seed: int = 11) -> Tokenizer:
    """Train on training chats alone and save to ``path``."""
    tokenizer = Tokenizer(models.BPE())
    # Digits stand alone, so that every number is spelled the same way wherever it occurs.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(seed)
    texts = (m["role"] + "\n" + m["content"] for _ in range(chats) for m in sample(rng).messages)
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != VOCAB_SIZE:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} entries, not {VOCAB_SIZE}")
    path.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path))
    return tokenizer


def settings(max_positions: int) -> str:
    """The text of ``tokenizer_config.json``."""
    return (
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": max_positions,
                "bos_token": "<|bos|>",
                "eos_token": "<|im_end|>",
                "pad_token": "<|pad|>",
                "clean_up_tokenization_spaces": False,
                "add_bos_token": False,
                "add_eos_token": False,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=2,
        )
        + "\n"
    )
