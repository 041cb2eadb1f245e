"""Chat templates: what transformers renders, in a sandbox that cannot be run away from."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from paceline.checkpoints.chat import render

CHATML = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = """{{- bos_token }}
{%- if tools is not none %}{{ raise_exception("no tools here") }}{% endif %}
{%- set date_string = strftime_now("%d %b %Y") %}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' + message.content | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
GEMMA = """{{ bos_token }}
{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Conversation roles must alternate') }}
    {% endif %}
    {% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{% endfor %}
{% if add_generation_prompt %}{{'<start_of_turn>model\\n'}}{% endif %}
"""
EVERYTHING = """{%- macro say(message, mark='*') -%}
{{ mark ~ message.role ~ mark }}: {{ message | tojson }} {{ message.content | upper | replace('A', '4') }}
{%- endmacro %}
{%- set ns = namespace(count=0, last='') %}
{%- for message in messages %}
    {%- if message.content == 'skip' %}{% continue %}{% endif %}
    {%- if message.content == 'stop' %}{% break %}{% endif %}
    {%- set ns.count = ns.count + 1 %}
    {%- set ns.last = ns.last ~ message.content[:2] %}
    {{ say(message, mark='-' * 3) }}
    {% generation %}{{ message.content }}{% endgeneration %}
{% endfor %}
{{ ns.count }} {{ ns.last }} {{ {'b': 1, 'a': [1, 2]} | tojson(indent=2) }} {{ unknown }} {{ documents is none }}
{{ messages | map(attribute='role') | join(',') }}
{{ messages | selectattr('role', 'equalto', 'user') | list | length }}
{{ '%s|%5.2f' % ('x', 2.5) }} {{ 2 ** 10 }} {{ [1] * 3 }} {{ range(3) | list }}
"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi \n there"}],
    [
        {"role": "system", "content": " Be brief. "},
        {"role": "user", "content": 'Hello <b>"x"</b> é 你好 👩‍👩‍👧‍👦'},
        {"role": "assistant", "content": "skip"},
        {"role": "user", "content": "  why?\n"},
    ],
    [{"role": "user", "content": "a"}, {"role": "assistant", "content": "stop"}, {"role": "user", "content": "b"}],
]
HELLO = [{"role": "user", "content": "hello"}]


def _nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    "template", [CHATML, LLAMA3, GEMMA, EVERYTHING], ids=["chatml", "llama3", "gemma", "everything"]
)
@pytest.mark.parametrize("chat", CHATS, ids=["one", "system", "turns"])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_renders_what_transformers_renders(
    template: str, chat: list[dict[str, Any]], add_generation_prompt: bool
) -> None:
    from transformers.utils.chat_template_utils import render_jinja_template

    tokens = {"bos_token": "<s>", "eos_token": "</s>"}
    if template == GEMMA and chat[0]["role"] == "system":
        with pytest.raises(ValueError, match="the chat template failed: TemplateError: System role not supported"):
            render(template, chat, add_generation_prompt=add_generation_prompt, special_tokens=tokens)
        return
    (theirs,), _ = render_jinja_template(
        [chat], chat_template=template, add_generation_prompt=add_generation_prompt, **tokens
    )
    assert render(template, chat, add_generation_prompt=add_generation_prompt, special_tokens=tokens) == theirs


def test_keys_that_are_none_are_left_out_and_the_caller_keeps_its_messages() -> None:
    calls = [{"function": {"name": "f", "arguments": {"x": 1}}}]
    messages = [{"role": "assistant", "content": None, "name": None, "tool_calls": calls}]
    template = "{{ messages[0].content is defined }} {{ messages[0].name is defined }} {{ messages[0] | tojson }}"
    assert render(template, messages) == f'False False {{"role": "assistant", "tool_calls": {json.dumps(calls)}}}'
    assert messages[0]["content"] is None


@pytest.mark.parametrize(
    ("messages", "match"),
    [
        ([], "messages is empty"),
        ("hello", "messages must be a list .* not str"),
        ({"role": "user", "content": "x"}, "messages must be a list .* not dict"),
        (["hello"], r"messages\[0\] must be a mapping"),
        ([{"content": "x"}], r"messages\[0\].role must be a non-empty string .* not None"),
        ([{"role": "", "content": "x"}], r"messages\[0\].role must be a non-empty string"),
        ([{"role": 3, "content": "x"}], r"messages\[0\].role .* not 3"),
        ([*HELLO, {"role": "user"}], r"messages\[1\].content must be a string, not NoneType"),
        ([{"role": "user", "content": 3}], r"messages\[0\].content must be a string, not int"),
        ([{"role": "user", "content": [{"type": "text", "text": "x"}]}], "join the texts of a list of parts"),
        ([{"role": "user", "content": "x", "extra": [object()]}], r"messages\[0\].extra\[0\] must be plain data"),
        ([{"role": "user", "content": "x", "extra": _nested(5000)}], r"messages\[0\] is nested too deeply"),
        ([{"role": "user", "content": "x", "extra": {1: 2}}], r"messages\[0\].extra has keys that are not strings"),
    ],
)
def test_messages_are_validated(messages: Any, match: str) -> None:
    with pytest.raises(ValueError, match=match):
        render(CHATML, messages)


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{% for %}", "TemplateSyntaxError"),
        ("{{ messages[7].content + 1 }}", "UndefinedError: list object has no element 7"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{% include 'x' %}", "no loader"),
        ("{{ raise_exception('only two roles') }}", "only two roles"),
        ("{{ ''.__class__.__mro__ }}", "SecurityError"),
        ("{{ messages.append(1) }}", "SecurityError"),
        ("{{ messages[0].update(role='system') }}", "SecurityError"),
        ("{{ raise_exception.__globals__['json'] }}", "SecurityError"),
        ("{{ '{0.__class__.__mro__}'.format(messages) }}", "SecurityError"),
        ("{{ messages | attr('__class__') | string }}{{ 1 / 0 }}", "SecurityError|ZeroDivisionError"),
        ("{{ lipsum(n=9) }}", "'lipsum' is undefined"),
        ("{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "RecursionError"),
        ("{{ 'x' }}" * 200_000, "characters long, more than"),
    ],
)
def test_errors_name_their_cause(template: str, match: str) -> None:
    with pytest.raises(ValueError, match=f"the chat template failed: .*({match})"):
        render(template, HELLO)


@pytest.mark.parametrize(
    "template",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% set x = 1 %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}some text{% endfor %}{% endfor %}",
        "{% for i in range(999999) %}{% endfor %}",
        "{{ 'x' * 10 ** 12 }}",
        "{{ 10 ** 12 * 'x' }}",
        "{{ [0] * 10 ** 12 }}",
        "{{ 9 ** 999999999 }}",
        *(
            f"{{% set ns = namespace(x={start}) %}}{{% for i in range(99) %}}{{% set ns.x = {growth} %}}{{% endfor %}}"
            for start, growth in [
                ("3", "ns.x * ns.x"),
                ("'x'", "ns.x ~ ns.x"),
                ("'x'", "ns.x + ns.x"),
                ("[1]", "ns.x + ns.x"),
                ("'x'", "ns.x | replace('x', 'xx')"),
                ("'x'", "ns.x.replace('x', 'xx')"),
                ("'x'", "[ns.x, ns.x] | join"),
            ]
        ),
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x %}{{ ns.x }}{{ ns.x }}{% endset %}"
        "{% endfor %}",
        "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
        "{% for x in [[]] recursive %}{{ loop([x]) }}{% endfor %}",
    ],
)
def test_a_runaway_template_is_stopped(template: str) -> None:
    began = time.process_time()
    with pytest.raises(ValueError, match=r"the chat template failed: .*(runs away|Range too big|RecursionError)"):
        render(template, HELLO)
    assert time.process_time() - began < 10


def test_the_meter_starts_anew_and_a_long_chat_fits() -> None:
    runaway = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(ValueError, match="runs away"):
        render(runaway, HELLO)
    long = [{"role": role, "content": "word " * 2000} for _ in range(500) for role in ("user", "assistant")]
    assert len(render(CHATML, long)) > 10_000_000
