"""The document of a run: its options, its results, and what a reader must consider. Reports are made from it;
``--json`` prints it as JSON. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import msgspec

from swarm.bench.figures import PlotSeries, PointFigures
from swarm.bench.plan import LoadPoint
from swarm.bench.sweep import SweepPoint, SweepVerdict

BUSY_SHARE = 0.8  # of a core: a busier client process may be the bottleneck itself
CEILING_SHARE = 0.5  # of the ceiling
LATE_MS = 10.0  # delay of sending that is worth a note


@dataclass(frozen=True, slots=True)
class MachineInfo:
    """The machine on which the load generator ran."""

    processor: str
    cores: int
    memory_gib: float
    system: str
    python: str


@dataclass(frozen=True, slots=True)
class Ceiling:
    """Highest load that the same client processes measured against a null server, which answers immediately."""

    tokens_per_s: float
    requests_per_s: float
    concurrency: int
    output_tokens: int
    num_processes: int
    seconds: float


@dataclass(frozen=True, slots=True)
class PointResult:
    """One measured point: its load, its figures, and each client process's share of a core."""

    concurrency: int | None  # requests in flight, in a closed loop
    rate: float | None  # requests per second, in an open loop
    figures: PointFigures
    series: PlotSeries
    cpu: list[float]

    @property
    def load(self) -> str:
        return f"{self.concurrency} in flight" if self.rate is None else f"{self.rate:g} requests/s"

    def sweep_point(self) -> SweepPoint:
        """Return the values that the sweep needs."""
        figures = self.figures
        return SweepPoint(
            self.concurrency or 0,
            figures.tokens_per_s,
            figures.failed / figures.requests if figures.requests else 0.0,
            figures.goodput.share if figures.goodput else None,
        )


@dataclass(slots=True)
class Document:
    """A run."""

    version: str
    title: str
    started_at: str
    url: str
    model: str
    api: str
    stream: bool
    asked: dict[str, object]  # options by name, after defaults were applied
    num_processes: int
    machine: MachineInfo
    prompt_lengths: str
    wall_clock_s: float = 0.0
    ceiling: Ceiling | None = None
    points: list[PointResult] = field(default_factory=list)
    sweep: SweepVerdict | None = None
    # interrupted (Ctrl-C), deadline: the results are those until then
    ended: Literal["done", "interrupted", "deadline"] = "done"
    notes: list[str] = field(default_factory=list)

    @property
    def best(self) -> PointResult | None:
        """The point to show first: the sweep's, or the last one."""
        if self.sweep is not None and self.sweep.concurrency is not None:
            return next(point for point in self.points if point.concurrency == self.sweep.concurrency)
        return self.points[-1] if self.points else None


def without_series(document: Document) -> dict[str, object]:
    """Return the document for programs, without the thousands of values for plots."""
    result: dict[str, object] = msgspec.to_builtins(document)
    points = [msgspec.to_builtins(point) for point in document.points]
    result["points"] = [{name: value for name, value in point.items() if name != "series"} for point in points]
    return result


def build_notes(document: Document) -> list[str]:
    """Return notes on what limits the figures, for readers."""
    texts: list[str] = []
    if document.ended != "done":
        why = "was ended by Ctrl-C" if document.ended == "interrupted" else "reached its deadline (--deadline)"
        texts.append(f"The run {why}: these are the figures until then.")
    for point in document.points:
        texts += [f"{point.load}: {text}" for text in _point_notes(point, document)]
    return texts


def _point_notes(point: PointResult, document: Document) -> list[str]:
    figures, texts, ceiling = point.figures, [], document.ceiling
    if not figures.succeeded:
        texts.append("no request succeeded.")
    elif figures.counted_by != "usage":
        some = "for some answers " if figures.counted_by == "mixed" else ""
        texts.append(f"{some}the server gave no usage figures; pieces that carried text were counted as tokens.")
    if 0 < figures.succeeded < 100 and point is document.best:
        texts.append(f"p99 is based on {figures.succeeded} requests: it is close to the slowest one.")
    if point.cpu and max(point.cpu) > BUSY_SHARE:
        texts.append(f"a client process used {max(point.cpu):.0%} of a core: give more with --processes.")
    if ceiling is not None and document.stream and figures.tokens_per_s > CEILING_SHARE * ceiling.tokens_per_s:
        share = figures.tokens_per_s / ceiling.tokens_per_s
        texts.append(f"{share:.0%} of what this tool itself can measure here: the server may be faster than shown.")
    if point.rate is not None and figures.send_delay_ms is not None and figures.send_delay_ms.p99 > LATE_MS:
        texts.append(f"requests were sent late (p99 {figures.send_delay_ms.p99:.0f} ms); the delay is in their times.")
    return texts


def describe_point(point: LoadPoint) -> str:
    """Return a point's load as text."""
    load = f"{point.concurrency} in flight" if point.rate is None else f"{point.rate:g} requests/s"
    until = f"{point.duration_s:g} s" if point.duration_s is not None else f"{point.count} requests"
    return f"{load} for {until}"
