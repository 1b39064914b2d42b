"""Sending copies of the stage's keys and values to other workers, a few blocks at a time.

The broker names the targets (``SendKv``). Whenever the shell offers a turn (``KvTurn``), the sender picks one target,
and sends the next positions of one or several sequences in all layers of that target.

* *Which.* First the targets whose positions a change of plan awaits (``until``), then urgent ones, then all others.
  Among equals, the target and the sequences whose last turn is longest ago.
* *How much.* Finished blocks only, as many as can be read within a few milliseconds (within one, while a step waits),
  by the time that earlier parts took. For ``until``, everything up to the exact position, which may be within a block.
  A part begins at the block in which the last one ended.
* *When.* Within a budget: at most 2 % of the passing time while steps wait, a quarter of it in idle time; for urgent
  targets half of it and all idle time. What ``until`` names is sent at once, since no steps are computed meanwhile.
* *With states.* Where layers keep states, a part ends where all of its layers hold one: at every multiple of the
  stride, and at the sequence's end. Beyond loopback, only the multiples are sent unless a change of plan waits: states
  are large.
* *In rounds.* A target that has everything rests for a while. Then the new blocks of all sequences go together: for
  small models, sending, receiving and storing cost far more per round than per block. A target that lags behind gets
  part after part.
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

from swarm.stage.actions import Action, ConnectKvTargets, SendKvPart, SendKvParts
from swarm.stage.events import KvPartsTaken, KvTurn
from swarm.stage.kv_copies import describe_sequence
from swarm.stage.sequences import CopyTarget, SentPositions, SequenceStore, StoredSequence
from swarm.wire.messages import (
    BLOCK,
    NO_LINEAGE,
    Edge,
    KvTarget,
    LayerRange,
    Lineage,
    Open,
    Row,
    SendKv,
    num_blocks,
)
from swarm.wire.transport.keys import address_and_key, is_elsewhere, public_key_in

SHARE = 0.02  # of the passing time that may be spent on copies while steps wait
URGENT_SHARE = 0.5  # the same while a change of plan waits for them
IDLE_SHARE = 0.25  # the same in idle time: other stages may compute on the same cores
SAVED_S = 0.02  # of that time, the most that is saved up for later
PART_S = 0.001  # time for reading the parts of one turn: a step waits for at most that
LONG_PART_S = 0.004  # the same in idle time, and for urgent targets
MAX_BLOCKS = 64  # of one turn
MAX_PARTS = 32  # sequences of one turn
# A target without a change of plan rests once it has everything: so long that the last parts took this share of the
# time. Receiving costs as much again, and all of it is slower than in a row, since caches have forgotten it.
ROUND_SHARE = 0.003
PAUSE_S = 0.1  # shortest rest
MAX_PAUSE_S = 0.4
FAILED_PAUSE_S = 0.5  # for which a target is left alone after parts that could not be sent


@dataclass(slots=True)
class TimeBudget:
    """Time that may be spent: a share of the passing time."""

    share: float
    left_s: float = 0.0
    filled_at: float = 0.0

    def refill(self, now: float) -> None:
        """Add the share of the time that has passed."""
        self.left_s = min(SAVED_S, self.left_s + self.share * max(0.0, now - self.filled_at))
        self.filled_at = now

    def spend(self, seconds: float) -> None:
        self.left_s -= seconds


@dataclass(slots=True)
class _Target:
    """A worker to which copies are sent, and their layers."""

    order: KvTarget
    until: dict[int, int]  # exact positions by sequence; empty: every finished block
    paused_until: float = -inf
    turn: int = 0  # number of the last turn in which something was sent to it

    @property
    def key(self) -> CopyTarget:
        return self.order.to.to, self.order.layers

    @property
    def rank(self) -> int:
        return 0 if self.until else 1 if self.order.is_urgent else 2

    @property
    def place(self) -> tuple[int, int]:
        """Return the place in the order of sending; the smallest goes first."""
        return self.rank, self.turn

    def goal(self, sequence: int, stored: StoredSequence) -> int:
        """Return the position up to which the sequence can be sent now."""
        level = stored.position()
        held = stored.min_position(self.order.layers) if level is None else level
        if self.until:  # the broker names verified positions
            held = min(held, self.until.get(sequence, 0))
            return stored.floor(self.order.layers, held) if stored.stride else held
        held = stored.verified(held)
        if not stored.stride:
            return held // BLOCK * BLOCK
        is_far = is_elsewhere(self.order.to.endpoint) and not self.order.is_urgent
        unit = stored.stride if is_far else BLOCK
        sent = stored.sent.get(self.key, SentPositions()).position
        if held // unit <= sent // unit:
            return sent
        return held // unit * unit if is_far else stored.floor(self.order.layers, held)


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
    def num_blocks(self) -> int:
        return num_blocks(self.goal - self.start)

    def stops(self, num_blocks: int) -> list[int]:
        """Return where the pieces end that are sent of it in a turn with time for this number of blocks."""
        most = self.start + num_blocks * BLOCK
        if not (stride := self.stored.stride):
            return [min(self.goal, most)]
        ends = [*range((self.sent.position // stride + 1) * stride, self.goal, stride), self.goal]
        return [end for end in ends if end <= max(most, ends[0])]


@dataclass(frozen=True, slots=True)
class _PartsUnderWay:
    """The parts that the shell is sending."""

    target: _Target
    before: list[tuple[SentPositions, int]]  # positions sent before them
    num_layer_positions: int
    budget: TimeBudget | None  # that pays for them
    ends_round: bool  # the target has everything then


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
    _under_way: _PartsUnderWay | None = None
    _num_turns: int = 0
    _position_s: float = 0.0  # time for reading one position of one layer; 0: unknown
    _budgets: dict[int, TimeBudget] = field(
        default_factory=lambda: {1: TimeBudget(URGENT_SHARE), 2: TimeBudget(SHARE)}
    )  # by rank of the target, while steps wait
    _idle_budget: TimeBudget = field(default_factory=lambda: TimeBudget(IDLE_SHARE))  # for rank 2

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

    @property
    def next_turn_at(self) -> float:
        """Return the earliest time at which a turn may be used: while all targets rest, none is worth asking for."""
        return min((target.paused_until for target in self.targets.values()), default=inf) if self.unsent else inf

    def has_part(self, turn: KvTurn, now: float) -> bool:
        """Return whether this turn would be used."""
        return bool(self._find_parts(turn, now))

    def take_turn(self, turn: KvTurn, now: float) -> list[Action]:
        """Send the next parts, if there are any and time for them."""
        waiting = self._find_parts(turn, now)
        if not waiting:
            return []
        target = waiting[0].target
        self._num_turns += 1
        target.turn = self._num_turns
        blocks_left, num_positions = self._max_blocks(target, turn), 0
        before: list[tuple[SentPositions, int]] = []
        actions: list[SendKvPart] = []
        for part in sorted(waiting, key=lambda part: part.sent.turn)[:MAX_PARTS]:
            before.append((part.sent, part.sent.position))
            start = part.start
            for stop in part.stops(blocks_left):
                actions.append(self._send(part, start, stop))
                num_positions += stop - start
                start = stop // BLOCK * BLOCK
            part.sent.position, part.sent.turn = stop, self._num_turns
            blocks_left -= min(blocks_left, part.num_blocks)
            if not blocks_left:
                break
        self._under_way = _PartsUnderWay(
            target,
            before,
            num_positions * len(target.order.layers),
            self._budget_of(target, turn),
            ends_round=target.rank == 2 and all(part.sent.position >= part.goal for part in waiting),
        )
        return [SendKvParts(tuple(actions))]

    def _send(self, part: _Part, start: int, stop: int) -> SendKvPart:
        order = part.target.order
        item = describe_sequence(part.stored.open) if start == 0 else None
        tokens = tuple(part.stored.history[start:stop])
        return SendKvPart(order.to, self.epoch, self.lineage, part.sequence, order.layers, start, tokens, item)

    def on_taken(self, event: KvPartsTaken, now: float) -> None:
        """Record what became of the parts that were sent last."""
        parts, self._under_way = self._under_way, None
        if parts is None or parts.target.order.to.to != event.to:
            return
        if parts.budget is not None:
            parts.budget.spend(event.took_s)
        if not event.num_bytes:
            for sent, position in parts.before:
                sent.position = min(sent.position, position)
            parts.target.paused_until = now + FAILED_PAUSE_S
            self.count("kv_parts_not_sent", len(parts.before))
            return
        if parts.ends_round:
            parts.target.paused_until = now + max(PAUSE_S, min(MAX_PAUSE_S, event.took_s / ROUND_SHARE))
        position_s = event.took_s / parts.num_layer_positions
        self._position_s = position_s if not self._position_s else 0.8 * self._position_s + 0.2 * position_s
        self.count("kv_parts_sent", len(parts.before))
        self.count("kv_bytes_sent", event.num_bytes)
        self.count("kv_sent_s", event.took_s)

    def _find_parts(self, turn: KvTurn, now: float) -> list[_Part]:
        """Return everything that can be sent to the target whose turn it is."""
        if not self.unsent or self._under_way is not None:
            return []
        ready = self._ready_targets(turn, now)
        waiting: dict[CopyTarget, list[_Part]] = {}
        for sequence in list(self.unsent) if ready else ():
            parts = self._parts(sequence)
            if not parts:
                del self.unsent[sequence]
            for part in parts:
                if part.target.key in ready:
                    waiting.setdefault(part.target.key, []).append(part)
        return min(waiting.values(), key=lambda parts: parts[0].target.place, default=[])

    def _ready_targets(self, turn: KvTurn, now: float) -> set[CopyTarget]:
        """Return the targets to which something can be sent in this turn."""
        for each in (*self._budgets.values(), self._idle_budget):
            each.refill(now)
        return {
            key
            for key, target in self.targets.items()
            if key[0] not in turn.blocked and now >= target.paused_until and self._has_time(target, turn)
        }

    def _has_time(self, target: _Target, turn: KvTurn) -> bool:
        budget = self._budget_of(target, turn)
        return budget is None or budget.left_s > 0.0

    def _budget_of(self, target: _Target, turn: KvTurn) -> TimeBudget | None:
        """Return the budget that pays for parts in this turn; None: they need none."""
        if turn.is_idle:
            return self._idle_budget if target.rank == 2 else None
        return self._budgets.get(target.rank)

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

    def _max_blocks(self, target: _Target, turn: KvTurn) -> int:
        """Return how many blocks can be read in this turn."""
        block_s = self._position_s * BLOCK * len(target.order.layers)
        if not block_s:
            return 1
        part_s = PART_S if target.rank == 2 and not turn.is_idle else LONG_PART_S
        return max(1, min(MAX_BLOCKS, int(part_s / block_s)))


def _edges(targets: Mapping[CopyTarget, _Target]) -> tuple[Edge, ...]:
    """Return the listeners of these targets, each once."""
    return tuple(dict.fromkeys(target.order.to for target in targets.values()))


def _listener_key(edge: Edge) -> str | None:
    return public_key_in(address_and_key(edge.endpoint)[1])
