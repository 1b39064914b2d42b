"""A worker's process, as the broker knows it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from swarm.wire.messages import Hello, LayerRange

# When a worker that refused layers is asked for them again: a full disk or memory may be free by then, and if the cause
# lasts, asking costs the others a plan that comes to nothing.
RETRY_MIN_S = 30.0
RETRY_MAX_S = 600.0

LOAD_BYTES_PER_S = 5e8  # how quickly weights are read and warmed, until it was seen


class WorkerState(enum.Enum):
    MEMBER = "member"  # may be planned with
    REFUSED = "refused"  # it said that it can't carry out the last plan it was asked to; its reason is kept
    LEAVING = "leaving"  # to be released as soon as the plan can do without it
    LEFT = "left"  # released in good order
    OUT = "out"  # dead, frozen, hung or gone: fenced; it must say Hello again


@dataclass(slots=True, eq=False)
class Worker:
    """A worker's process, as the broker knows it."""

    hello: Hello
    peer: bytes
    joined_at: float
    state: WorkerState = WorkerState.MEMBER
    refusals: list[LayerRange] = field(default_factory=list)  # what it is not asked to load until ``retry_at``
    retry_at: float = 0.0
    num_retries: int = 0
    wants_to_leave: bool = False  # it said so: when its connection closes, that is no loss
    called_at: float | None = None  # when it was last told to say Hello again, or to go
    num_lies: int = 0  # how often what this process sent was proven wrong; nothing that it holds is used again
    num_confirmed: int = 0  # how often another worker came to the same
    disagreed_with: dict[str, int] = field(default_factory=dict)  # by name: how often one of the two was wrong
    call_after: float = 0.0  # when it may be asked to join anew, if the swarm can do without it
    reason: str = ""
    loaded_bytes: int = 0
    total_bytes: int = 0
    pace: float = 1.0  # how many times longer its steps take than it measured at join, as far as that was seen
    planned: LayerRange | None = None  # what the last plan that served gave it
    # Of what it holds since before its Hello: sequence -> positions that count. None: it holds what it was told to.
    believed: dict[int, int] | None = None
    kept: tuple[LayerRange, ...] = ()  # what it said is warm there beside that
    asked_to_keep: tuple[LayerRange, ...] | None = None  # since the plan in force began
    load_bytes_per_s: float = LOAD_BYTES_PER_S  # as it was last seen
    stats: dict[str, float] = field(default_factory=dict)

    @property
    def incarnation(self) -> str:
        return self.hello.incarnation

    @property
    def name(self) -> str:
        return self.hello.name

    @property
    def layers(self) -> LayerRange | None:
        """What it has loaded, as far as is known."""
        return self.planned if self.planned is not None else self.hello.held_layers

    @property
    def is_gone(self) -> bool:
        """Nothing is planned with it, and nothing it says counts."""
        return self.state in (WorkerState.LEFT, WorkerState.OUT)

    def hold(self, kept: tuple[LayerRange, ...], believed: dict[int, int] | None) -> None:
        """Note what it has beside its layers: warm ones, and what counts of the sequences that it held before."""
        self.kept, self.believed = kept, believed

    def be_called(self, now: float) -> None:
        """It was told to join anew, or how things stand."""
        self.called_at = now

    def start_leaving(self) -> None:
        """It serves until a plan does without it."""
        self.state = WorkerState.LEAVING

    def leave(self, reason: str) -> None:
        """It is gone in good order."""
        self.state, self.reason = WorkerState.LEFT, reason

    def fall_out(self, reason: str) -> None:
        """It is gone, and nobody asked it to."""
        self.state, self.reason = WorkerState.OUT, reason

    def refuse(self, layers: LayerRange, reason: str, now: float) -> None:
        """It can't load these layers; it will be asked again, the later the more often that was in vain."""
        if not self.refusals:
            self.num_retries += 1
        self.retry_at = now + min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (self.num_retries - 1))
        self.refusals.append(layers)
        self.state = WorkerState.REFUSED
        self.reason = reason

    def refuses(self, layers: LayerRange) -> bool:
        """It said that it can't load these layers, or some of them; or other ones, no more than these are."""
        return any((layers.first <= r.first and r.stop <= layers.stop) or len(r) <= len(layers) for r in self.refusals)

    def forget_refusals(self) -> None:
        self.refusals.clear()
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER

    def comply(self) -> None:
        """It can load what it was asked to."""
        if not self.refusals:
            self.num_retries = 0
        if self.state is WorkerState.REFUSED:
            self.state = WorkerState.MEMBER
