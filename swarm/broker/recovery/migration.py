"""Migration: when a whole plan is replaced by another one, the keys and values of moved layers are copied.

::

    epoch journalled ── the plan's workers load; meanwhile finished blocks are copied ──► all loaded, copies are near
        ──► COPYING: nothing is dispatched ── steps in flight end ──► the rest is copied ── all receivers hold it
        ──► ``activation``

* Both orders name the epoch of the *active* plan: copies are made while it serves, and end with it. The receiver may be
  a worker without a part in it.
* Copies are *near* when every running sequence's copy was at most ``NEAR_POSITIONS`` behind when its receiver last
  reported. The change waits for that until a deadline by the measured rate; the active plan serves meanwhile.
* COPYING takes a few step times: the steps in flight end, so that none is computed twice, and each sequence is copied
  to its exact position.
* If layers move and none of them can be copied, there is no pause: their positions are computed again anyway.
* Nothing here is necessary. What is not copied by the deadlines is replayed, as after a loss (``rebuild``), and every
  event that ends the plan in preparation, or the active one, ends the copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.state import Plan, Sequence, State
from swarm.broker.state.migration import LayerMove, MigrationState
from swarm.broker.state.workers import RouteState
from swarm.wire.messages import (
    Edge,
    KvHeld,
    KvSource,
    KvTarget,
    LayerRange,
    Order,
    ReceiveKv,
    SendKv,
    SequencePosition,
)

NEAR_POSITIONS = 64  # positions of a sequence that may be left for COPYING
RATE_FACTOR = 3.0  # how much longer than by the measured rate the copies may take
GRACE_S = 5.0  # in addition
MAX_COPY_S = 120.0  # upper limit of the wait, however slow the connection is
STALLED_S = 3.0  # time without progress after which copies are ordered again, from the positions held by then
DRAIN_S = 2.0  # how long steps in flight may take to end, in addition to a multiple of the usual time
DRAIN_STEPS = 4.0  # that multiple
TAIL_S = 1.0  # how long copying the last positions may take while nothing is dispatched
MIN_RATE_S = 0.25  # a shorter time gives no estimate of the rate


@dataclass(slots=True)
class Migration:
    """Orders copies for a change of plan and tracks them. Owns ``state.migration``; appends orders to ``out``."""

    state: State
    out: Outbox
    bytes_per_s: float = 20e6  # measured rate of the last copies

    @property
    def _migration(self) -> MigrationState:
        return self.state.migration

    def begin(self, upcoming: Plan, now: float) -> None:
        """Order copies of all layers that change hands, while the workers of the next plan load."""
        current = self.state.plans.current
        assert current is not None
        moves = list(find_moves(current, upcoming))
        possible = tuple(move for move in moves if can_copy(self.state, move))
        self._migration.begin(current.epoch, possible, now, can_pause=bool(possible) or not moves)
        self._update_deadline(now)
        for incarnation in self._migration.targets:
            self._order_receiver(incarnation)
        for incarnation in self._migration.sources:
            self._order_sender(incarnation)

    def on_prepared(self, incarnation: str) -> None:
        """Check, now that this worker has loaded its layers, that it computes the same bits as the workers whose keys
        and values it receives. Otherwise a sequence would be a mixture that no single worker would compute."""
        plans = self.state.plans
        bits = plans.prepared[incarnation].bits
        moves = [move for move in self._migration.moves if move.target == incarnation]
        if all(plans.capacity[move.source].bits == bits for move in moves):
            return
        self._migration.drop_target(incarnation)
        self._order_receiver(incarnation)
        for source in dict.fromkeys(move.source for move in moves):
            self._order_sender(source)
        self.out.note("copies_unlike", worker=self.state.workers[incarnation].name)

    def on_held(self, message: KvHeld, now: float) -> None:
        """Handle a worker's report of the copies that it holds."""
        migration = self._migration
        before = self._copied_bytes()
        migration.held[message.incarnation] = message.held
        moves = [move for move in migration.moves if move.target == message.incarnation]
        if not moves:
            return
        migration.behind[message.incarnation] = {
            sequence.id: max(sequence.kv - migration.position(move, sequence.id) for move in moves)
            for sequence in self._movable()
        }
        if self._copied_bytes() > before:
            migration.progressed_at[message.incarnation] = now
        self._update_deadline(now)
        if message.incarnation in migration.awaited and self._has_tail(moves):
            migration.awaited.discard(message.incarnation)

    def tick(self, now: float) -> None:
        """Order copies again that make no progress although they are behind: a part of them was lost."""
        migration = self._migration
        if migration.tail_until is not None:
            return
        for incarnation, since in list(migration.progressed_at.items()):
            if now - since > STALLED_S and self._is_behind(incarnation):
                migration.progressed_at[incarnation] = now
                self.state.count("copies_ordered_again")
                self._order_receiver(incarnation)
                for source in dict.fromkeys(m.source for m in migration.moves if m.target == incarnation):
                    self._order_sender(source)

    def is_near(self, now: float) -> bool:
        """Whether the change of plan need not wait for copies any longer."""
        migration = self._migration
        return now >= migration.deadline or not any(map(self._is_behind, migration.targets))

    def stop(self, now: float) -> None:
        """Begin COPYING: wait for the steps in flight."""
        self.state.plans.start_copying()
        self._migration.stop_dispatching(now, now + DRAIN_S + DRAIN_STEPS * self.state.costs.usual_step_s)

    def finish(self, now: float) -> bool:
        """Continue COPYING; return whether it is over."""
        migration = self._migration
        if migration.tail_until is None:
            if migration.can_pause and self.state.has_work_in_flight and now < migration.drain_until:
                return False
            self._order_tail(now)
        if migration.awaited and migration.tail_until is not None and now < migration.tail_until:
            return False
        if migration.moves:
            self._record_end(now)
        migration.end()
        return True

    def _record_end(self, now: float) -> None:
        migration = self._migration
        self.state.count("migrations")
        self.state.count("migrations_incomplete", bool(migration.awaited))
        self.out.note(
            "copies_end",
            sequences=len(migration.tail),
            incomplete=[self.state.workers[who].name for who in sorted(migration.awaited)],
            copied_s=round(migration.stopped_at - migration.began_at, 3),
            stopped_s=round(now - migration.stopped_at, 4),
        )

    def cancel(self) -> None:
        """Stop copying, since the next plan is given up and the active one stays."""
        sources, targets = self._migration.sources, self._migration.targets
        self._migration.end()
        for incarnation in sources:
            self._order_sender(incarnation)
        for incarnation in targets:
            self._order_receiver(incarnation)

    # --- internals ---------------------------------------------------------------------------------------------------

    def _movable(self) -> list[Sequence]:
        """Return the sequences whose keys and values the stages of the active plan hold completely."""
        return [s for s in self.state.running if s.kv and s.is_open_in_stages and not s.rebuilds]

    def _is_behind(self, incarnation: str) -> bool:
        behind = self._migration.behind.get(incarnation, {})
        return any(behind.get(s.id, s.kv) > NEAR_POSITIONS for s in self._movable())

    def _has_tail(self, moves: list[LayerMove]) -> bool:
        migration = self._migration
        return all(
            migration.position(move, sequence) >= position
            for sequence, position in migration.tail.items()
            for move in moves
        )

    def _order_tail(self, now: float) -> None:
        migration = self._migration
        tail = {sequence.id: sequence.kv for sequence in self._movable()} if migration.moves else {}
        migration.await_tail(tail, now + TAIL_S)
        for incarnation in migration.targets if tail else ():
            moves = [move for move in migration.moves if move.target == incarnation]
            if self._has_tail(moves):
                migration.awaited.discard(incarnation)
            else:
                self._order_receiver(incarnation)
        for incarnation in migration.sources if migration.awaited else ():
            self._order_sender(incarnation)

    def _order_sender(self, incarnation: str) -> None:
        """Order a worker to send what it must send by now: nothing, if none of its layers moves any more."""
        migration = self._migration
        targets = tuple(self._build_target(move) for move in migration.moves if move.source == incarnation)
        self._send(incarnation, SendKv(epoch=migration.epoch, targets=targets))

    def _build_target(self, move: LayerMove) -> KvTarget:
        migration = self._migration
        at = {s.id: min(s.kv, migration.position(move, s.id)) for s in self._movable()}
        return KvTarget(
            to=Edge(move.target, self.state.workers[move.target].hello.kv_endpoint),
            layers=move.layers,
            held=_as_positions({sequence: position for sequence, position in at.items() if position}),
            until=_as_positions(migration.tail),
            is_urgent=True,
        )

    def _order_receiver(self, incarnation: str) -> None:
        """Order a worker to accept the copies that it must accept by now."""
        migration = self._migration
        sources = tuple(
            KvSource(move.source, move.layers, self.state.workers[move.source].hello.key)
            for move in migration.moves
            if move.target == incarnation
        )
        awaited = _as_positions(migration.tail) if incarnation in migration.awaited else ()
        self._send(incarnation, ReceiveKv(epoch=migration.epoch, sources=sources, awaited=awaited))

    def _send(self, incarnation: str, order: Order) -> None:
        worker = self.state.workers.get(incarnation)
        if worker is not None and not worker.is_gone:
            self.out.append(SendToWorker(worker.peer, order))

    # --- the deadline ------------------------------------------------------------------------------------------------

    def _update_deadline(self, now: float) -> None:
        """Estimate how long the copies take, from the rate measured so far."""
        migration = self._migration
        copied, elapsed_s = self._copied_bytes(), now - migration.began_at
        if copied and elapsed_s >= MIN_RATE_S:
            self.bytes_per_s = max(1.0, copied / elapsed_s)
        total = sum(self._bytes(move) * s.kv for move in migration.moves for s in self._movable())
        wait_s = GRACE_S + RATE_FACTOR * total / self.bytes_per_s
        migration.deadline = migration.began_at + min(MAX_COPY_S, wait_s)

    def _copied_bytes(self) -> int:
        migration = self._migration
        return sum(
            self._bytes(move) * migration.position(move, s.id) for move in migration.moves for s in self._movable()
        )

    def _bytes(self, move: LayerMove) -> int:
        assert self.state.manifest is not None
        return sum(self.state.manifest.kv_bytes_per_token[move.layers.first : move.layers.stop])


def find_moves(current: Plan, upcoming: Plan) -> Iterator[LayerMove]:
    """Yield the layers that change hands between two plans."""
    for stage in upcoming.stages:
        for before in current.stages:
            first, stop = max(stage.layers.first, before.layers.first), min(stage.layers.stop, before.layers.stop)
            if first < stop and before.incarnation != stage.incarnation:
                yield LayerMove(before.incarnation, stage.incarnation, LayerRange(first, stop))


def can_copy(state: State, move: LayerMove) -> bool:
    """Whether the keys and values of these layers can be copied: both workers support it and are trusted, and the route
    between them is open. The relay forwards steps only."""
    is_open = state.routes.state_of(move.source, move.target, state.now) is RouteState.OPEN
    workers = (state.workers[move.source], state.workers[move.target])
    return is_open and all(worker.hello.kv_endpoint and worker.is_trusted for worker in workers)


def _as_positions(positions: dict[int, int]) -> tuple[SequencePosition, ...]:
    return tuple(SequencePosition(sequence, position) for sequence, position in positions.items())
