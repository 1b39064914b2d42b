"""The commented settings file: config/swarm.toml is the output of ``python -m swarm.config``."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

from pydantic import BaseModel, ByteSize

from swarm.config.sections import Settings
from swarm.config.values import Section


def template() -> str:
    """Return a TOML file with every setting and its default, commented out."""
    lines = [
        "# The settings of Swarm. Every key is shown with its default: uncomment what you want to change.",
        "# The environment overrides this file (SWARM_BROKER__PORT=5800), flags override both.",
        '# Sizes are bytes, or text such as "512MB" or "2GiB". Times are seconds.',
    ]
    sections = {name: f.default for name, f in Settings.model_fields.items() if isinstance(f.default, Section)}
    lines += _render_keys(Settings, skip=set(sections))
    for name, section in sections.items():
        lines += ["", f"# {type(section).__doc__}", f"[{name}]", *_render_keys(type(section), skip=set())]
    return "\n".join(lines) + "\n"


def _render_keys(model: type[BaseModel], skip: set[str]) -> Iterator[str]:
    for name, field in model.model_fields.items():
        if name not in skip:
            yield ""
            yield from textwrap.wrap(field.description or "", width=110, initial_indent="# ", subsequent_indent="# ")
            yield f"# {name} = {_to_toml(field.default if field.default is not None else (field.examples or [''])[0])}"


def _to_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, ByteSize):
        return f'"{value.human_readable(decimal=False, separator="").replace(".0", "")}"'
    if isinstance(value, str | Path):
        return f'"{value}"'
    if isinstance(value, dict):
        return "{" + ", ".join(f'"{key}" = {_to_toml(item)}' for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_to_toml, value)) + "]"
    return str(value)
