"""Mutants of swarm/numbers."""

from tests.mutants.mutant import Mutant

MUTANTS = (
    Mutant(
        name="numbers-unit-wrong",
        breaks="A metric in seconds reports microseconds as milliseconds.",
        target="swarm.numbers.catalogue:_seconds",
        old='return _stage(f"stage_{name}_seconds", text, f"microseconds.{path}.total", 1e-6, is_counter=True)',
        new='return _stage(f"stage_{name}_seconds", text, f"microseconds.{path}.total", 1e-3, is_counter=True)',
        caught_by="tests/unit/numbers/test_families.py::test_a_figures_scale_is_its_places_unit",
    ),
    Mutant(
        name="numbers-buckets-hold-their-own",
        breaks="Histogram buckets are not cumulative.",
        target="swarm.numbers.families:histogram_family",
        old="made.add_metric(where, list(zip(ends, accumulate(counts), strict=True)), total)",
        new="made.add_metric(where, list(zip(ends, counts, strict=True)), total)",
        caught_by="tests/unit/numbers/test_families.py::test_a_bucket_holds_all_below_it",
    ),
    Mutant(
        name="numbers-gaps-from-the-beginning",
        breaks="The time between tokens is measured from the first token.",
        target="swarm.numbers.http:Watch.token",
        old="self._last = now",
        new="",
        caught_by="tests/unit/numbers/test_http.py::test_a_request_is_counted_from_its_beginning_to_its_end",
    ),
)
