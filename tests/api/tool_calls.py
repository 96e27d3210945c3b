"""A tool, a call of it and a chat template that renders both, for tests of tool calling."""

from collections.abc import AsyncGenerator
from typing import Any

from streamserve.api.generator import Item
from streamserve.protocol.sampling import SamplingParams
from streamserve.text.output import ChoiceDelta, Usage
from tests.api.serving import Script

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}"
    "Write <tool_call>{{ '{' }}name, arguments{{ '}' }}</tool_call> to call.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["city", "days"],
    "additionalProperties": False,
    "$defs": {"city": {"enum": ["Paris", "Rome"]}},
}
WEATHER: Any = {"type": "function", "function": {"name": "get_weather", "parameters": PARAMETERS}}

CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Rome", "days": 2}}\n</tool_call>'


def says(*pieces: str, finish: Any = "stop") -> Script:
    """Return a model that generates these pieces."""

    async def script(prompt: list[int], params: SamplingParams) -> AsyncGenerator[Item, None]:
        for choice in range(params.n):
            for piece in pieces:
                yield ChoiceDelta(choice, piece, (72,))
            yield ChoiceDelta(choice, tokens=(3,), finish=finish)
        yield Usage(len(prompt), len(pieces) + 1)

    return script
