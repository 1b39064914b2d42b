"""What the broker's doors make of what comes in, before the core hears of it."""

from __future__ import annotations

from swarm.broker.message_server import add_clock_offset
from swarm.wire.messages import Stats


def test_a_worker_s_clock_is_told_by_ours() -> None:
    """The core has no clock of the world: it is told by how much the worker's is ahead of the broker's."""
    said = Stats(incarnation="w0.1", values={"steps": 3.0, "clock_s": 1_000_002.5})
    assert add_clock_offset(said, 1_000_000.0).values == {"steps": 3.0, "clock_ahead_s": 2.5}


def test_who_tells_no_clock_is_taken_as_it_is() -> None:
    said = Stats(incarnation="w0.1", values={"steps": 3.0})
    assert add_clock_offset(said, 1_000_000.0) is said
