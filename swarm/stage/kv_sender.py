"""Sending copies of the stage's keys and values to other workers, a few blocks at a time.

The broker names the targets (``SendKv``). Whenever the shell offers a turn (``KvTurn``), the sender picks one sequence
for one target, and sends the next positions in all layers of that target.

* *Which.* First the targets whose positions a change of plan awaits (``until``), then urgent ones, then all others.
  Among equals, the sequence whose last turn is longest ago.
* *How much.* Finished blocks only, as many as can be read within a millisecond or so, by the time that earlier parts
  took. For ``until``, everything up to the exact position, which may be within a block. A part begins at the block in
  which the last one ended.
* *When.* While no step waits, always. Otherwise within a budget: at most 2 % of the passing time, for urgent targets at
  most half of it. Between two parts that no change of plan waits for, there is a pause, too. What ``until`` names is
  sent at once, since no steps are computed meanwhile.
* *Nothing waits.* A target whose connection accepts nothing is left out. A part that could not be sent is picked again
  later.

What was sent to whom is recorded in the sequence itself: it ends with the sequence, and a truncation cuts it. Lost
parts are found by the receiver, which lacks what comes before the next ones; the broker then repeats its order with the
positions that are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf

from swarm.stage.actions import Action, ConnectKvTargets, SendKvPart
from swarm.stage.events import KvPartTaken, KvTurn
from swarm.stage.kv_copies import describe_sequence
from swarm.stage.sequences import CopyTarget, SentPositions, SequenceStore, StoredSequence
from swarm.wire.messages import BLOCK, NO_LINEAGE, Edge, KvTarget, LayerRange, Lineage, Open, Row, SendKv
from swarm.wire.transport.keys import address_and_key, public_key_in

SHARE = 0.02  # of the passing time that may be spent on copies while steps wait
URGENT_SHARE = 0.5  # the same while a change of plan waits for them
SAVED_S = 0.02  # of that time, the most that is saved up for later
PART_S = 0.001  # time for reading one part: a step waits for at most one
URGENT_PART_S = 0.004
MAX_BLOCKS = 16  # of one part
# Between two parts that no change of plan waits for. Sending, receiving and storing a part costs as much as a few
# tokens of a small model, however many blocks it has: with many fast sequences, each part has several.
PAUSE_S = 0.04
FAILED_PAUSE_S = 0.5  # for which a target is left alone after a part that could not be sent


@dataclass(slots=True)
class TimeBudget:
    """Time that may be spent: a share of the passing time."""

    share: float
    left_s: float = 0.0
    filled_at: float = 0.0

    def refill(self, now: float) -> bool:
        """Add the share of the time that has passed. Return whether there is time to spend."""
        self.left_s = min(SAVED_S, self.left_s + self.share * max(0.0, now - self.filled_at))
        self.filled_at = now
        return self.left_s > 0.0

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds


@dataclass(slots=True)
class _Target:
    """A worker to which copies are sent, and their layers."""

    order: KvTarget
    until: dict[int, int]  # exact positions by sequence; empty: every finished block
    paused_until: float = 0.0

    @property
    def key(self) -> CopyTarget:
        return self.order.to.to, self.order.layers

    @property
    def rank(self) -> int:
        return 0 if self.until else 1 if self.order.is_urgent else 2

    def goal(self, sequence: int, stored: StoredSequence) -> int:
        """Return the position up to which the sequence can be sent now."""
        level = stored.position()
        held = stored.min_position(self.order.layers) if level is None else level
        return min(held, self.until.get(sequence, 0)) if self.until else held // BLOCK * BLOCK


@dataclass(frozen=True, slots=True)
class _Part:
    """A part that may be sent next."""

    target: _Target
    sequence: int
    stored: StoredSequence
    start: int  # a multiple of BLOCK
    goal: int  # position up to which the sequence could be sent
    sent: SentPositions

    @property
    def order(self) -> tuple[int, int]:
        """Return the place in the order of sending; the smallest goes first."""
        return self.target.rank, self.sent.turn


@dataclass(frozen=True, slots=True)
class _PartUnderWay:
    """The part that the shell is sending."""

    target: _Target
    sent: SentPositions
    before: int  # position sent before it
    num_layer_positions: int
    is_idle: bool  # no step waited


@dataclass(slots=True)
class KvSender:
    """Sender of copies; the rules are in the module's docstring."""

    store: SequenceStore
    count: Callable[[str, float], None]
    epoch: int = 0
    lineage: Lineage = NO_LINEAGE
    targets: dict[CopyTarget, _Target] = field(default_factory=dict)
    # sequences of which something may remain to be sent, as keys; all others have been sent as far as they can be
    unsent: dict[int, None] = field(default_factory=dict)
    _under_way: _PartUnderWay | None = None
    _num_turns: int = 0
    _next_at: float = -inf  # when the next part may be sent that no change of plan waits for
    _position_s: float = 0.0  # time for reading one position of one layer; 0: unknown
    _budgets: dict[int, TimeBudget] = field(
        default_factory=lambda: {1: TimeBudget(URGENT_SHARE), 2: TimeBudget(SHARE)}
    )  # by rank of the target

    # --- orders ------------------------------------------------------------------------------------------------------

    def follow(self, order: SendKv, layers: LayerRange) -> list[Action]:
        """Send to the targets of this order from now on. ``layers``: those of the stage."""
        self.epoch, self.lineage = order.epoch, order.lineage
        targets: dict[CopyTarget, _Target] = {}
        for wanted in order.targets:
            if not layers.first <= wanted.layers.first < wanted.layers.stop <= layers.stop:
                self.count("kv_impossible_targets", 1)
                continue
            target = _Target(wanted, {item.sequence: item.position for item in wanted.until})
            targets[target.key] = target
            self._start_target(target)
        return self._replace_targets(targets)

    def _start_target(self, target: _Target) -> None:
        """Set the positions that count as sent: those that the target holds. An order for exact positions continues the
        order before it, except with the sequences whose held positions it names."""
        held = {item.sequence: item.position for item in target.order.held}
        continues = bool(target.until) and target.key in self.targets
        for sequence, stored in self.store.sequences.items():
            if not continues or sequence in held:
                stored.sent[target.key] = SentPositions(held.get(sequence, 0))

    def stop(self) -> list[Action]:
        """Send nothing more: the plan is not in force any more."""
        return self._replace_targets({})

    def block_key(self, key: str) -> list[Action]:
        """Send nothing more to a listener with this key."""
        return self._replace_targets({k: t for k, t in self.targets.items() if _listener_key(t.order.to) != key})

    def _replace_targets(self, targets: dict[CopyTarget, _Target]) -> list[Action]:
        before, self.targets = self.targets, targets
        self.unsent = dict.fromkeys(self.store.sequences if targets else ())
        for gone in before.keys() - targets.keys():
            for stored in self.store.sequences.values():
                stored.sent.pop(gone, None)
        edges = _edges(targets)
        return [] if edges == _edges(before) else [ConnectKvTargets(edges)]

    # --- turns -------------------------------------------------------------------------------------------------------

    def add_opened(self, items: Iterable[Open]) -> None:
        """Record that these sequences were opened, perhaps with the beginning of another one."""
        if self.targets:
            self.unsent |= dict.fromkeys(item.sequence for item in items)

    def add_positions(self, rows: Iterable[Row]) -> None:
        """Record that these rows were computed."""
        if self.targets:
            is_exact = any(target.until for target in self.targets.values())
            for row in rows:
                if is_exact or (row.start + row.count) // BLOCK > row.start // BLOCK:
                    self.unsent[row.sequence] = None

    def has_part(self, turn: KvTurn, now: float) -> bool:
        """Return whether this turn would be used."""
        return self._find_part(turn, now) is not None

    def take_turn(self, turn: KvTurn, now: float) -> list[Action]:
        """Send the next part, if there is one and time for it."""
        part = self._find_part(turn, now)
        if part is None:
            return []
        target, layers = part.target, part.target.order.layers
        stop = min(part.goal, part.start + self._num_blocks(target) * BLOCK)
        self._num_turns += 1
        self._under_way = _PartUnderWay(
            target, part.sent, part.sent.position, (stop - part.start) * len(layers), turn.is_idle
        )
        part.sent.position, part.sent.turn = stop, self._num_turns
        if target.rank == 2:
            self._next_at = now + PAUSE_S
        return [
            SendKvPart(
                target.order.to,
                self.epoch,
                self.lineage,
                part.sequence,
                layers,
                part.start,
                tuple(part.stored.history[part.start : stop]),
                describe_sequence(part.stored.open) if part.start == 0 else None,
            )
        ]

    def on_taken(self, event: KvPartTaken, now: float) -> None:
        """Record what became of the part that was sent last."""
        part, self._under_way = self._under_way, None
        if part is None or part.target.order.to.to != event.to:
            return
        if not part.is_idle and part.target.rank in self._budgets:
            self._budgets[part.target.rank].spend(event.took_s)
        if not event.num_bytes:
            part.sent.position = min(part.sent.position, part.before)
            part.target.paused_until = now + FAILED_PAUSE_S
            self.count("kv_parts_not_sent", 1)
            return
        position_s = event.took_s / part.num_layer_positions
        self._position_s = position_s if not self._position_s else 0.8 * self._position_s + 0.2 * position_s
        self.count("kv_parts_sent", 1)
        self.count("kv_bytes_sent", event.num_bytes)
        self.count("kv_sent_s", event.took_s)

    def _find_part(self, turn: KvTurn, now: float) -> _Part | None:
        if not self.unsent or self._under_way is not None:
            return None
        ready = self._ready_targets(turn, now)
        best: _Part | None = None
        for sequence in list(self.unsent) if ready else ():
            parts = self._parts(sequence)
            if not parts:
                del self.unsent[sequence]
            for part in parts:
                if part.target.key in ready and (best is None or part.order < best.order):
                    best = part
        return best

    def _ready_targets(self, turn: KvTurn, now: float) -> set[CopyTarget]:
        """Return the targets to which something can be sent in this turn."""
        allowed = {rank: turn.is_idle or budget.refill(now) for rank, budget in self._budgets.items()}
        allowed[2] = allowed[2] and now >= self._next_at
        return {
            key
            for key, target in self.targets.items()
            if key[0] not in turn.blocked and now >= target.paused_until and allowed.get(target.rank, True)
        }

    def _parts(self, sequence: int) -> list[_Part]:
        """Return what remains to be sent of a sequence, by target."""
        stored = self.store.sequences.get(sequence)
        parts: list[_Part] = []
        for target in self.targets.values() if stored is not None and not stored.is_retired else ():
            assert stored is not None
            sent = stored.sent.setdefault(target.key, SentPositions())
            goal = target.goal(sequence, stored)
            if goal > sent.position:
                parts.append(_Part(target, sequence, stored, sent.position // BLOCK * BLOCK, goal, sent))
        return parts

    def _num_blocks(self, target: _Target) -> int:
        block_s = self._position_s * BLOCK * len(target.order.layers)
        if not block_s:
            return 1
        return max(1, min(MAX_BLOCKS, int((PART_S if target.rank == 2 else URGENT_PART_S) / block_s)))


def _edges(targets: Mapping[CopyTarget, _Target]) -> tuple[Edge, ...]:
    """Return the listeners of these targets, each once."""
    return tuple(dict.fromkeys(target.order.to for target in targets.values()))


def _listener_key(edge: Edge) -> str | None:
    return public_key_in(address_and_key(edge.endpoint)[1])
