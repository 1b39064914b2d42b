"""Migration: when a whole plan is replaced by another one, the keys and values of moved layers are copied.

::

    epoch journalled ── the plan's workers load; meanwhile finished blocks are copied ──► all loaded, copies are near
        ──► COPYING: nothing is dispatched ── steps in flight end ──► the rest is copied ── all receivers hold it
        ──► ``activation``

* The orders are those of replicas (``kv_copies``), and the copies of replicas go on beside them. They name the epoch of
  the *active* plan: copies are made while it serves, and end with it.
* Copies are *near* when every running sequence's copy was at most ``NEAR_POSITIONS`` behind when its receiver last
  reported. The change waits for that until a deadline by the measured rate; the active plan serves meanwhile.
* COPYING takes a few step times: the steps in flight end, so that none is computed twice, and each sequence is copied
  to its exact position.
* If layers move and none of them can be copied, there is no pause: their positions are computed again anyway.
* Nothing here is necessary. What is not copied by the deadlines is replayed, as after a loss (``rebuild``), and every
  event that ends the plan in preparation, or the active one, ends the copies.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from swarm.broker.actions import Outbox
from swarm.broker.recovery.kv_copies import CopyOrder, order_copies
from swarm.broker.recovery.kv_holders import position_bytes
from swarm.broker.state import Plan, Sequence, State, Worker, WorkerState
from swarm.broker.state.kv_copies import CopyRoute
from swarm.broker.state.migration import MigrationState
from swarm.broker.state.workers import RouteState
from swarm.wire.messages import LayerRange, SequencePosition, layers_of, to_ranges

NEAR_POSITIONS = 64  # positions of a sequence that may be left for COPYING
RATE_FACTOR = 3.0  # how much longer than by the measured rate the copies may take
GRACE_S = 5.0  # in addition
MAX_COPY_S = 120.0  # upper limit of the wait, however slow the connection is
LEAVING_S = 4.0  # the same for the copies of a worker that leaves: its process ends soon, released or not
STALLED_S = 3.0  # time without progress after which copies are ordered again, from the positions held by then
DRAIN_S = 2.0  # how long steps in flight may take to end, in addition to a multiple of the usual time
DRAIN_STEPS = 4.0  # that multiple
TAIL_S = 1.0  # how long copying the last positions may take while nothing is dispatched
MIN_RATE_S = 0.25  # a shorter time gives no estimate of the rate
BYTES_PER_S = 20e6  # assumed rate before the first copies


@dataclass(slots=True)
class Migration:
    """Orders copies for a change of plan and tracks them. Owns ``state.migration``; appends orders to ``out``."""

    state: State
    out: Outbox
    bytes_per_s: float = BYTES_PER_S  # measured rate of the last copies

    @property
    def _migration(self) -> MigrationState:
        return self.state.migration

    def begin(self, upcoming: Plan, now: float) -> None:
        """Order copies of all layers that change hands, while the workers of the next plan load."""
        current = self.state.plans.current
        assert current is not None
        moves = list(find_moves(current, upcoming))
        routes = [move for move in moves if can_copy(self.state, move)]
        self._migration.begin(routes, now, can_pause=bool(routes) or not moves)
        self._update_wait(now)
        self.order()

    def on_prepared(self, incarnation: str) -> None:
        """Check, now that this worker has loaded its layers, that it computes the same bits as the workers whose keys
        and values it receives. Otherwise a sequence would be a mixture that no single worker would compute."""
        plans = self.state.plans
        bits = plans.prepared[incarnation].bits
        if any(plans.capacity[route.source].bits != bits for route in self._migration.routes_to(incarnation)):
            self._migration.drop_holder(incarnation)
            self.out.note("copies_unlike", worker=self.state.workers[incarnation].name)
        self.order()  # replicas may have been given up for the same reason

    def on_held(self, worker: Worker, now: float) -> None:
        """Handle a worker's report of the copies that it holds, which ``kv_copies`` has recorded."""
        migration, holder = self._migration, worker.incarnation
        routes = migration.routes_to(holder)
        if not routes:
            return
        behind = {s.id: max(s.kv - self._position(route, s.id) for route in routes) for s in self._movable()}
        before = migration.behind.get(holder, {})
        has_grown = any(s.kv - behind[s.id] > 0 and behind[s.id] < before.get(s.id, s.kv + 1) for s in self._movable())
        migration.record_report(holder, behind, has_grown=has_grown, now=now)
        self._update_wait(now)
        if self._has_tail(routes):
            migration.complete(holder)

    def order(self, again: Iterable[CopyRoute] = ()) -> None:
        """Order the copies of replicas, and besides them those of a change of plan. Routes ``again`` begin again."""
        migration = self._migration
        until = tuple(SequencePosition(sequence, position) for sequence, position in migration.tail.items())
        urgent = [CopyOrder(route, until, is_urgent=True) for route in migration.routes]
        order_copies(self.state, self.out, [*map(CopyOrder, self._replicas()), *urgent], again)

    def tick(self, now: float) -> None:
        """Order copies again that make no progress although they are behind: a part of them was lost."""
        migration = self._migration
        if migration.tail_until is not None:
            return
        stalled = [
            holder
            for holder in migration.holders
            if now - migration.grown_at[holder] > STALLED_S and self._is_behind(holder)
        ]
        for holder in stalled:
            migration.record_order(holder, now)
            self.state.count("copies_ordered_again")
        if stalled:
            self.order(again=[route for holder in stalled for route in migration.routes_to(holder)])

    def is_near(self, now: float) -> bool:
        """Whether the change of plan need not wait for copies any longer."""
        return now >= self._migration.wait_until or not any(map(self._is_behind, self._migration.holders))

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
        if migration.incomplete and migration.tail_until is not None and now < migration.tail_until:
            return False
        if migration.routes:
            self._record_end(now)
        migration.end()
        return True

    def cancel(self) -> None:
        """Stop copying, since the next plan is given up and the active one stays. Replicas stay."""
        if self._migration.routes:
            self._migration.end()
            self.order()

    # --- internals ---------------------------------------------------------------------------------------------------

    def _record_end(self, now: float) -> None:
        migration = self._migration
        self.state.count("migrations")
        self.state.count("migrations_incomplete", bool(migration.incomplete))
        self.out.note(
            "copies_end",
            sequences=len(migration.tail),
            incomplete=[self.state.workers[holder].name for holder in sorted(migration.incomplete)],
            copied_s=round(migration.stopped_at - migration.began_at, 3),
            stopped_s=round(now - migration.stopped_at, 4),
        )

    def _movable(self) -> list[Sequence]:
        """Return the sequences whose keys and values the stages of the active plan hold completely."""
        return [s for s in self.state.running if s.kv and s.is_open_in_stages and not s.rebuilds]

    def _position(self, route: CopyRoute, sequence: int) -> int:
        return self.state.kv_copies.position(route.holder, sequence, route.layers)

    def _is_behind(self, holder: str) -> bool:
        behind = self._migration.behind.get(holder, {})
        return any(behind.get(s.id, s.kv) > NEAR_POSITIONS for s in self._movable())

    def _has_tail(self, routes: list[CopyRoute]) -> bool:
        tail = self._migration.tail.items()
        return all(self._position(route, sequence) >= position for sequence, position in tail for route in routes)

    def _order_tail(self, now: float) -> None:
        """Order the last positions of all sequences."""
        migration = self._migration
        migration.await_tail({s.id: s.kv for s in self._movable()} if migration.routes else {}, now + TAIL_S)
        for holder in migration.holders:
            if self._has_tail(migration.routes_to(holder)):
                migration.complete(holder)
        if migration.incomplete:
            self.order()

    def _replicas(self) -> Iterator[CopyRoute]:
        """Yield the routes of replicas, without the layers that are copied for the change of plan."""
        for route in self.state.kv_copies.replicas:
            same = [r.layers for r in self._migration.routes if (r.source, r.holder) == (route.source, route.holder)]
            for layers in to_ranges(layers_of((route.layers,)) - layers_of(same)):
                yield CopyRoute(route.source, route.holder, layers)

    def _update_wait(self, now: float) -> None:
        """Estimate how long the copies take, from the rate measured so far."""
        migration, sequences = self._migration, self._movable()
        sizes = [(route, position_bytes(self.state, route.layers)) for route in migration.routes]
        copied = sum(size * self._position(route, s.id) for route, size in sizes for s in sequences)
        elapsed_s = now - migration.began_at
        if copied and elapsed_s >= MIN_RATE_S:
            self.bytes_per_s = max(1.0, copied / elapsed_s)
        num_bytes = sum(size * s.kv for _, size in sizes for s in sequences)
        is_leaving = any(self.state.workers[r.source].state is WorkerState.LEAVING for r in migration.routes)
        most_s = LEAVING_S if is_leaving else MAX_COPY_S
        wait_s = min(most_s, GRACE_S + RATE_FACTOR * num_bytes / self.bytes_per_s)
        migration.set_wait(num_bytes, migration.began_at + wait_s)


def find_moves(current: Plan, upcoming: Plan) -> Iterator[CopyRoute]:
    """Yield the layers that change hands between two plans, from their present holders to the next ones."""
    for stage in upcoming.stages:
        for before in current.stages:
            first, stop = max(stage.layers.first, before.layers.first), min(stage.layers.stop, before.layers.stop)
            if first < stop and before.incarnation != stage.incarnation:
                yield CopyRoute(before.incarnation, stage.incarnation, LayerRange(first, stop))


def can_copy(state: State, move: CopyRoute) -> bool:
    """Whether the keys and values of these layers can be copied: both workers support it and are trusted, and the
    route between them is open. The relay forwards steps only."""
    is_open = state.routes.state_of(move.source, move.holder, state.now) is RouteState.OPEN
    source, holder = state.workers[move.source], state.workers[move.holder]
    is_supported = all(worker.hello.kv_endpoint and worker.is_trusted for worker in (source, holder))
    return is_open and is_supported and source.hello.dtype == holder.hello.dtype
