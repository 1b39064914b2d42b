"""Plots as self-contained SVG. Pure: values in, text out. The page's stylesheet sets colours and fonts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

from swarm.bench.report.format import format_number, format_time, log_ticks, ticks

LEFT, RIGHT, TOP, BOTTOM = 74, 16, 14, 44  # margins for labels, in pixels

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Axis:
    """Mapping from values to positions between 0 and 1, with labelled ticks."""

    title: str
    position: Callable[[float], float]
    ticks: list[tuple[float, str]]


def linear_axis(title: str, most: float, label: Callable[[float], str] = format_number) -> Axis:
    """Return an axis from zero, with round numbers at the ticks."""
    steps = ticks(most)
    return Axis(title, lambda value: value / steps[-1], [(step, label(step)) for step in steps])


def log_axis(title: str, least: float, most: float, label: Callable[[float], str] = format_number) -> Axis:
    """Return an axis on which equal steps are equal factors, for values from milliseconds to seconds."""
    steps = log_ticks(least, most)
    low, high = math.log(steps[0]), math.log(steps[-1])
    shown = steps if len(steps) <= 8 else [step for step in steps if f"{step:e}"[0] == "1"]
    if len(shown) < 2:
        shown = steps
    return Axis(
        title,
        lambda value: (math.log(max(value, steps[0])) - low) / (high - low),
        [(step, label(step)) for step in shown],
    )


def category_axis(title: str, values: Sequence[float]) -> Axis:
    """Return an axis that gives each of a few values equal space, in order."""
    places = {value: (n + 0.5) / len(values) for n, value in enumerate(values)}
    return Axis(title, lambda value: places[value], [(value, format_number(value)) for value in values])


@dataclass(slots=True)
class Plot:
    """A plot that is being drawn. ``name`` describes it for screen readers."""

    name: str
    x: Axis
    y: Axis
    width: int = 560
    height: int = 280
    _parts: list[str] = field(default_factory=list)

    def line(self, points: Points, style: str) -> None:
        self._parts.append(f'<path class="line {style}" d="{self._path(points)}"/>')

    def area(self, points: Points, style: str) -> None:
        """Draw a line and fill the area below it."""
        if points:
            baseline = self._pixel_y(0)
            first, last = self._pixel_x(points[0][0]), self._pixel_x(points[-1][0])
            closed = f"{self._path(points)}L{last:.1f},{baseline:.1f}L{first:.1f},{baseline:.1f}Z"
            self._parts.append(f'<path class="area {style}" d="{closed}"/>')
        self.line(points, style)

    def dots(
        self, points: Points, style: str, radius: float, label: Callable[[float, float], str] | None = None
    ) -> None:
        for x, y in points:
            about = "" if label is None else f"<title>{escape(label(x, y))}</title>"
            at = f'cx="{self._pixel_x(x):.1f}" cy="{self._pixel_y(y):.1f}"'
            self._parts.append(f'<circle class="dot {style}" {at} r="{radius}">{about}</circle>')

    def mark(self, x: float, text: str, side: str) -> None:
        """Draw a vertical line with a label, to its left (``end``) or to its right (``start``)."""
        at = self._pixel_x(x)
        to = at - 4 if side == "end" else at + 4
        self._parts.append(f'<line class="mark" x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{self._baseline}"/>')
        self._parts.append(_text("note", to, TOP + 10, text, side))

    def label(self, x: float, y: float, text: str, up: float = 12) -> None:
        """Draw a label above a point."""
        at = min(max(self._pixel_x(x), LEFT + 30), self.width - RIGHT - 30)
        self._parts.append(_text("value", at, max(TOP + 4.0, self._pixel_y(y) - up), text))

    def ticks_of_failures(self, places: Sequence[float]) -> None:
        """Draw a tick at the bottom for each failure."""
        for place in places:
            at = self._pixel_x(place)
            self._parts.append(
                f'<line class="failure" x1="{at:.1f}" x2="{at:.1f}" y1="{self._baseline}" y2="{self._baseline - 10}"/>'
            )

    def draw(self) -> str:
        """Render the SVG, axes first."""
        head = f'<svg viewBox="0 0 {self.width} {self.height}" role="img" aria-label="{escape(self.name)}">'
        return "".join([head, *self._axes(), *self._parts, "</svg>"])

    @property
    def _baseline(self) -> int:
        return self.height - BOTTOM

    def _axes(self) -> list[str]:
        parts, right = [], self.width - RIGHT
        for value, text in self.y.ticks:
            at = self._pixel_y(value)
            parts.append(f'<line class="grid" x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}"/>')
            parts.append(_text("tick", LEFT - 8, at + 4, text, "end"))
        for value, text in self.x.ticks:
            at = self._pixel_x(value)
            parts.append(
                f'<line class="stub" x1="{at:.1f}" x2="{at:.1f}" y1="{self._baseline}" y2="{self._baseline + 4}"/>'
            )
            parts.append(_text("tick", at, self._baseline + 18, text))
        parts.append(f'<line class="axis" x1="{LEFT}" x2="{right}" y1="{self._baseline}" y2="{self._baseline}"/>')
        parts.append(_text("title", (LEFT + right) / 2, self.height - 6, self.x.title))
        turned = f'transform="translate(13 {(TOP + self._baseline) / 2:.0f}) rotate(-90)"'
        parts.append(f'<text class="title" {turned} text-anchor="middle">{escape(self.y.title)}</text>')
        return parts

    def _path(self, points: Points) -> str:
        places = (f"{self._pixel_x(x):.1f},{self._pixel_y(y):.1f}" for x, y in points)
        return "M" + "L".join(places) if points else ""

    def _pixel_x(self, value: float) -> float:
        return LEFT + min(1.0, max(0.0, self.x.position(value))) * (self.width - LEFT - RIGHT)

    def _pixel_y(self, value: float) -> float:
        return self._baseline - min(1.0, max(0.0, self.y.position(value))) * (self._baseline - TOP)


def _text(style: str, x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def time_axis(title: str, values: Sequence[float]) -> Axis:
    """Return a logarithmic axis of milliseconds for these values, except invisibly small ones."""
    positive = sorted(value for value in values if value > 0.005)
    if not positive:
        return log_axis(title, 0.01, 1.0, tick_time)
    return log_axis(title, positive[0], positive[-1], tick_time)


def tick_time(ms: float) -> str:
    """Format a time without zeros after the point: 1 ms, 0.5 ms, 20 s."""
    if ms >= 1000:
        return f"{ms / 1000:g} s"
    return f"{ms:g} ms" if ms >= 0.1 else f"{ms * 1000:g} µs"


def describe_time_point(x: float, y: float) -> str:
    return f"{x:.2f} s: {format_time(y)}"
