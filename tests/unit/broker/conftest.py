"""A bench whose rules are checked after every event, and once more at the end of the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from swarm.broker.core import CoreSettings
from swarm.broker.journal import writer
from swarm.broker.speculation.proposer import Proposer
from swarm.broker.state.journal_snapshot import JournalSnapshot
from tests.unit.broker.bench import Bench, check_state, settings
from tests.unit.broker.journal_thread import Disk, Thread


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Benches with these settings; their state is checked at the end."""
    made: list[Bench] = []

    def make(
        of: CoreSettings | None = None, past: JournalSnapshot | None = None, proposers: tuple[Proposer, ...] = ()
    ) -> Bench:
        made.append(Bench(of or settings(), past, proposers=proposers))
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


@pytest.fixture
def thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Thread]:
    """A journal's thread; its disk refuses nothing any more when it ends."""
    monkeypatch.setattr(writer, "RETRY_S", 0.01)
    found = Thread(Disk(tmp_path))
    yield found
    found.disk.gate.set()
    found.disk.full = False
    found.writer.close()
