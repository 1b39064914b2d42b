"""Copies of keys and values for a change of plan: which layers change hands, and how far the copies are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from swarm.wire.messages import HeldSequence, LayerRange


@dataclass(frozen=True, slots=True)
class LayerMove:
    """Layers that change hands, from the worker that holds them under the active plan (``source``) to the one that
    holds them under the next plan. Workers are named by incarnation."""

    source: str
    target: str
    layers: LayerRange


@dataclass(slots=True)
class MigrationState:
    """Progress of the copies for a change of plan; without ``moves`` there is nothing to copy."""

    epoch: int = 0  # of the active plan, under which the copies are made
    moves: tuple[LayerMove, ...] = ()
    can_pause: bool = False  # the change waits for the steps in flight to end
    began_at: float = 0.0
    deadline: float = 0.0  # time from which on the change waits no longer for copies
    # by receiver: what it reported last, and how many positions each sequence was behind at that time
    held: dict[str, tuple[HeldSequence, ...]] = field(default_factory=dict)
    behind: dict[str, dict[int, int]] = field(default_factory=dict)
    progressed_at: dict[str, float] = field(default_factory=dict)  # by receiver: when its copies last grew
    drain_until: float = 0.0  # how long to wait for the steps in flight, once nothing is dispatched any more
    stopped_at: float = 0.0  # time at which dispatching stopped
    tail: dict[int, int] = field(default_factory=dict)  # sequence -> exact position that its copies must reach
    awaited: set[str] = field(default_factory=set)  # receivers whose copies have not reached it
    tail_until: float | None = None  # how long to wait for them; None: the steps in flight have not ended

    @property
    def targets(self) -> list[str]:
        """Receivers of copies, each once."""
        return list(dict.fromkeys(move.target for move in self.moves))

    @property
    def sources(self) -> list[str]:
        """Senders of copies, each once."""
        return list(dict.fromkeys(move.source for move in self.moves))

    def begin(self, epoch: int, moves: tuple[LayerMove, ...], now: float, *, can_pause: bool) -> None:
        """Start copying these layers. What receivers reported earlier is kept: they may hold copies already."""
        self.epoch, self.moves, self.began_at, self.can_pause = epoch, moves, now, can_pause
        self.behind = {}
        self.progressed_at = dict.fromkeys(self.targets, now)
        self.tail_until = None
        self.tail, self.awaited = {}, set()

    def drop_target(self, incarnation: str) -> None:
        """Copy nothing to this worker any more."""
        self.moves = tuple(move for move in self.moves if move.target != incarnation)
        self.awaited.discard(incarnation)

    def stop_dispatching(self, now: float, drain_until: float) -> None:
        """Note that no step is dispatched any more, and how long to wait for those in flight."""
        self.stopped_at, self.drain_until = now, drain_until

    def await_tail(self, tail: dict[int, int], until: float) -> None:
        """Wait until all receivers hold these exact positions."""
        self.tail, self.tail_until = tail, until
        self.awaited = set(self.targets) if tail else set()

    def end(self) -> None:
        """Stop copying."""
        self.moves, self.awaited, self.tail = (), set(), {}
        self.tail_until = None

    def shift_deadlines(self, pause_s: float) -> None:
        """Move the deadlines by a pause of the broker, during which no report was read."""
        self.began_at += pause_s
        self.deadline += pause_s
        self.drain_until += pause_s
        self.progressed_at = {who: since + pause_s for who, since in self.progressed_at.items()}
        if self.tail_until is not None:
            self.tail_until += pause_s

    def position(self, move: LayerMove, sequence: int) -> int:
        """Return the position up to which the receiver of these layers reported copies of a sequence."""
        held = next((each for each in self.held.get(move.target, ()) if each.sequence == sequence), None)
        return 0 if held is None else least_position(held, move.layers)


def least_position(held: HeldSequence, layers: LayerRange) -> int:
    """Return the position up to which all of these layers hold the sequence."""
    positions = {layer: part.position for part in held.kv for layer in range(part.layers.first, part.layers.stop)}
    return min((positions.get(layer, 0) for layer in range(layers.first, layers.stop)), default=0)


def positions_of(held: Iterable[HeldSequence], layers: LayerRange) -> dict[int, int]:
    """Return the position of each sequence that all of these layers hold."""
    return {each.sequence: position for each in held if (position := least_position(each, layers))}
