"""What the documents and examples have their reader type: shell commands in blocks and in the running text, read
roughly as a shell would, and the command lines that must take them."""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import typer

from swarm.cli.app import app as swarm_app
from swarm.ctl.commands import app as swarmctl_app

ROOT = Path(__file__).parents[1]
PAGES = tuple(str(path.relative_to(ROOT)) for path in (*sorted(ROOT.glob("*.md")), *sorted(ROOT.glob("docs/**/*.md"))))
PROGRAMS = {"swarm": swarm_app, "swarmctl": swarmctl_app}
GUESS = "3"  # in the place of what a shell would put in: right as a number, a name and a folder
_BLOCK = re.compile(r"^```(\w*)[^\n]*\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PROMPT = re.compile(r"^\w*[$#] (?=\S)")
_ENDS = frozenset("();|&·")  # of one command; the dot is how a document puts several in a line


@dataclass(frozen=True, slots=True)
class Command:
    """``words``: the first one is the program. ``is_short``: one of several in a line or a name in the running text,
    which may leave out what it needs (``swarmctl drain``), but not have what does not exist."""

    words: tuple[str, ...]
    is_short: bool = False

    @property
    def name(self) -> str:
        """The program and its command, or the script."""
        program, *rest = self.words
        if program not in PROGRAMS:
            return program
        found = [program]
        command: Any = _command(program)
        for word in rest:
            if word not in getattr(command, "commands", {}):
                break
            command = command.commands[word]
            found.append(word)
        return " ".join(found)


def blocks(page: str, *languages: str) -> list[str]:
    text = (ROOT / page).read_text()
    return [body for language, body in _BLOCK.findall(text) if language in languages]


def typed(page: str) -> Iterator[str]:
    """Lines with a prompt, each with those that go on with it."""
    for body in blocks(page, "console", "text"):
        lines = iter(body.splitlines())
        for line in lines:
            if _PROMPT.match(line):
                whole = _PROMPT.sub("", line)
                while whole.endswith("\\"):
                    whole = whole[:-1] + next(lines).removeprefix("> ")
                yield whole


def named(page: str) -> Iterator[str]:
    """What stands between backticks in the running text."""
    text = _BLOCK.sub("", (ROOT / page).read_text())
    for found in re.findall(r"`([^`\n]+(?:\n[^`\n]+)?)`", text):
        yield " ".join(found.split())


def commands(line: str, *, is_short: bool = False) -> Iterator[Command]:
    """The commands of a shell's line, wherever they stand in it: behind another program, too, or in its words."""
    parts = list(_parts(line))
    program = ""
    for part in parts:
        words = _runs(part)
        if not words:
            continue
        if words[0] in PROGRAMS:
            program = words[0]
        elif program and words[0] in _command(program).commands:  # swarmctl status | nodes
            words = [program, *words]
        yield Command(tuple(words), is_short or len(parts) > 1)
        yield from (Command(inner, is_short) for inner in _inner(words))


def parse(command: Command) -> None:
    """Parse one of our own as the program would, without carrying it out. Raises what the program would say."""
    program, *rest = command.words
    found = _command(program)
    while hasattr(found, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in found.commands, f"{program} has no command {rest[0]}"
        found, rest = found.commands[rest[0]], rest[1:]
    if command.is_short:
        rest = [GUESS if word in ("N", "S") else word for word in rest]
    try:
        found.make_context(program, list(rest))
    except Exception as error:
        if type(error).__name__ != "Exit" and not (command.is_short and _lacks(error)):  # --version ends a command
            raise


def options_of(tool: str) -> frozenset[str]:
    """Options of a script in ``tools``, with those of the scripts beside it that it imports; read, not imported, since
    most import torch."""
    path = ROOT / tool
    if path.suffix != ".py" and "python" not in path.read_text().partition("\n")[0]:
        return frozenset(re.findall(r"(?<!\S)--[a-z-]+", path.read_text()))
    found: set[str] = set()
    waiting, seen = [path], set()
    while waiting:
        each = waiting.pop()
        seen.add(each)
        for node in ast.walk(ast.parse(each.read_text())):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
                found |= {str(word.value) for word in node.args if isinstance(word, ast.Constant)}
            names = [node.module] if isinstance(node, ast.ImportFrom) and node.module else []
            names += [name.name for name in node.names] if isinstance(node, ast.Import) else []
            beside = [path.parent / f"{name}.py" for name in names]
            waiting += [one for one in beside if one.exists() and one not in seen]
    return frozenset(word for word in found if word.startswith("-"))


def options(words: tuple[str, ...]) -> list[str]:
    return [word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)]


@cache
def all_our_options() -> frozenset[str]:
    """Of every command of our programs."""

    def of(command: Any) -> Iterator[str]:
        for parameter in command.params:
            yield from (*parameter.opts, *parameter.secondary_opts)
        for each in getattr(command, "commands", {}).values():
            yield from of(each)

    return frozenset(option for program in PROGRAMS for option in of(_command(program)))


def _lacks(error: Exception) -> bool:
    """Is nothing wrong with it but that something is left out?"""
    name = type(error).__name__
    return name in ("MissingParameter", "NoArgsIsHelpError") or "requires an argument" in str(error)


@cache
def _command(program: str) -> Any:
    return typer.main.get_command(PROGRAMS[program])


def _parts(line: str) -> Iterator[list[str]]:
    """The words of each simple command, without redirections; comments are left out."""
    reader = shlex.shlex(_put_in(line), posix=True, punctuation_chars="();<>|&·")
    reader.whitespace_split = True
    words: list[str] = []
    skips = False
    try:
        for word in reader:
            if set(word) <= _ENDS:
                yield words
                words = []
            elif set(word) <= {"<", ">", "&"}:
                skips = True
                words = words[:-1] if words and words[-1].isdecimal() and word[0] == ">" else words
            elif not skips:
                words.append(word)
            else:
                skips = False
    except ValueError:  # a quotation that does not end: prose
        words = []
    yield words


def _put_in(line: str) -> str:
    """What a shell puts in is guessed, but for what our own programs print."""
    line = re.sub(r"\d?>&\d", "", line)
    return re.sub(r"\$\{[^}]*\}|\$\((?!swarm|kubectl)[^()]*\)|\$\w+|\$[@!]", GUESS, line)


def _runs(words: list[str]) -> list[str]:
    """Without what only stands before a program: variables, a name for what it prints, an interpreter, a container."""
    while words and (re.match(r"\w+=", words[0]) or words[0] in ("exec", "python", "$", "if", "while", "for", "do")):
        words = words[1:]
        if words[:1] == ["-m"]:
            words = [f"python -m {words[1]}", *words[2:]] if len(words) > 1 else []
    return words


def _inner(words: list[str]) -> Iterator[tuple[str, ...]]:
    """Commands of ours in another one's words: ``docker … gateway swarmctl status``, ``"$(swarm completion bash)"``."""
    for index, word in enumerate(words[1:], 1):
        if word in PROGRAMS and words[0] not in PROGRAMS and set(words[index + 1 :]) & set(_command(word).commands):
            yield tuple(words[index:])
        if word.startswith("$("):
            with suppress(ValueError):
                yield tuple(shlex.split(word[2:].rstrip(")")))
