"""Rendering a template always ends; ordinary templates render as before."""

import threading
import time

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from streamserve.api.http.side_thread import SideThread
from streamserve.protocol.errors import RequestError
from streamserve.text import template_limits
from streamserve.text.chat import ChatTemplate

ENDLESS = {
    "loops in loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "a text that grows": "{% for a in range(99999) %}{{ 'x' * 99999 }}{% endfor %}",
    "a product": "{{ 'x' * 10000000000 }}",
    "a product of lists": "{{ ([1] * 10000000000) | length }}",
    "a sum that doubles": (
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}"
    ),
    "a join that doubles": (
        "{% set ns = namespace(x='x') %}{% for a in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}"
    ),
    "a power": "{{ 9 ** (9 ** 9) }}",
    "powers of powers": (
        "{% set ns = namespace(x=9) %}{% for a in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}"
    ),
    "macros that call themselves twice": (
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
    ),
    "items that a loop leaves out": (
        "{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}"
    ),
    "JSON of lists of lists": (
        "{% set ns = namespace(x=1) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
        "{{ ns.x | tojson }}"
    ),
    "joins of joins": (
        "{% set ns = namespace(x='x') %}{% for i in range(12) %}"
        "{% set ns.x = ([ns.x] * 10) | join %}{% endfor %}"
    ),
    "a width by %": "{{ '%2000000000d' % 1 }}",
    "a width by % and *": "{{ '%*d' % (2000000000, 1) }}",
    "a width by the filter format": "{{ '%2000000000d' | format(1) }}",
    "a width by the method format": "{{ '{:>2000000000}'.format(1) }}",
    "a width by a method": "{{ 'a'.ljust(2000000000) }}",
    "a width by a filter": "{{ 'a' | center(2000000000) }}",
    "a batch": "{{ [1] | batch(200000000, 0) | list }}",
    "many long texts": (
        "{% set ns = namespace(x=[]) %}{% for i in range(60) %}"
        "{% set ns.x = ns.x + ['x' * 100000000] %}{% endfor %}"
    ),
    "constants": "{{ 'aaaaaaaaaa'" + " | replace('a', 'aaaaaaaaaa')" * 12 + " }}",
    **{
        f"a text that grows by {name}": (
            "{% set ns = namespace(x='aaaaaaaaaa') %}{% for i in range(60) %}{% set ns.x = "
            f"{grown}"
            " %}{% endfor %}"
        )
        for name, grown in {
            "the filter replace": "ns.x | replace('a', 'aaaaaaaaaa')",
            "the method replace": "ns.x.replace('a', 'aaaaaaaaaa')",
            "the filter format": "'%s%s' | format(ns.x, ns.x)",
            "the method format": "'{0}{0}'.format(ns.x)",
            "the method format_map": "'{a}{a}'.format_map({'a': ns.x})",
            "the method join": "ns.x.join(['a', 'a', 'a'])",
            "%": "'%s%s' % (ns.x, ns.x)",
        }.items()
    },
    **{
        f"lists of lists that are {name}": (
            "{% set ns = namespace(x=(), y=()) %}{% for i in range(60) %}{% set ns.x = (ns.x, ns.x) %}"
            "{% set ns.y = (ns.y, ns.y) %}{% endfor %}{{ " + used + " }}"
        )
        for name, used in {
            "written": "ns.x",
            "joined": "ns.x ~ ''",
            "written by a filter": "ns.x | upper",
            "written by a format": "'%s' | format(ns.x)",
            "written by map": "[ns.x] | map('string') | list | length",
            "written in a namespace": "ns",
            "compared": "ns.x == ns.y",
            "compared by a test": "ns.x is eq ns.y",
            "compared in a chain": "1 == ns.x == ns.y or 1 < 2 == ns.x == ns.y or ns.x == ns.y == 1",
            "searched": "ns.x in [ns.y]",
            "counted": "[ns.x].count(ns.y)",
            "sorted": "[ns.x, ns.y] | sort",
            "names": "{ns.x: 1}",
            "indices": "{}[ns.x]",
            "looked up": "{}.get(ns.x)",
        }.items()
    },
    "a sum of lists": "{{ ([[1] * 100000] * 100000) | sum(start=[]) | length }}",
    "items of filters": "{{ [0] * 99999999 " + "| map('abs') | select | reject " * 20 + "| list }}",
    **{
        f"a text that takes long in {name}": "{{ (" + text + ") | " + name + " }}"
        for name, text in {
            "striptags": "'<!---->' * 16000000",
            "urlize": "'a' + '(' * 60000000 + ')' * 60000000",
            "wordwrap": "'a' + '-' * 90000000",
        }.items()
    },
    "words": "{{ lipsum(n=1000000000) }}",
    "bytes": "{{ 'a'.encode().ljust(2000000000) }}",
    "the bytes of a number": "{{ (5).to_bytes(2000000000, 'little') | length }}",
    "itself": "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
}


@pytest.mark.parametrize("source", ENDLESS.values(), ids=ENDLESS)
def test_a_template_without_an_end_is_refused(source: str) -> None:
    template = ChatTemplate(source, {})
    began = time.monotonic()
    with pytest.raises(RequestError):
        template.render([{"role": "user", "content": "hello"}])
    assert time.monotonic() - began < 60


def test_the_limit_is_of_all_loops_of_one_rendering(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_ITERATIONS", 110)
    template = ChatTemplate("{% for a in range(10) %}{% for m in messages %}.{% endfor %}{% endfor %}", {})
    chat = [{"role": "user", "content": "hello"}] * 10
    assert [template.render(chat) for _ in range(3)] == ["." * 100] * 3
    with pytest.raises(RequestError, match="not ended after 110 iterations"):
        template.render([*chat, *chat])


def test_operations_on_long_texts_take_a_limited_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.1)
    template = ChatTemplate(
        "{% for i in range(99999) %}{% if messages[0].content | upper %}{% endif %}{% endfor %}", {}
    )
    with pytest.raises(RequestError, match="of processor time"):
        template.render([{"role": "user", "content": "a" * 100_000}])


def test_texts_are_those_of_plain_jinja() -> None:
    source = """
        {%- set ns = namespace(total=0) %}
        {%- for message in messages if message.role != 'system' recursive %}
            {%- set join_texts = ['a', 'b'] | join(', ') %}
            {{- join_texts ~ [message] | join('/', attribute='role') ~ '%s**%3d' % ('x', 4) }}
            {{- '{:>4}'.format(loop.index) ~ 'a'.rjust(3) ~ ('a' | center(5)) ~ (message | tojson | length) }}
            {{- [message.role] == [message['role']] and message.role in [message.role, 1] }}
            {{- (message.role | replace('s', 'ss')) ~ message.role.replace('e', '') ~ {'a': (1, [2])} }}
            {{- '{}-{a}'.format(1, a=message.role) ~ ', '.join(message.role) ~ [1, 2] | sum ~ [3, 1] | sort }}
            {{- loop.index ~ '/' ~ loop.length + ': ' + message.content * 2 ~ none ~ 1.5 }}
            {%- set ns.total = ns.total + loop.index0 * 2 ** 3 %}
            {%- if loop.last %}{% continue %}{% endif %}
        {%- else %}none
        {%- endfor %}
        {{- ns.total ~ ([1, 2] + [3]) ~ [{'a': [1]}, {'a': [2]}] | sum('a', []) ~ [1, 2.5] | sum }}"""
    chat = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    expected = plain.from_string(source).render(messages=chat)
    assert ChatTemplate(source, {}).render(chat) == expected != ""


@pytest.mark.parametrize(
    ("iterations", "threads"), [(10, 1), (2 * template_limits.QUICK_ITERATIONS, 2)], ids=["quick", "slow"]
)
async def test_a_slow_rendering_moves_to_the_side_thread(iterations: int, threads: int) -> None:
    """A slow rendering moves to the side thread: it begins in the event loop, and is repeated in the thread
    if it takes long. The text is the same."""
    source = f"{{% for i in range({iterations}) %}}{{% endfor %}}{{{{ messages[0].content }}}}"
    template = ChatTemplate(source, {})
    ran: list[int] = []

    def work() -> str:
        ran.append(threading.get_ident())
        return template.render([{"role": "user", "content": "hello"}])

    assert await SideThread().render(False, work) == "hello"
    assert ran[0] == threading.get_ident()
    assert len(set(ran)) == len(ran) == threads


async def test_a_template_without_end_is_refused_from_the_side_thread() -> None:
    template = ChatTemplate(ENDLESS["loops in loops"], {})
    with pytest.raises(RequestError, match="have not ended"):
        await SideThread().render(False, lambda: template.render([{"role": "user", "content": "a"}]))
