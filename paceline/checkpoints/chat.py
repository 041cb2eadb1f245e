"""Chat templates: messages in, prompt text out.

A template is a program that came along with somebody's weights, so it runs in jinja's sandbox, sees nothing but plain
data, and pays for what it does: every loop turn, macro call and piece of text it makes is charged to one meter, and a
template that runs away is stopped. Whatever goes wrong ends in a ValueError that names the cause. Knows nothing of
tokens.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache, wraps
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes, pass_context
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

Message = Mapping[str, Any]

_TEMPLATE_LENGTH = 1_000_000
_BUDGET = 50_000_000
"""Characters a template may make in one rendering, intermediate text included; about a second of work."""
_TURN = 250
"""What one loop turn or macro call costs, in characters."""

# Filters that no template can name: jinja's syntax has no spaces in names.
_METER_TURN = "meter a turn"
_METER_VALUE = "meter a value"

_left: ContextVar[int] = ContextVar("_left", default=_BUDGET)


def render(
    template: str,
    messages: Sequence[Message],
    *,
    add_generation_prompt: bool = True,
    special_tokens: Mapping[str, str] | None = None,
) -> str:
    """The prompt for `messages`. `special_tokens` are the names templates write them by (`bos_token`, ...)."""
    messages = plain_messages(messages)
    budget = _left.set(_BUDGET)
    try:
        return _compile(template).render(
            {
                **(special_tokens or {}),
                "messages": messages,
                "tools": None,
                "documents": None,
                "add_generation_prompt": add_generation_prompt,
            }
        )
    except Exception as error:  # the template is somebody else's program: it may raise anything
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
    finally:
        _left.reset(budget)


def plain_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain data, without keys that are None. ValueError names what a template could not use."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise ValueError(f"messages must be a list of {{'role': ..., 'content': ...}}, not {type(messages).__name__}")
    if not messages:
        raise ValueError("messages is empty; give at least one {'role': 'user', 'content': ...}")
    result = []
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise ValueError(f"{where} must be a mapping with 'role' and 'content', not {type(message).__name__}")
        try:
            plain = {key: _plain(value, f"{where}.{key}") for key, value in message.items() if value is not None}
        except RecursionError as error:
            raise ValueError(f"{where} is nested too deeply") from error
        role, content = plain.get("role"), plain.get("content")
        if not isinstance(role, str) or not role:
            raise ValueError(f"{where}.role must be a non-empty string such as 'user', not {role!r}")
        if not isinstance(content, str) and not (content is None and "tool_calls" in plain):
            raise ValueError(
                f"{where}.content must be a string, not {type(content).__name__}; "
                "join the texts of a list of parts first"
            )
        result.append(plain)
    return result


def _plain(value: Any, where: str) -> Any:
    """A copy in JSON's own types, so that a template never holds an object with methods of its own."""
    if value is None or type(value) in (str, bool, int, float):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value):
            raise ValueError(f"{where} has keys that are not strings")
        return {str.__str__(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    raise ValueError(f"{where} must be plain data (text, numbers, lists, mappings), not {type(value).__name__}")


@lru_cache(maxsize=8)
def _compile(template: str) -> Template:
    if len(template) > _TEMPLATE_LENGTH:
        raise SecurityError(f"it is {len(template)} characters long, more than {_TEMPLATE_LENGTH}")
    return _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation], finalize=_metered_value
    ).from_string(template)


def _spend(cost: int) -> None:
    left = _left.get() - cost
    if left < 0:
        raise SecurityError(f"it runs away: more than {_BUDGET} characters of work for one prompt")
    _left.set(left)


def _size(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() ** 2  # as multiplying it costs: no template needs integers of thousands of digits
    return len(value) if isinstance(value, (str, list, tuple, dict)) else 1


def _metered_value(value: Any) -> Any:
    _spend(_size(value))
    return value


def _metered(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        return _metered_value(function(*args, **kwargs))

    return metered


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the names chat templates expect, and a meter on everything that can grow."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.filters = {name: _metered(function) for name, function in self.filters.items()}
        self.filters["tojson"] = _metered(_tojson)
        self.filters[_METER_TURN] = pass_context(lambda context, cost: _spend(cost))
        self.filters[_METER_VALUE] = _metered_value
        del self.globals["lipsum"]
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = _strftime_now

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        return _Metering().visit(tree)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "*":
            _spend(_size(left) * right if isinstance(right, int) and not isinstance(left, int) else _size(left))
            _spend(_size(right) * left if isinstance(left, int) and not isinstance(right, int) else _size(right))
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _spend((left.bit_length() * max(right, 0)) ** 2)
        return _metered_value(super().call_binop(context, operator, left, right))

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        return _metered_value(super().call(context, obj, *args, **kwargs))


class _Metering(NodeTransformer):
    """Puts the meter into the template itself: into loop and macro bodies, and around `~`."""

    def visit_For(self, node: nodes.For | nodes.Macro | nodes.CallBlock) -> nodes.Node:
        self.generic_visit(node)
        cost = _TURN + sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        node.body.insert(0, nodes.ExprStmt(_filter(_METER_TURN, nodes.Const(cost))))
        return node

    visit_Macro = visit_For
    visit_CallBlock = visit_For

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(_METER_VALUE, node)


def _filter(name: str, value: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, [], [], None, None)


class _Generation(Extension):
    """`{% generation %}`: marks what a model wrote, for training; here only its content counts."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True)).set_lineno(line)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(str(message))


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja's own filter escapes for HTML, which no model was trained on."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
