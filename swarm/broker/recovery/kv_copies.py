"""Copies of keys and values: which worker sends those of which layers to which other worker.

While a plan serves, a worker that keeps layers warm for another one also receives their keys and values, in finished
blocks. After a loss only what its copies lack is replayed. ``kv_holders`` chooses the workers.

A worker that has no memory left for copies gets none for ``PAUSE_S``. A route that stands still although its sequences
grow is ordered again, from the positions that the holder has reported; after two attempts in vain, from 0.

A migration uses the same orders (``order_copies``), with urgent routes in addition to those of ``routes``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec

from swarm.broker.actions import Outbox, SendToWorker
from swarm.broker.planner.standby import StandbyPolicy
from swarm.broker.recovery.kv_holders import choose_routes, position_bytes, reported_bits
from swarm.broker.state import Sequence, SequenceState, State, Worker
from swarm.broker.state.kv_copies import CopyProgress, CopyRoute, HeldCopies
from swarm.wire.messages import (
    BLOCK,
    MAX_SEQUENCES,
    Activated,
    Edge,
    KvHeld,
    KvSource,
    KvTarget,
    LayerRange,
    ReceiveKv,
    SendKv,
    SequencePosition,
    layers_of,
)
from swarm.wire.transport.keys import is_elsewhere

CHECK_EVERY_S = 0.5  # interval at which the progress of the routes is compared
STANDS_STILL_S = 3.0  # a route without progress for this long is ordered again, if it is …
MIN_LAG = 64  # … this number of positions behind
MAX_BACKOFF = 16  # most times that the wait for the next repetition is prolonged
PAUSE_S = 30.0  # for which a holder without memory gets no further copies


@dataclass(frozen=True, slots=True)
class CopyOrder:
    """One route with its urgency. ``until``: the exact positions to send, including the unfinished block."""

    route: CopyRoute
    until: tuple[SequencePosition, ...] = ()
    is_urgent: bool = False


def order_copies(state: State, out: Outbox, orders: Iterable[CopyOrder], again: Iterable[CopyRoute] = ()) -> None:
    """Order these copies, and no others, under the active plan. Only changed orders are sent, and those of ``again``,
    which restart from the positions that their holders have reported."""
    plan = state.plans.current
    if plan is None:
        return
    # Routes of replicas may name a worker that is gone: they are chosen again later.
    orders = [o for o in orders if _is_present(state, o.route.source) and _is_present(state, o.route.holder)]
    again = frozenset(again)
    _order_receivers(state, out, plan.epoch, orders, {route.holder for route in again})
    _order_senders(state, out, plan.epoch, orders, {route.source for route in again})


def _is_present(state: State, incarnation: str) -> bool:
    worker = state.workers.get(incarnation)
    return worker is not None and not worker.is_gone


def _order_receivers(state: State, out: Outbox, epoch: int, orders: list[CopyOrder], again: set[str]) -> None:
    """Order holders first: parts that arrive before the order would be dropped."""
    sources: dict[str, list[KvSource]] = {holder: [] for holder in state.kv_copies.sources}
    awaited: dict[str, dict[int, SequencePosition]] = defaultdict(dict)
    for order in orders:
        key = state.workers[order.route.source].hello.key
        named = KvSource(order.route.source, order.route.layers, key, is_awaited=bool(order.until))
        sources.setdefault(order.route.holder, []).append(named)
        awaited[order.route.holder] |= {item.sequence: item for item in order.until}
    for holder, named_sources in sources.items():
        wanted = tuple(named_sources), tuple(awaited[holder].values())
        if holder not in state.workers or state.workers[holder].is_gone:
            state.kv_copies.sources.pop(holder, None)
        elif wanted != state.kv_copies.sources.get(holder, ((), ())) or (named_sources and holder in again):
            state.kv_copies.sources[holder] = wanted
            message = ReceiveKv(epoch=epoch, sources=wanted[0], awaited=wanted[1])
            out.append(SendToWorker(state.workers[holder].peer, message))


def _order_senders(state: State, out: Outbox, epoch: int, orders: list[CopyOrder], again: set[str]) -> None:
    targets: dict[str, list[KvTarget]] = {source: [] for source in state.kv_copies.targets}
    for order in orders:
        route, holder = order.route, state.workers[order.route.holder]
        edge = Edge(route.holder, holder.hello.kv_endpoint)
        target = KvTarget(edge, route.layers, until=order.until, is_urgent=order.is_urgent)
        targets.setdefault(route.source, []).append(target)
    for source, named in targets.items():
        wanted = tuple(named)
        if source not in state.workers or state.workers[source].is_gone:
            state.kv_copies.targets.pop(source, None)
        elif wanted != state.kv_copies.targets.get(source, ()) or (named and source in again):
            state.kv_copies.targets[source] = wanted
            # An order for exact positions goes on where the order before it is; reports of positions are older.
            complete = tuple(
                target if target.until else msgspec.structs.replace(target, held=_held(state, source, target))
                for target in named
            )
            out.append(SendToWorker(state.workers[source].peer, SendKv(epoch=epoch, targets=complete)))


def _held(state: State, source: str, target: KvTarget) -> tuple[SequencePosition, ...]:
    """Return the positions that the target holds already of the running sequences, as far as they count."""
    progress = state.kv_copies.progress.get(CopyRoute(source, target.to.to, target.layers))
    if progress is not None and progress.num_reorders > 1:  # what the holder reported has not helped
        return ()
    positions = (
        (sequence, min(sequence.kv, state.kv_copies.position(target.to.to, sequence.id, target.layers)))
        for sequence in state.running
    )
    return tuple(SequencePosition(sequence.id, position) for sequence, position in positions if position)[
        :MAX_SEQUENCES
    ]


# --- orders and their progress ----------------------------------------------------------------------------------------


@dataclass(slots=True)
class KvCopies:
    """Chooses the copies of replicas, and tracks what their holders have. Owns ``state.kv_copies``; appends actions to
    ``out``."""

    state: State
    out: Outbox
    _epoch: int = 0  # epoch of the plan for which the routes were chosen
    _chosen_for: tuple[object, ...] = field(default=())
    _joined_at: dict[str, float] = field(default_factory=dict)  # by incarnation, at the last orders

    def refresh(self, policy: StandbyPolicy, now: float, order: Callable[[Iterable[CopyRoute]], None]) -> None:
        """Choose the copies that the present workers can hold, and have them ordered; again where they stand still.

        ``order`` orders all present copies; it gets the routes that are to begin again.
        """
        copies = self.state.kv_copies
        if self._epoch != self._current_epoch:
            self.reset()
        again = self._find_rejoined()
        has_changed = self._has_changed(policy, now)
        routes = choose_routes(self.state, policy) if has_changed else copies.replicas
        copies.progress = {route: copies.progress.get(route) or CopyProgress(risen_at=now) for route in routes}
        again |= set() if has_changed else self._find_standing_still(now)
        if has_changed or again:
            copies.replicas = routes
            order(again & set(routes))
        self._drop_ended(now)

    @property
    def _current_epoch(self) -> int:
        current = self.state.plans.current
        return 0 if current is None else current.epoch

    def _drop_ended(self, now: float) -> None:
        """Have holders drop the copies of sequences that have ended: a worker without a part in the plan receives no
        step that would release them. Repeated until its report no longer has them."""
        copies, current = self.state.kv_copies, self.state.plans.current
        if current is None or now - copies.dropped_at < CHECK_EVERY_S:
            return
        copies.dropped_at = now
        for holder, (sources, awaited) in copies.sources.items():
            worker, held = self.state.workers.get(holder), copies.held.get(holder)
            ended = tuple(filter(self._has_ended, held.sequences))[:MAX_SEQUENCES] if held is not None else ()
            if ended and worker is not None and not worker.is_gone:
                order = ReceiveKv(epoch=current.epoch, sources=sources, awaited=awaited, ended=ended)
                self.out.append(SendToWorker(worker.peer, order))

    def _has_ended(self, sequence_id: int) -> bool:
        sequence = self.state.sequences.get(sequence_id)
        return sequence is None or sequence.state is SequenceState.ENDED

    def _find_rejoined(self) -> set[CopyRoute]:
        """Return the routes of workers that have sent Hello again since the last orders, which may have lost them."""
        copies = self.state.kv_copies
        joined_at = {i: worker.joined_at for i, worker in self.state.workers.items() if not worker.is_gone}
        again = {i for i, since in joined_at.items() if self._joined_at.get(i, since) != since}
        self._joined_at = joined_at
        for incarnation in again:
            copies.held.pop(incarnation, None)
        return {route for route in copies.replicas if {route.source, route.holder} & again}

    def _has_changed(self, policy: StandbyPolicy, now: float) -> bool:
        """Whether anything has changed on which the routes depend."""
        current, copies = self.state.plans.current, self.state.kv_copies
        able = tuple(
            (
                worker.incarnation,
                worker.warm_layers,
                worker.bits,
                now >= copies.paused_until.get(worker.incarnation, 0.0),
            )
            for worker in self.state.workers.values()
            if not worker.is_gone and worker.hello.kv_endpoint
        )
        chosen_for = (policy, None if current is None else current.epoch, able, self.state.routes.list_not_open(now))
        has_changed = chosen_for != self._chosen_for
        self._chosen_for = chosen_for
        return has_changed

    def _find_standing_still(self, now: float) -> set[CopyRoute]:
        """Return the routes that lag behind and have made no progress for a while."""
        copies = self.state.kv_copies
        if now - copies.checked_at < CHECK_EVERY_S:
            return set()
        copies.measure_rate(self.state.counters.get("positions", 0), now)
        sequences = [sequence for sequence in self.state.running if not sequence.rebuilds]
        again = set()
        for route in copies.replicas:
            progress = copies.progress[route]
            held = {s.id: copies.position(route.holder, s.id, route.layers) for s in sequences}
            has_risen = any(position > progress.positions.get(id_, 0) for id_, position in held.items())
            progress.positions = held
            unit = copy_unit(self.state, route.holder)
            if has_risen or max((lag(s, held[s.id], unit) for s in sequences), default=0) < MIN_LAG:
                progress.risen_at, progress.num_reorders = now, 0
                continue
            if now - progress.risen_at < STANDS_STILL_S * min(MAX_BACKOFF, 1 << progress.num_reorders):
                continue
            progress.risen_at, progress.num_reorders = now, progress.num_reorders + 1
            if self._is_full(route, sequences):
                copies.paused_until[route.holder] = now + PAUSE_S
                self.state.count("kv_copies_paused")
            else:
                self.state.count("kv_copies_reordered")
                again.add(route)
        return again

    def _is_full(self, route: CopyRoute, sequences: list[Sequence]) -> bool:
        """Whether the holder has no memory for a block of every sequence."""
        held = self.state.kv_copies.held.get(route.holder)
        if held is None or held.free_bytes is None:
            return False
        return held.free_bytes < len(sequences) * BLOCK * position_bytes(self.state, route.layers)

    def on_held(self, worker: Worker, message: KvHeld) -> bool:
        """Record a worker's report of the copies that it holds; return whether it counts.

        A worker without a part in the plan was ordered to drop everything before it was ordered to hold copies: from
        now on it holds what it is ordered to.
        """
        current = self.state.plans.current
        if current is None or message.epoch < current.epoch:
            self.state.count("stale_control")
            return False
        if message.held and worker.incarnation not in current.members:
            worker.forget_held()
        self.state.count("kv_copies_reports")
        report = HeldCopies.from_report(message.held, message.num_bytes, message.free_bytes)
        self.state.kv_copies.held[worker.incarnation] = report
        return True

    def on_activated(self, worker: Worker, message: Activated) -> None:
        """Record what a stage of the new plan holds: copies, and what it took over from copies for its own layers."""
        copies, current = self.state.kv_copies, self.state.plans.current
        stage = None if current is None else current.stage_of(worker.incarnation)
        assert stage is not None
        copies.held[worker.incarnation] = HeldCopies.from_report(message.copies)
        before = layers_of(() if worker.layers is None else (worker.layers,))
        new = layers_of((stage.layers,)) - before
        own = HeldCopies.from_report(message.held)
        copies.adopted[worker.incarnation] = sum(
            min(sequence.kv, own.position(sequence.id, LayerRange(layer, layer + 1)))
            for sequence in self.state.running
            for layer in new
        )

    def on_serving(self) -> None:
        """Record for the report on the recovery the work that copies have saved."""
        adopted = sum(self.state.kv_copies.adopted.values())
        self.state.kv_copies.adopted.clear()
        if adopted:
            self.state.count("kv_copies_used_positions", adopted)
            self.state.recoveries.add_copied(adopted)

    def drop_unlike(self, worker: Worker, bits: str) -> None:
        """Give up copies that this worker holds, and cannot take over: with the layers of the next plan it computes
        other bits than the workers that computed them. It receives the order before that plan begins."""
        copies, plans = self.state.kv_copies, self.state.plans
        holder = worker.incarnation
        named, _ = copies.sources.get(holder, ((), ()))
        unlike = {source.incarnation for source in named if reported_bits(self.state, source.incarnation) != bits}
        if not unlike:
            return
        copies.replicas = tuple(r for r in copies.replicas if r.holder != holder or r.source not in unlike)
        if plans.current is None:  # otherwise the change of plan has orders of its own
            alike = tuple(source for source in named if source.incarnation not in unlike)
            copies.sources[holder] = alike, ()
            self.out.append(SendToWorker(worker.peer, ReceiveKv(epoch=plans.epoch, sources=alike)))
            self.out.note("copies_unlike", worker=worker.name)

    def on_worker_lost(self, worker: Worker) -> None:
        """Have the holders drop what this worker has sent, if its results were wrong. They receive the order before the
        next plan's, so that they take over nothing of it."""
        copies = self.state.kv_copies
        trusted = tuple(route for route in copies.replicas if route.source != worker.incarnation)
        if not worker.may_copies_count and len(trusted) < len(copies.replicas):
            copies.replicas = trusted
            self.state.count("kv_copies_distrusted")
            order_copies(self.state, self.out, map(CopyOrder, trusted))

    def reset(self) -> None:
        """Drop the record of orders, which end with their plan, and of workers that are gone."""
        copies = self.state.kv_copies
        copies.forget_orders()
        present = {i for i, worker in self.state.workers.items() if not worker.is_gone}
        copies.held = {i: held for i, held in copies.held.items() if i in present}
        self._epoch, self._chosen_for = self._current_epoch, ()


def copy_unit(state: State, holder: str) -> int:
    """Return the positions by which copies grow at this holder."""
    worker = state.workers.get(holder)
    is_far = state.state_stride and worker is not None and is_elsewhere(worker.hello.kv_endpoint)
    return state.state_stride if is_far else BLOCK


def lag(sequence: Sequence, position: int, unit: int) -> int:
    """Return by how many positions, in whole units, a copy is behind its sequence."""
    return max(0, sequence.kv // unit * unit - position)
