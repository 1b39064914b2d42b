"""Options that say what an answer must look like, and the grammar that they make."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from swarm.params import Grammar

SchemaOption = Annotated[
    Path | None,
    typer.Option("--json-schema", metavar="FILE", help="Answer in JSON by this schema; - reads it from stdin."),
]
RegexOption = Annotated[
    str | None, typer.Option("--regex", help="The whole answer matches this expression.", show_default=False)
]
ChoiceOption = Annotated[
    list[str] | None, typer.Option("--choice", help="The answer is this text, or that of another --choice.")
]
GrammarOption = Annotated[
    Path | None,
    typer.Option("--grammar", metavar="FILE", help="A grammar in Lark's or llama.cpp's form; - reads it from stdin."),
]


def grammar_of(schema: Path | None, regex: str | None, choices: list[str] | None, ebnf: Path | None) -> Grammar | None:
    """The grammar that the options ask for. What it means is checked by the client. Raises BadParameter."""
    from swarm.params import Grammar

    given = {
        "--json-schema": schema is not None,
        "--regex": regex is not None,
        "--choice": bool(choices),
        "--grammar": ebnf is not None,
    }
    names = [name for name, is_given in given.items() if is_given]
    if len(names) > 1:
        raise typer.BadParameter(f"give only one of {', '.join(names)}: an answer has one form")
    if schema is not None:
        return Grammar("json_schema", _read(schema, "--json-schema"))
    if regex is not None:
        return Grammar("regex", regex)
    if choices:
        return Grammar("choice", json.dumps(choices, ensure_ascii=False))
    return None if ebnf is None else Grammar("ebnf", _read(ebnf, "--grammar"))


def _read(path: Path, option: str) -> str:
    try:
        return sys.stdin.read() if str(path) == "-" else path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise typer.BadParameter(f"{option} {path} can't be read: {error}") from None
