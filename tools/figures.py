#!/usr/bin/env python3
"""Generate the page of figures from docs/figures.toml.

python tools/figures.py > docs/reference/figures.md
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

SOURCE: Final = Path(__file__).parents[1] / "docs" / "figures.toml"
HEAD: Final = """\
# Figures

Every measurement that the README and these pages rely on, generated from `docs/figures.toml`.

Each ends with date, processor, load (other work, or the load average, if recorded), command, and the recording commit.
The machines were virtual ones with two cores and neighbours: trust ratios more than absolute values. Nothing is
measured on aarch64, on GPUs or on several physical machines. “1.1 B” is a Llama shape with 22 layers, hidden size 2048
and random bfloat16 weights. “Before” is Swarm before the change that a figure is about.
"""


def render(data: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    parts = [HEAD, "\n".join(_machines(data["processors"])) + "\n"]
    for section, title in data["sections"].items():
        parts.append(f"## {title}\n")
        parts += [_figure(figure, data["processors"]) for figure in data["figure"] if figure["section"] == section]
    return "\n".join(parts)


def _machines(processors: Mapping[str, tuple[str, str]]) -> Iterator[str]:
    yield _row(["name", "processor"])
    yield "|---|---|"
    for name, description in processors.values():
        yield _row([name, description])


def _figure(figure: Mapping[str, Any], processors: Mapping[str, tuple[str, str]]) -> str:
    name, _ = processors.get(figure["processor"], (figure["processor"], ""))
    measured = [figure["date"], name, figure.get("load"), _quote(figure["command"]), figure["commit"]]
    parts = [
        f"### {figure['title']}",
        figure["what"],
        "\n".join(_table(figure)),
        figure.get("note"),
        ", ".join(part for part in measured if part),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _quote(command: str) -> str:
    """Quote commands, but not a description such as "of vLLM's own benchmarks"."""
    programs = ("tools/", "pytest ", "swarm ")
    return "; ".join(f"`{part}`" if part.startswith(programs) else part for part in command.split("; "))


def _table(figure: Mapping[str, Any]) -> Iterator[str]:
    columns = figure["columns"]
    yield _row(columns)
    yield "|" + "---|" * len(columns)
    for line in figure["rows"].strip("\n").splitlines():
        cells = [cell.strip() for cell in re.split(r"\s\|(?=\s|$)", line)]
        if len(cells) != len(columns):
            raise ValueError(
                f"{figure['title']!r} has {len(columns)} columns, but a row has {len(cells)} cells: {line}"
            )
        yield _row(cells)


def _row(cells: list[str]) -> str:
    return f"|{'|'.join(cells)}|"


if __name__ == "__main__":
    print(render(tomllib.loads(SOURCE.read_text())), end="")
