"""Applies a unified diff: exactly its lines, but wherever in the file they have moved to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path


class DoesNotApply(Exception):
    """The code has changed under the patch: it must be made anew."""


@dataclass
class Hunk:
    """Lines to be found, and what stands there afterwards. ``line``: where they were, counted from 0."""

    line: int
    old: list[str] = field(default_factory=list)
    new: list[str] = field(default_factory=list)


def apply(patch: str, root: Path) -> list[Path]:
    """Change the files under ``root``; returns them. Raises DoesNotApply, and then has changed nothing of that file."""
    changed = []
    for name, hunks in _files(patch):
        path = root / name
        if not path.is_file():
            raise DoesNotApply(f"{name} is not there any more: regenerate the patch")
        lines = path.read_text().splitlines()
        for hunk in reversed(hunks):
            start = _find(lines, hunk, name)
            lines[start : start + len(hunk.old)] = hunk.new
        path.write_text("\n".join(lines) + "\n")
        changed.append(path)
    if not changed:
        raise DoesNotApply("it changes no file: regenerate the patch")
    return changed


def names(patch: str) -> list[str]:
    """The files that it changes."""
    return [name for name, _ in _files(patch)]


def _find(lines: list[str], hunk: Hunk, name: str) -> int:
    """The place nearest to where the lines once were."""
    places = [i for i in range(len(lines) - len(hunk.old) + 1) if lines[i : i + len(hunk.old)] == hunk.old]
    if not places:
        raise DoesNotApply(f"{name} has changed near line {hunk.line + 1}: regenerate the patch")
    return min(places, key=lambda place: abs(place - hunk.line))


def _files(patch: str) -> Iterator[tuple[str, list[Hunk]]]:
    name, hunks = "", []  # type: str, list[Hunk]
    for line in patch.splitlines():
        if line.startswith("--- "):
            continue
        if line.startswith("+++ "):
            if name:
                yield name, hunks
            name, hunks = line.removeprefix("+++ ").removeprefix("b/"), []
        elif line.startswith("@@ "):
            hunks.append(Hunk(int(line.split()[1].split(",")[0].removeprefix("-")) - 1))
        elif name and hunks and line[:1] in (" ", "-", "+", ""):
            if line[:1] != "+":
                hunks[-1].old.append(line[1:])
            if line[:1] != "-":
                hunks[-1].new.append(line[1:])
    if name:
        yield name, hunks
