"""Stages whose rules are checked after every event, and once more at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.unit.stage.bench import StageBench


@pytest.fixture
def make_stage() -> Iterator[Callable[..., StageBench]]:
    made: list[StageBench] = []

    def make(first: int = 0, stop: int = 3, **fields: object) -> StageBench:
        made.append(StageBench(first, stop, **fields))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for bench in made:
        bench.check()


@pytest.fixture
def stage(make_stage: Callable[..., StageBench]) -> StageBench:
    """The first stage of two, active in epoch 1."""
    bench = make_stage()
    bench.activate()
    return bench


@pytest.fixture
def last(make_stage: Callable[..., StageBench]) -> StageBench:
    """The last stage of two, active in epoch 1."""
    bench = make_stage(3, 6)
    bench.activate()
    return bench
