"""Figures of copies of keys and values, beside their goals. Imports no swarm, so that it can be tested alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median

Facts = dict[str, float | str | None]  # by name


@dataclass(frozen=True)
class Limit:
    """Goal of a figure: at most this much, in the unit of the figure."""

    most: float
    text: str

    def is_met_by(self, figure: float) -> bool:
        return figure <= self.most


@dataclass(frozen=True)
class Figure:
    """One row of the table: samples with copies and without, and the goal for those with copies.

    ``also``: further facts of the row with copies, by name.
    """

    case: str
    unit: str
    on: Sequence[float]
    off: Sequence[float]
    goal: Limit | None = None
    also: Facts = field(default_factory=dict)

    @property
    def is_met(self) -> bool | None:
        """Whether the median with copies meets the goal; None without a goal or a sample."""
        return None if self.goal is None or not self.on else self.goal.is_met_by(median(self.on))

    def cells(self) -> list[str]:
        """Return the row's cells: case, with copies, without, goal, verdict, facts."""
        verdict = {None: "–", True: "yes", False: "NO"}[self.is_met]
        facts = ", ".join(f"{name} {_short(value)}" for name, value in self.also.items())
        sides = [f"{_short(median(side))} {self.unit}" if side else "–" for side in (self.on, self.off)]
        return [self.case, *sides, "–" if self.goal is None else self.goal.text, verdict, facts]

    def line(self) -> str:
        """Return the row as one line."""
        case, on, off, goal, met, facts = self.cells()
        return f"{case}: on {on}, off {off}, goal {goal}, met {met}" + (f", {facts}" if facts else "")


@dataclass
class Figures:
    """Rows measured so far. Each is also shown as a line at once, so that a run that is cut short leaves its rows."""

    show: Callable[[str], None]
    rows: list[Figure] = field(default_factory=list)

    def add(self, row: Figure) -> None:
        self.rows.append(row)
        self.show(row.line())


COLUMNS = ("case", "copies on", "copies off", "goal", "met", "facts")


def _short(value: float | str | None) -> str:
    if value is None:
        return "–"
    if isinstance(value, str):
        return value
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def stall_goal(sequences: int, context: int, *, demo: bool) -> Limit | None:
    """Return the goal of a stall in ms: half a second for the 1.1 B shape; for the demo model in two cases only."""
    if not demo:
        return Limit(500.0, "≤ 500 ms")
    most = {(1, 256): 40.0, (8, 1024): 80.0}.get((sequences, context))
    return None if most is None else Limit(most, f"≤ {most:.0f} ms")


def slope_goal() -> Limit:
    """Return the goal for each further position of a stall, in ms."""
    return Limit(0.05, "≤ 0.05 ms")


def cost_goal(*, demo: bool) -> Limit:
    """Return the goal of the throughput that copies cost, in percent."""
    return Limit(3.0, "≤ 3 %") if demo else Limit(2.0, "≤ 2 %")


DRAIN_GAP = Limit(300.0, "≤ 300 ms")
DRAIN_REPLAYED = Limit(0.0, "0")
GAIN_ERROR = Limit(25.0, "within 25 %")
DEATHS_REPLAYED = Limit(1.0, "≤ 1 replay")


def slope(points: Iterable[tuple[int, float]]) -> float | None:
    """Return by how much a figure grows for each position, by least squares over (positions, figure); None with fewer
    than two numbers of positions."""
    pairs = list(points)
    if len({positions for positions, _ in pairs}) < 2:
        return None
    mean_x, mean_y = (sum(pair[axis] for pair in pairs) / len(pairs) for axis in (0, 1))
    spread = sum((x - mean_x) ** 2 for x, _ in pairs)
    return sum((x - mean_x) * (y - mean_y) for x, y in pairs) / spread


@dataclass(frozen=True)
class Gaps:
    """Longest gaps of all answers around a loss, in seconds.

    ``rebuilt``: those during which the next plan was activated. ``resumed``: later ones that began while layers of
    other sequences were still being rebuilt; 0 if there was none.
    """

    rebuilt: float
    resumed: float


def longest_gaps(times: Iterable[Sequence[float]], activated_at: float, rebuilt_at: float) -> Gaps:
    """Split the gaps of answers, each given by the times of its tokens. ``rebuilt_at``: when all layers were complete
    again."""
    rebuilt = resumed = 0.0
    for answer in times:
        for sooner, later in pairwise(answer):
            if sooner <= activated_at < later:
                rebuilt = max(rebuilt, later - sooner)
            elif activated_at < sooner < rebuilt_at:
                resumed = max(resumed, later - sooner)
    return Gaps(rebuilt, resumed)


def gain_error(predicted: float, achieved: float) -> float:
    """Return by how much an achieved gain differs from the predicted one, in percent of the predicted throughput. Both
    are ratios of throughput after to throughput before."""
    return abs(achieved / predicted - 1) * 100
