"""Process of the broker: sockets and timers around the core. It decides nothing.

One asyncio loop owns everything. ``message_server`` makes an event of each message; ``_feed`` hands it to the core and
carries out the resulting actions.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from random import SystemRandom
from typing import TYPE_CHECKING

import psutil
import uvloop
import zmq

from swarm import failpoints
from swarm.broker import actions as act
from swarm.broker.admin.solver import PlanSolver
from swarm.broker.admin.status import report_status
from swarm.broker.auth.service import AuthService
from swarm.broker.core import BrokerCore
from swarm.broker.draft_process import DraftProcess, draft_command
from swarm.broker.events import (
    ClientBlocked,
    ClientMessageReceived,
    ClientUnreachable,
    DescriptorsCounted,
    Event,
    ProcessFigures,
    RouteTested,
    RulesChanged,
    Tick,
    WaitExpired,
    describe_event,
)
from swarm.broker.journal import JournalWrite, confirm
from swarm.broker.journal.reader import MAX_REPORTS, REST_FACTOR, JournalAnswer, JournalReader
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import JournalLimits, JournalStore, Timestamp
from swarm.broker.journal.writer import JournalFact, JournalWriter
from swarm.broker.message_server import MessageServer
from swarm.broker.process import descriptor_limit, num_descriptors, process_figures
from swarm.broker.settings import (
    Endpoints,
    has_draft,
    make_core_settings,
    make_plan_rules,
    make_proposers,
    speculation_conflict,
)
from swarm.broker.speculation.depth import DepthControl
from swarm.broker.state.journal_snapshot import JournalSnapshot, next_lineage
from swarm.clock import Clock, SystemClock
from swarm.config.display import settings_report
from swarm.errors import WireError
from swarm.log import get_logger
from swarm.systemd import socket_activation, status_text
from swarm.systemd.service_context import ServiceContext
from swarm.wire.codec import DATA, ORDER, SERVER
from swarm.wire.messages import NO_LINEAGE, HostDone, Report, StartWorkers
from swarm.wire.push import PushChannel
from swarm.wire.sockets import bind
from swarm.wire.tensors import Bytes
from swarm.wire.transport.client_handshake import check_reachable
from swarm.wire.transport.keys import with_host
from swarm.wire.transport.relay import Relay

if TYPE_CHECKING:
    from swarm.config import Settings

TICK_S = 0.05
FIGURES_S = 1.0  # between two samples of the process's resources
RETRY_S = 0.002  # delay until an unsent step is tried again: a new connection takes a moment to be established

_FAILPOINTS: dict[type, str] = {
    act.Dispatch: "broker.dispatch",
    act.SendToWorker: "broker.order",
    act.WriteTokens: "broker.tokens",
}

log = get_logger(__name__)


def run(settings: Settings, unit: ServiceContext | None = None) -> int:
    """Run the broker until SIGTERM or SIGINT. Return the process's exit code. ``unit``: the systemd service, if any."""
    failpoints.arm(os.environ)
    _allow_connections()
    return uvloop.run(_main(settings, unit))


def _allow_connections() -> None:
    """Raise the limit of file descriptors to the maximum: each connection takes one, and a shell's default is low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems grant fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _main(settings: Settings, unit: ServiceContext | None) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        service = BrokerService(settings, context, SystemClock(), unit)
        try:
            await service.run()
        finally:
            service.close()
    finally:
        context.term()
    return service.exit_code


class BrokerService:
    """Shell around a :class:`BrokerCore`."""

    def __init__(
        self,
        settings: Settings,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        unit: ServiceContext | None = None,
    ) -> None:
        self._context = context
        self._unit = unit or ServiceContext.unmanaged(settings)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        past = self._open_journal(settings)
        self._pipeline: PushChannel | None = None  # connection to the first stage
        self._writes: list[JournalWrite] = []  # of the present turn of the loop
        self._unsent: deque[list[Bytes]] = deque()  # bounded by the core: never more than the steps in flight
        self._can_retry = asyncio.Event()
        self._alarm: asyncio.TimerHandle | None = None  # feeds ``WaitExpired`` at ``_alarm_at``
        self._alarm_at = inf
        self._stop = asyncio.Event()
        self._solver = PlanSolver(self._feed)
        if conflict := speculation_conflict(settings):
            log.warning("speculation_settings_unused", reason=conflict)
        self._draft = DraftProcess(draft_command(settings), self._feed) if has_draft(settings) else None
        self._route_tests: set[asyncio.Task[None]] = set()  # running tests of routes; bounded: each ends soon by itself
        self.exit_code = 0
        self._logs_events = settings.log.level == "debug"
        self._host = settings.broker.host
        self._auth = auth = AuthService(settings)
        self._message_server = server = MessageServer(settings, auth, clock, self._feed)
        addresses = auth.addresses
        # Without other machines no worker needs a relay.
        self._relay = (
            Relay([bind(host, server.port + 4) for host in (self._host, *addresses)], self._fail_from_thread)
            if addresses
            else None
        )
        endpoints = Endpoints(*server.advertised, f"tcp://*:{server.port + 4}" if addresses else "")
        key = auth.key_pair and auth.key_pair.public
        self._core = BrokerCore(
            make_core_settings(settings, endpoints, self._lineage, key),
            clock.now(),
            past,
            proposers=make_proposers(settings),
            control=DepthControl(),
        )
        if unused := socket_activation.close_unused():
            log.warning(
                "handed_doors_unused", at=unused, note="swarm-broker.socket names other addresses than the settings"
            )
        auth.attach(server.sockets, server.clients, server.workers, self._feed, self._core.local_workers)
        log.info("broker_listens", clients=server.clients.endpoint, workers=server.workers.endpoint, others=addresses)

    def _open_journal(self, settings: Settings) -> JournalSnapshot | None:
        """Open the journal on disk if there is a state directory, else none. Returns what it recorded of the past."""
        self._writer: JournalWriter | None = None
        self._readers: tuple[JournalReader, ...] = ()
        if settings.state_dir is None:
            self._lineage = next_lineage(NO_LINEAGE, SystemRandom())
            return None
        bounds = JournalLimits(settings.journal.keep_s, int(settings.journal.max_bytes))
        retain_s = settings.broker.retain_s
        store, notes = open_or_salvage(settings.state_dir, bounds, retain_s)
        past = store.read_snapshot(Timestamp.now(), retained_s=retain_s)
        self._lineage = store.begin_lineage()

        def on_facts(facts: list[JournalFact] | list[JournalAnswer]) -> None:
            self._loop.call_soon_threadsafe(self._feed_all, facts)

        def on_reopened(new: JournalStore) -> None:
            for reader in self._readers:
                reader.switch_store(new.open_read_only())

        self._writer = JournalWriter(store, self._clock, on_facts, self._fail_from_thread, on_reopened)
        self._reader = JournalReader(
            store.open_read_only(), on_facts, self._fail_from_thread, self._writer.report_damage
        )
        self._reporter = JournalReader(
            store.open_read_only(),
            on_facts,
            self._fail_from_thread,
            self._writer.report_damage,
            max_waiting=MAX_REPORTS,
            rest_factor=REST_FACTOR,
        )
        self._readers = (self._reader, self._reporter)
        return replace(past, notes=notes)

    def _fail_from_thread(self, error: BaseException) -> None:
        """Call ``_fail`` from another thread."""
        self._loop.call_soon_threadsafe(self._fail, error)

    def _fail(self, error: BaseException) -> None:
        """Stop because of a bug in a thread: a broker that limps on would hide it. A supervisor starts the broker
        again."""
        log.error("broker_fails", reason=f"{type(error).__name__}: {error}")
        self.exit_code = 1
        self._stop.set()

    async def run(self) -> None:
        """Serve until a signal stops the process."""
        loop = asyncio.get_running_loop()
        if self._writer is not None:
            self._writer.start()
        for reader in self._readers:
            reader.start()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        self._unit.enable_reload(loop, frozenset({"plan"}), self._on_settings_reloaded)
        self._unit.manager.send_ready()
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._message_server.serve_clients()),
                group.create_task(self._message_server.serve_workers()),
                group.create_task(self._message_server.serve_heartbeats()),
                group.create_task(self._message_server.serve_steps()),
                group.create_task(self._retry_unsent()),
                group.create_task(self._tick()),
                group.create_task(self._report_figures()),
                group.create_task(self._solver.run()),
                group.create_task(self._auth.run()),
                *([] if self._draft is None else [group.create_task(self._draft.run())]),
            ]
            await self._stop.wait()
            self._unit.manager.send_stopping("stopping; accepted requests are in the journal")
            for task in (*loops, *self._route_tests):
                task.cancel()
        log.info("broker_stops")

    def _on_settings_reloaded(self, settings: Settings) -> None:
        """Apply reloaded settings. Only settings of plans take effect now, all others at the next start."""
        self._feed(RulesChanged(make_plan_rules(settings)))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        if self._writer is not None:
            self._writer.close()
        for channel in self._message_server.sockets.values():
            channel.close()
        if self._relay is not None:
            self._relay.close()
        self._close_pipeline()

    # --- time --------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            if failpoints.armed:
                failpoints.hit("broker.tick")
            # verdicts are given only after all received heartbeats are read
            self._message_server.read_waiting_heartbeats()
            self._feed(Tick())
            self._unit.manager.send_alive()
            await asyncio.sleep(TICK_S)

    async def _report_figures(self) -> None:
        process = psutil.Process()
        while True:
            with contextlib.suppress(OSError):  # sampling takes a descriptor, and there may be none
                self._feed(ProcessFigures(process_figures(process)))
            if self._unit.manager.is_present:
                self._unit.manager.send_status(
                    status_text.broker_status(report_status(self._core.state, self._clock.now()))
                )
            await asyncio.sleep(FIGURES_S)

    # --- events and actions ------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        """Hand an event to the core and carry out its actions; events that these cause immediately are fed in turn."""
        events = deque([event])
        try:
            self._carry_out(events)
        finally:
            self._flush_writes()
        if self._core.wake_at != self._alarm_at:
            self._set_alarm(self._core.wake_at)

    def _set_alarm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = None if at == inf else self._loop.call_later(at - self._clock.now(), self._on_alarm)

    def _on_alarm(self) -> None:
        self._alarm, self._alarm_at = None, inf  # it may be set to the same time again: the clocks differ a little
        self._feed(WaitExpired())

    def _carry_out(self, events: deque[Event]) -> None:
        while events:
            event = events.popleft()
            actions = self._core.handle(event, self._clock.now())
            cause = self._core.cause
            if self._logs_events and (fields := describe_event(event)) is not None:
                log.debug("event", cause=cause, **fields)
            for action in actions:
                answer = self._perform(act.add_cause(action, cause))
                if failpoints.armed and isinstance(action, act.Dispatch) and action.step.proposed:
                    failpoints.hit("broker.proposes")
                if answer is not None:
                    events.append(answer)

    def _perform(self, action: act.Action) -> Event | None:  # noqa: PLR0912 (a case for each action)
        if failpoints.armed and (place := _FAILPOINTS.get(type(action))) is not None:
            failpoints.hit(place)
        if isinstance(action, JournalWrite):
            return self._write(action)
        match action:
            case act.SendToClient() | act.SendToWorker() | act.Dispatch():
                return self._send(action)
            case act.ReadRequest() | act.ReadList():  # without a journal the core does not ask
                return (self._reader if isinstance(action, act.ReadRequest) else self._reporter).submit(action)
            case act.ConnectPipeline(_, endpoint):
                self._close_pipeline()
                self._pipeline = PushChannel(with_host(endpoint, self._host), pair=self._auth.key_pair)
            case act.DisconnectPipeline():
                self._close_pipeline()
            case act.ShowOwnSettings(client):
                shown = settings_report("broker", self._unit.describe_settings("broker"))
                return self._send(act.SendToClient(client, Report(what="settings", ok=True, body=shown)))
            case act.SetRelayTickets(tickets):
                if self._relay is not None:
                    self._relay.admit(tickets)
            case act.CountDescriptors():
                return DescriptorsCounted(num_descriptors(), descriptor_limit())
            case act.ResumeAccepting(door):
                self._message_server.sockets[door].resume_accepting()
            case act.SetAllowedKeys(door, keys):
                self._auth.allow_keys(door, keys)
            case act.Solve(number, question):
                self._solver.ask(number, question)
            case act.AskDraft() | act.StopDraft():
                self._perform_draft(action)
            case act.ProbeRoute(epoch, endpoint):
                task = asyncio.create_task(self._test_route(epoch, endpoint), name="test a route")
                self._route_tests.add(task)
                task.add_done_callback(self._route_tests.discard)
            case act.WriteLog(event, level, fields):
                getattr(log, level)(event, **fields)
        return None

    def _perform_draft(self, action: act.AskDraft | act.StopDraft) -> None:
        assert self._draft is not None, "the core orders nothing without a draft model"
        if isinstance(action, act.AskDraft):
            self._draft.ask(action)
        else:
            self._draft.stop()

    def _send(self, action: act.SendToClient | act.SendToWorker | act.Dispatch) -> Event | None:
        """Send a message. A message that its own schema rejects is a bug, or follows from a peer's input: it is logged
        and dropped, and its recipient runs into a deadline. It must not end the process, which would send the same
        again after its next start. A host that is too old for an order to start workers refuses it."""
        front, control = self._message_server.clients, self._message_server.workers
        try:
            match action:
                case act.SendToClient(client, message, payload):
                    frames = SERVER.encode(message, payload, version=front.version_of(client))
                    if not front.send(client, frames):
                        return ClientBlocked(client) if front.is_connected(client) else ClientUnreachable(client)
                case act.SendToWorker(peer, order):
                    if not control.send(peer, ORDER.encode(order, version=control.version_of(peer))):
                        log.warning("order_not_sent", worker=peer.decode(errors="replace"), kind=type(order).__name__)
                case act.Dispatch(step):
                    self._unsent.append(DATA.encode(step))
                    self._send_queued()
        except WireError as error:
            log.error("message_not_encoded", action=type(action).__name__, reason=str(error))
            if isinstance(action, act.SendToClient) and isinstance(action.message, StartWorkers):
                refusal = HostDone(ticket=action.message.ticket, started=(), error=f"the swarm up is older: {error}")
                return ClientMessageReceived(action.client, refusal, None)  # in place of a host that is not asked
        return None

    async def _test_route(self, epoch: int, endpoint: str) -> None:
        self._feed(RouteTested(epoch, await asyncio.to_thread(check_reachable, endpoint)))

    def _write(self, write: JournalWrite) -> Event | None:
        """Queue a write for the journal's thread, which reports its completion as an event. Without a journal, return
        that event immediately.

        The thread is woken after this turn's messages are sent; otherwise it would take the interpreter from the step
        that is about to be sent.
        """
        if self._writer is None:
            return confirm(write)
        self._writes.append(write)
        return None

    def _flush_writes(self) -> None:
        """Pass the writes queued in this turn to the journal's thread."""
        if self._writes and self._writer is not None:
            writes, self._writes = self._writes, []
            self._writer.write(*writes)

    def _feed_all(self, facts: Sequence[Event]) -> None:
        """Feed events of the journal's thread."""
        for fact in facts:
            self._feed(fact)

    def _send_queued(self) -> None:
        """Send queued steps, in order, as far as the connection takes them."""
        while self._unsent and self._pipeline is not None:
            if not self._pipeline.send(self._unsent[0]):
                self._can_retry.set()
                return
            self._unsent.popleft()

    async def _retry_unsent(self) -> None:
        while True:
            await self._can_retry.wait()
            self._can_retry.clear()
            await asyncio.sleep(RETRY_S)
            self._send_queued()

    def _close_pipeline(self) -> None:
        self._unsent.clear()
        if self._pipeline is not None:
            self._pipeline.close()
            self._pipeline = None
