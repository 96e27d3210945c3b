"""Shortened chat templates of several models, and the conversations that they are rendered with."""

from typing import Any

SPECIAL = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
LLAMA3 = (
    "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] | trim + '<|eot_id|>' %}"
    "{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
MISTRAL = """{{ bos_token }}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- continue %}
    {%- endif %}
    {%- if message.role == 'user' %}
        {{- '[INST] ' + message.content + ' [/INST]' }}
    {%- else %}
        {%- generation %}
        {{- message.content + eos_token }}
        {%- endgeneration %}
    {%- endif %}
{%- endfor %}
"""
GUARD = """{% for message in messages %}<{{ message.role }}>
{%- for part in message.content | selectattr('type', 'equalto', 'text') %}{{ part.text | trim }}{% endfor %}
</{{ message.role }}>{% endfor %}"""
"""A template that renders only message parts, like Llama Guard 3."""
EITHER = """{% macro write(content) %}{% if content is string %}{{ content }}{% else %}
{%- for part in content %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}
{% for message in messages %}<{{ message.role }}>{{ write(message.content) }}{% endfor %}"""
STRICT = """{% if messages[0].role == 'system' %}{% set first = messages[0].content %}
{%- set rest = messages[1:] %}{% else %}{% set rest = messages %}{% endif %}
{%- for message in rest %}{% if message.role == 'system'
 or (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('roles must alternate') }}{% endif %}
{%- if loop.first and first is defined %}<<SYS>>{{ first }}<</SYS>>{% endif %}
{{- '<' + message.role + '>' + message.content }}{% endfor %}"""
"""A template with a system message only at the start, and alternating roles, like Llama 2 and Mistral."""
QWEN2 = """{% if messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>{% endif %}
{%- for message in messages %}{% if message.role in ('user', 'assistant', 'tool')
 or (message.role == 'system' and not loop.first) %}<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>{% endif %}{% endfor %}"""
"""A template that leaves out messages of the role developer."""
TOOL_JSON = "{% for m in messages %}{{ m.content | tojson if m.role == 'tool' else m.content }};{% endfor %}"
