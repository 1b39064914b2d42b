"""A mutant breaks one rule of the product, as a slip would. This module finds the code to break and breaks it.

A target is the qualified name of a function, method or class (``swarm.broker.core:BrokerCore.handle``), a module
(``swarm.broker.core:``), or the path of a file that is not Python. Mutants name code, not lines, so that they survive
when code moves within its function; a tool that renames can rewrite their strings.
"""

from __future__ import annotations

import ast
import re
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from textwrap import dedent, indent

CAUGHT_BY = re.compile(r"sim(?: with ([a-z,]+))?(?: ([a-z_,]+?))??(?: from (\d+))?|(tests/\S+(?: tests/\S+)*)")


class DoesNotApply(Exception):
    """The code has changed: the mutant's target or text must be updated."""


@dataclass(frozen=True)
class Edit:
    """One change: whole lines of the target, and the lines that replace them. Indentation is relative, and comments and
    empty lines of the target are ignored."""

    target: str
    old: str
    new: str

    @property
    def path(self) -> str:
        """The changed file, relative to the root of the checkout."""
        module, is_python, _ = self.target.partition(":")
        return module.replace(".", "/") + ".py" if is_python else self.target

    @property
    def name(self) -> str:
        """The function, method or class within the module; empty for a whole file."""
        return self.target.partition(":")[2]


@dataclass(frozen=True)
class Catcher:
    """What must notice a mutant: simulated schedules, or tests."""

    extras: str = ""  # further parts of the simulated swarms, with commas between them
    kinds: str = ""  # of faults, with commas between them; empty for all
    first: int = 0  # seed of the first schedule
    count: int = 0  # schedules to play; 0 for the usual number
    tests: str = ""  # files or single tests, with spaces between them; empty for schedules


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """A broken rule. ``caught_by`` is one of:

    - ``tests/unit/stage/test_core.py::test_one_step_at_a_time``: a test, or several with spaces between them
    - ``sim``: simulated schedules with all kinds of faults, beginning with seed 0
    - ``sim crash,freeze from 19``: schedules with these kinds only, beginning with seed 19
    - ``sim with images``: schedules with a further part, as ``swarm sim --with images`` plays them
    """

    name: str
    breaks: str  # what is wrong with the mutated code, in one sentence
    target: str
    old: str
    new: str
    caught_by: str
    also: tuple[Edit, ...] = ()  # further changes

    @property
    def edits(self) -> tuple[Edit, ...]:
        return (Edit(self.target, self.old, self.new), *self.also)

    @property
    def paths(self) -> list[str]:
        """The changed files, relative to the root of the checkout."""
        return sorted({edit.path for edit in self.edits})

    @cached_property
    def catcher(self) -> Catcher:
        match = CAUGHT_BY.fullmatch(self.caught_by)
        if match is None:
            raise ValueError(f"{self.name}: caught_by={self.caught_by!r} names neither schedules nor tests")
        extras, kinds, first, tests = match.groups("")
        return Catcher(extras, kinds, int(first or 0), tests=tests)


def mutate(mutant: Mutant, root: Path) -> dict[str, str]:
    """Return the new text of each changed file under ``root``. Raise DoesNotApply if an edit does not apply."""
    return {path: _change(root / path, [edit for edit in mutant.edits if edit.path == path]) for path in mutant.paths}


def _change(path: Path, edits: list[Edit]) -> str:
    """Return the file's text with these edits, which must still compile."""
    if not path.is_file():
        raise DoesNotApply(f"{path} does not exist: update the target")
    text, is_python = path.read_text(), path.suffix == ".py"
    lines = text.splitlines()
    replacements = sorted(_replacement(edit, text, lines) for edit in edits)
    for start, stop, new in reversed(replacements):
        lines[start:stop] = new
    text = "\n".join(lines) + "\n"
    if is_python:
        try:
            compile(text, str(path), "exec", dont_inherit=True)
        except SyntaxError as error:
            raise DoesNotApply(f"{edits[0].target} does not compile with the new text: {error}") from error
    return text


def _replacement(edit: Edit, text: str, lines: list[str]) -> tuple[int, int, list[str]]:
    """Return where the old lines begin and end, counted from 0, and the new lines with the old ones' indentation."""
    old = [line for line in dedent(edit.old).splitlines() if line.strip()]
    spans = list(_spans(text, edit)) if edit.name else [(0, len(lines))]
    if not spans:
        raise DoesNotApply(f"{edit.target} does not exist: update the target")
    code = [_code(lines, start, stop, edit.path.endswith(".py")) for start, stop in spans]
    runs = [part[start : start + len(old)] for part in code for start in range(len(part) - len(old) + 1)]
    places = [run for run in runs if dedent("\n".join(line for _, line in run)).splitlines() == old]
    if not old or len(places) != 1:
        num_places = len(places) if old else 0
        raise DoesNotApply(
            f"{edit.target} contains this {num_places} times instead of once: update the text\n{edit.old}"
        )
    [place] = places
    margin = min(len(line) - len(line.lstrip()) for _, line in place)
    new = indent(dedent(edit.new).strip("\n"), " " * margin)
    return place[0][0], place[-1][0] + 1, new.splitlines()


def _code(lines: list[str], start: int, stop: int, is_python: bool) -> list[tuple[int, str]]:
    """Return the lines with code and their numbers, counted from 0. Comments of Python code are left out."""
    code = lines[start:stop]
    if is_python and any("#" in line for line in code):
        for token in tokenize.generate_tokens(iter(line + "\n" for line in lines[start:stop]).__next__):
            if token.type == tokenize.COMMENT:
                row, column = token.start
                code[row - 1] = code[row - 1][:column].rstrip()
    return [(start + number, line) for number, line in enumerate(code) if line.strip()]


def _spans(text: str, edit: Edit) -> Iterator[tuple[int, int]]:
    """Yield the first line, counted from 0, and the end of each function or class with the edit's name: a property and
    its setter share one."""
    for name, first, stop in _definitions(text):
        if name == edit.name:
            yield first, stop


@lru_cache(maxsize=64)
def _definitions(text: str) -> list[tuple[str, int, int]]:
    return list(_walk(ast.parse(text), ""))


def _walk(node: ast.AST, prefix: str) -> Iterator[tuple[str, int, int]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            name = f"{prefix}{child.name}"
            first = min([child.lineno, *(decorator.lineno for decorator in child.decorator_list)])
            yield name, first - 1, child.end_lineno or child.lineno
            yield from _walk(child, f"{name}.")
        else:
            yield from _walk(child, prefix)
