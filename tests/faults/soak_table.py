"""Which fault strikes in which phase: the table that the soak fills, and the failpoints that fill it. Pure."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

# What a phase is made of: places, and the highest count at which a fault may strike there.
PHASES: dict[str, tuple[tuple[str, int], ...]] = {
    "join": (("tell.hello", 1), ("told.hello", 1), ("order.fence", 1)),
    "prepare": (("order.prepare", 2), ("handled.prepare", 2), ("tell.prepared", 2), ("told.prepared", 2)),
    "load": (("load.tensor", 15), ("load.done", 2)),
    "fence": (("order.fence", 4), ("handled.fence", 4)),
    "activate": (("order.activate", 2), ("handled.activate", 2), ("tell.activated", 2), ("told.activated", 2)),
    "replay": (
        ("order.replay", 2),
        ("handled.replay", 2),
        ("replay.begins", 2),
        ("replay.computed", 2),
        ("replay.sent", 2),
        ("tell.replaydone", 2),
        ("told.replaydone", 2),
    ),
    "prefill": (("step.prefill", 4),),
    "decode": (
        ("step.arrived", 30),
        ("step.computes", 30),
        ("step.computed", 30),
        ("step.sampled", 30),
        ("step.sent", 30),
    ),
}
# The actions of a fault. "two" is a kill that the soak follows up with another worker's; "crash" ends by its own doing.
FAULTS: dict[str, tuple[str, ...]] = {
    "kill": ("kill",),
    "two": ("kill",),
    "crash": ("abort", "segfault", "exit", "raise"),
    "stop": ("stop",),
    "hang": ("hang",),
    "stall": ("stall:0.3", "stall:0.1"),
    "terminate": ("terminate",),
    "memory": ("memory",),
    "nan": ("nan",),
}
_VALUES = {"replay": ("replay.computed",), "decode": ("step.computed",)}  # where numbers can be spoilt
_COMPUTES = {
    "load": ("load.tensor", "load.done"),
    "replay": ("replay.begins",),
    "prefill": ("step.prefill",),
    "decode": ("step.computes",),
}
LIVES = frozenset({"stall", "memory", "nan"})  # after these a process goes on: another fault follows


def possible(fault: str, phase: str) -> bool:
    """Whether this fault can happen in this phase."""
    return bool(_places(fault, phase))


def _places(fault: str, phase: str) -> tuple[tuple[str, int], ...]:
    only = {"nan": _VALUES, "memory": _COMPUTES}.get(fault)
    if only is None:
        return PHASES[phase]
    return tuple((place, most) for place, most in PHASES[phase] if place in only.get(phase, ()))


@dataclass(frozen=True)
class Appointment:
    """What will befall one process: a cell of the table and its failpoint; perhaps another one later, so that it does
    not live for ever."""

    fault: str
    phase: str
    place: str
    spec: str
    then: Appointment | None = None

    @property
    def specs(self) -> str:
        return self.spec if self.then is None else f"{self.spec},{self.then.specs}"

    def parts(self) -> list[Appointment]:
        return [self] if self.then is None else [self, *self.then.parts()]


class Table:
    """Counts, and which cell is next."""

    def __init__(self, faults: tuple[str, ...], seed: int) -> None:
        self._chance = random.Random(seed)
        self._cells = [(f, p) for f in faults for p in PHASES if possible(f, p)]
        self.counts: Counter[tuple[str, str]] = Counter()
        self._appointed: Counter[tuple[str, str]] = Counter()

    def appoint(self) -> Appointment:
        """One of the emptiest cells; some hardly ever come about, and must not be all that is tried."""
        fewest = min(self._tries(cell) for cell in self._cells)
        fault, phase = self._chance.choice([c for c in self._cells if self._tries(c) <= fewest + 1])
        self._appointed[fault, phase] += 1
        first = self._make(fault, phase)
        if fault not in LIVES:
            return first
        later = self._make("kill", "decode")
        return Appointment(first.fault, first.phase, first.place, first.spec, later)

    def _tries(self, cell: tuple[str, str]) -> float:
        return self.counts[cell] + 0.25 * self._appointed[cell]

    def _make(self, fault: str, phase: str) -> Appointment:
        place, most = self._chance.choice(_places(fault, phase))
        action = self._chance.choice(FAULTS[fault])
        return Appointment(fault, phase, place, f"{place}={action}@{self._chance.randint(1, most)}")

    def empty(self) -> list[tuple[str, str]]:
        return [cell for cell in self._cells if not self.counts[cell]]
