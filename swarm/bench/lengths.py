"""Distributions of lengths of prompts and answers: fixed, uniform, lognormal, or from a file's lines. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from swarm.errors import InvalidRequest

MAX_LENGTH = 1_000_000  # tokens; a larger number is a typing error
MAX_LINES = 100_000
FORMS = "N, uniform:LOW:HIGH, lognormal:MEDIAN:SIGMA[:MOST] or file:PATH (a whole number a line)"


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of whole numbers."""

    kind: str
    # fixed: the value; uniform: both ends; lognormal: median, sigma, maximum; file: all lines
    numbers: tuple[float, ...]
    text: str  # as given on the command line

    def draw(self, chance: Random) -> int:
        if self.kind == "fixed":
            return int(self.numbers[0])
        if self.kind == "uniform":
            return chance.randint(int(self.numbers[0]), int(self.numbers[1]))
        if self.kind == "file":
            return int(chance.choice(self.numbers))
        median, sigma, most = self.numbers
        return int(min(most, max(1.0, round(chance.lognormvariate(math.log(median), sigma)))))

    @property
    def mean(self) -> float:
        """The mean; for lognormal, without its maximum."""
        if self.kind == "uniform":
            return (self.numbers[0] + self.numbers[1]) / 2
        if self.kind == "lognormal":
            return min(self.numbers[2], self.numbers[0] * math.exp(self.numbers[1] ** 2 / 2))
        return sum(self.numbers) / len(self.numbers)


def parse_lengths(text: str, read: Callable[[str], str]) -> Lengths:
    """Parse a distribution from an option. ``read`` returns a file's text. Raises InvalidRequest."""
    kind, _, rest = text.partition(":")
    try:
        if kind == "file":
            return Lengths("file", _parse_lines(read(rest), rest), text)
        if kind == "uniform":
            low, high = (_parse_whole(part) for part in rest.split(":"))
            if low <= high:
                return Lengths("uniform", (low, high), text)
        elif kind == "lognormal":
            median, sigma, *most = rest.split(":")
            if len(most) <= 1 and 0 <= float(sigma) <= 10:
                bound = _parse_whole(most[0]) if most else MAX_LENGTH
                return Lengths("lognormal", (_parse_whole(median), float(sigma), bound), text)
        else:
            return Lengths("fixed", (_parse_whole(rest if kind == "fixed" else text),), text)
    except ValueError:
        pass
    raise InvalidRequest(f"{text!r} is not a distribution of lengths: {FORMS}, each from 1 to {MAX_LENGTH}")


def _parse_whole(text: str) -> int:
    number = int(text)
    if not 1 <= number <= MAX_LENGTH:
        raise ValueError(text)
    return number


def _parse_lines(text: str, path: str) -> tuple[float, ...]:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines or len(lines) > MAX_LINES:
        raise InvalidRequest(f"{path} has {len(lines)} lengths; from 1 to {MAX_LINES} can be used, a line each")
    for line in lines:
        if not (line.isascii() and line.isdigit() and 1 <= int(line) <= MAX_LENGTH):
            raise InvalidRequest(f"{path}: {line[:40]!r} is not a whole number from 1 to {MAX_LENGTH}")
    return tuple(float(line) for line in lines)
