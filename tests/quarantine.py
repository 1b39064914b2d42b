"""Quarantine of flaky tests: they run and are reported, but do not decide whether a run fails.

``quarantine.toml`` names each of them, with the cause and the date. A test is listed when its cause is understood and
can't be removed at once. It leaves the list with its cause.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from datetime import date
from pathlib import Path

FILE = Path(__file__).with_name("quarantine.toml")
_PREFIX = "quarantined since"


@dataclass(frozen=True, slots=True)
class Quarantined:
    """One entry."""

    test: str  # path::function, for all its parameters, or path::function[parameters]
    cause: str
    since: date

    @property
    def reason(self) -> str:
        return f"{_PREFIX} {self.since}: {self.cause}"

    def names(self, nodeid: str) -> bool:
        return self.test in (nodeid, nodeid.partition("[")[0])


def read() -> list[Quarantined]:
    return [Quarantined(**entry) for entry in tomllib.loads(FILE.read_text()).get("quarantined", [])]


def is_reason(text: str) -> bool:
    """Whether an expected failure has its reason from here."""
    return text.startswith(_PREFIX)
