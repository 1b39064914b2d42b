"""The environment that chat templates are written for: what transformers gives them, and no more.

Templates come with models and are not trusted. They run in Jinja's immutable sandbox, and the doors through which one
can climb out of it are shut: no attributes of ``dict``, no underscored names in a ``namespace``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    environment.globals["dict"] = _Dict()
    environment.globals["namespace"] = _Namespace
    return environment


class _Generation(Extension):
    """``{% generation %}`` marks, for training, what the assistant said; the text inside is all that matters here."""

    tags = {"generation"}  # noqa: RUF012  (how Jinja declares it)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Dict:
    """``dict(…)`` without the class behind it."""

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
    """Unlike Jinja's own, it leaves <, > and & as they are: the model reads no HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(text: str) -> None:
    raise jinja2.TemplateError(text)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
