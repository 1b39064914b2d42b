"""Sandboxed environment for chat templates: offers what transformers offers them, and nothing more.

Templates come with models and are not trusted. They run in Jinja's immutable sandbox, and known ways to escape it are
closed: no attributes of ``dict``, no underscored names in a ``namespace``. Their time and output are limited
(``budget``).
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from swarm.client.text import budget
from swarm.client.text.rewriting import rewrite

MAX_DATE = 200  # characters of a date format
MAX_SOURCE = 1 << 18  # characters of a template; the longest in use have 40,000


def load_template(source: str, spell: Callable[[str], str] = str) -> jinja2.Template:
    """Compile a chat template, whose literals are rewritten by ``spell``. Raises jinja2.TemplateError."""
    if len(source) > MAX_SOURCE:
        raise jinja2.TemplateError(f"it has {len(source)} characters; at most {MAX_SOURCE} are read")
    environment = make_environment()
    try:
        return environment.from_string(rewrite(environment.parse(source), spell))
    except RecursionError:
        raise jinja2.TemplateError("it is nested too deep") from None


def make_environment() -> ImmutableSandboxedEnvironment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.filters = {name: _limit_filter(name, one) for name, one in environment.filters.items()}
    del environment.globals["lipsum"]
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits on the results of single operations."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget.check_operation(operator, left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if __obj in budget.TEMPLATE_FUNCTIONS:
            return __obj(*args)
        spent = budget.current_budget()
        spent.tick()
        owner = getattr(__obj, "__self__", None)
        if not isinstance(__obj, Macro) and isinstance(owner, str | list | tuple | dict):
            budget.check_method(owner, __obj.__name__, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        spent.charge_result(result)
        return result

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def limited(*args: Any, **kwargs: Any) -> str:
            budget.check_method(value.__self__, value.__name__, args, kwargs)
            return wrapped(*args, **kwargs)

        return limited


def _limit_filter(name: str, filter_function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter with limits on its result."""
    # Jinja passes a context or the like before the value
    first = 1 if hasattr(filter_function, "jinja_pass_arg") else 0

    @functools.wraps(filter_function)
    def limited(*args: Any, **kwargs: Any) -> Any:
        before, value, rest = args[:first], args[first], args[first + 1 :]
        if name == "join" and isinstance(value, Iterable) and not isinstance(value, str | list | tuple | Mapping):
            value = list(value)
        budget.check_filter(name, value, rest, kwargs)
        result = filter_function(*before, value, *rest, **kwargs)
        budget.current_budget().charge_result(result)
        return result

    return limited


class _Generation(Extension):
    """Extension for ``{% generation %}``, which marks the assistant's part for training; only the text inside matters
    here."""

    tags = {"generation"}  # noqa: RUF012  (how Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict(…)`` as a plain callable, without access to the class."""

    def __call__(self, *args: Mapping[str, object], **kwargs: object) -> dict[str, object]:
        return dict(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    def __init__(self, *args: Mapping[str, object], **kwargs: object) -> None:
        values = dict(*args, **kwargs)
        for name in values:
            _refuse_underscore(name)
        super().__init__(values)

    def __setitem__(self, name: str, value: object) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace can't hold the underscored name {name!r}")


def _to_json(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Encode a value as JSON. Unlike Jinja's own filter, leave <, > and & as they are: the model does not read HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> None:
    raise jinja2.TemplateError(text)


def _strftime_now(form: str) -> str:
    if len(form) > MAX_DATE:
        raise jinja2.TemplateError(f"a date's form has {len(form)} characters; at most {MAX_DATE} are read")
    return datetime.now().strftime(form)
