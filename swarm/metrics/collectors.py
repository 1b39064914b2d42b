"""Metrics from the broker's reports: an entry of the catalogue names the place of its values. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric

from swarm.wire.messages import Json


@dataclass(frozen=True, slots=True)
class ReportPath:
    """Place of values in a report."""

    path: str  # keys with dots between them; ``*`` stands for any key, or for any part of a key
    # values of the metric's labels; a ``*`` here takes what the star in ``path`` matched (the first for the first)
    labels: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One metric of the catalogue.

    A counter without a value has not been incremented yet: it is 0 if the object that it belongs to exists. Any other
    figure without a value is left out.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    text: str
    sources: tuple[ReportPath, ...]
    labels: tuple[str, ...] = ()
    scale: float = 1.0  # base units per unit of the report


LabelledValue = tuple[tuple[str, ...], object]  # the labels' values, and the value; None: missing


def build_metric(figure: MetricSpec, reports: Json) -> Metric | None:
    """Build a metric from the reports; return None if they have no values for it."""
    values = [entry for source in figure.sources for entry in _values_at(source, reports)]
    if not values:
        return None
    if figure.kind == "histogram":
        spread = [(labels, value) for labels, value in values if isinstance(value, Mapping)]
        return build_histogram(figure.name, figure.text, figure.labels, spread) if spread else None
    kind = CounterMetricFamily if figure.kind == "counter" else GaugeMetricFamily
    metric: CounterMetricFamily | GaugeMetricFamily = kind(figure.name, figure.text, labels=figure.labels)
    for labels, value in values:
        if isinstance(value, int | float):
            metric.add_metric(labels, value * figure.scale)
        elif figure.kind == "counter":
            metric.add_metric(labels, 0)
    return metric if metric.samples else None


def build_histogram(
    name: str, text: str, labels: Sequence[str], values: Iterable[tuple[Sequence[str], Mapping[str, object]]]
) -> HistogramMetricFamily:
    """Build a histogram from ``swarm.series.Histogram`` bodies. Prometheus needs cumulative buckets."""
    metric = HistogramMetricFamily(name, text, labels=labels)
    for where, body in values:
        bounds, counts, total = body["bounds"], body["counts"], body["total"]
        assert isinstance(bounds, Sequence)
        assert isinstance(counts, Sequence)
        assert isinstance(total, int | float)
        ends = [*(repr(float(bound)) for bound in bounds), "+Inf"]
        metric.add_metric(where, list(zip(ends, accumulate(counts), strict=True)), total)
    return metric


def _values_at(source: ReportPath, reports: Json) -> Iterator[LabelledValue]:
    for stars, value in _walk(source.path.split("."), reports):
        names = iter(stars)
        yield tuple(next(names) if label == "*" else label for label in source.labels), value


def _walk(path: Sequence[str], place: object) -> Iterator[tuple[tuple[str, ...], object]]:
    """Yield the values at a path, each with the texts that its stars matched. Only the last key may be missing."""
    if not path:
        yield (), place
        return
    if not isinstance(place, Mapping):
        return
    key, rest = path[0], path[1:]
    if "*" in key:
        before, after = key.split("*")
        for name, below in place.items():
            if len(name) > len(before) + len(after) and name.startswith(before) and name.endswith(after):
                star = name[len(before) : len(name) - len(after)]
                yield from (((star, *stars), value) for stars, value in _walk(rest, below))
    elif key in place or not rest:
        yield from _walk(rest, place.get(key))
