"""Mutants of swarm/metrics."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="numbers-unit-wrong",
        breaks="A metric in seconds reports microseconds as milliseconds.",
        target="swarm.metrics.catalogue:_seconds",
        old='return _stage_figure(f"stage_{name}_seconds", text, f"microseconds.{path}.total", 1e-6, is_counter=True)',
        new='return _stage_figure(f"stage_{name}_seconds", text, f"microseconds.{path}.total", 1e-3, is_counter=True)',
        caught_by="tests/unit/metrics/test_families.py::test_a_figures_scale_is_its_places_unit",
    ),
    Mutant(
        name="numbers-buckets-hold-their-own",
        breaks="Histogram buckets are not cumulative.",
        target="swarm.metrics.collectors:build_histogram",
        old="metric.add_metric(where, list(zip(ends, accumulate(counts), strict=True)), total)",
        new="metric.add_metric(where, list(zip(ends, counts, strict=True)), total)",
        caught_by="tests/unit/metrics/test_families.py::test_a_bucket_holds_all_below_it",
    ),
    Mutant(
        name="numbers-gaps-from-the-beginning",
        breaks="The time between tokens is measured from the first token.",
        target="swarm.metrics.http:RequestTimer.on_tokens",
        old="self._last = now",
        new="",
        caught_by="tests/unit/metrics/test_http.py::test_a_request_is_counted_from_its_beginning_to_its_end",
    ),
)
