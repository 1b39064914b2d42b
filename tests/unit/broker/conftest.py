"""A bench whose rules are checked after every event, and once more at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from swarm.broker.core import BrokerSettings
from tests.unit.broker.bench import Bench, check_state, settings


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Benches with these settings; their state is checked at the end."""
    made: list[Bench] = []

    def make(of: BrokerSettings | None = None) -> Bench:
        made.append(Bench(of or settings()))
        return made[-1]

    yield make
    for bench in made:
        check_state(bench.state, bench.settings)


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """An empty swarm."""
    return make_bench()


@pytest.fixture
def serving(make_bench: Callable[..., Bench]) -> Bench:
    """Two workers, three layers each, serving."""
    return make_bench().serve(2)
