"""Figures about a stage's work. Only the compute thread writes them; readers in other threads may be a step behind.

Times are reported in microseconds, sizes in their own units. The names are flat, with dots where reports have levels
(``microseconds.compute.last``).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from swarm.series import Profiled, Series
from swarm.stage.executor import Forwarded
from swarm.wire.messages import Hop, Step


@dataclass(slots=True)
class StageStatistics(Profiled):
    """Times and sizes of a stage's steps, each as a series."""

    SIZES: ClassVar = ("rows", "positions", "queue_depth", "bytes_in", "bytes_out")
    TIMES: ClassVar = (
        "total",
        "wait",
        "idle",
        "bridge_in",
        "bridge_out",
        "copy",
        "compute",
        "head",
        "sample",
    )

    rows: Series = field(default_factory=Series)
    positions: Series = field(default_factory=Series)
    queue_depth: Series = field(default_factory=Series)  # steps waiting when one begins
    bytes_in: Series = field(default_factory=Series)
    bytes_out: Series = field(default_factory=Series)
    total: Series = field(default_factory=Series)  # from a step's arrival to handing it on
    wait: Series = field(default_factory=Series)
    idle: Series = field(default_factory=Series)
    bridge_in: Series = field(default_factory=Series)  # decoding and checking a message
    bridge_out: Series = field(default_factory=Series)  # encoding a message and handing it to the socket
    copy: Series = field(default_factory=Series)  # bringing the output to the host; part of ``compute``
    compute: Series = field(default_factory=Series)
    head: Series = field(default_factory=Series)  # norm and head, on the last stage; part of ``compute``
    sample: Series = field(default_factory=Series)

    def computed(self, step: Step, forwarded: Forwarded, hop: Hop, num_waiting: int) -> None:
        """Record a step with rows, after it was sent on."""
        self.calls += 1
        self.overlapped_calls += not step.alone  # calls while other steps were in flight
        self.rows.add(len(step.rows))
        self.positions.add(len(step.tokens))
        self.queue_depth.add(num_waiting)
        self.bytes_in.add(hop.wire_bytes)
        self.total.add(hop.held_s)
        self.wait.add(hop.wait_s)
        self.idle.add(hop.idle_s)
        self.compute.add(hop.compute_s)
        if forwarded.hidden is not None:
            self.copy.add(forwarded.copy_s)
        else:
            self.head.add(forwarded.head_s)
            self.sample.add(hop.sample_s)

    def received(self, seconds: float) -> None:
        """Record the time for decoding and checking a message."""
        self.bridge_in.add(seconds)

    def sent(self, seconds: float, num_bytes: int) -> None:
        """Record the time for encoding and sending a message, and its size."""
        self.bridge_out.add(seconds)
        self.bytes_out.add(num_bytes)

    def values(self) -> dict[str, float]:
        """Return the figures by flat name, for the broker and ``swarmctl stats``."""
        found: dict[str, float] = {"calls": self.calls, "overlapped_calls": self.overlapped_calls}
        for name in self.SIZES:
            found |= _flat(f"sizes.{name}", self.series(name).sizes())
        for name in self.TIMES:
            found |= _flat(f"microseconds.{name}", self.series(name).microseconds())
        return found


def _flat(prefix: str, values: dict[str, float]) -> dict[str, float]:
    return {f"{prefix}.{name}": value for name, value in values.items()}
