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
from random import SystemRandom
from typing import TYPE_CHECKING

import psutil
import uvloop
import zmq

from swarm import failpoints
from swarm.broker import actions as act
from swarm.broker.core import BrokerCore
from swarm.broker.events import (
    ClientStuck,
    ClientUnreachable,
    DescriptorsCounted,
    DoorTried,
    Event,
    ProcessFigures,
    RulesChanged,
    Tick,
    described,
)
from swarm.broker.journal import Write, written
from swarm.broker.journal.reader import MAX_REPORTS, REST, Found, JournalReader
from swarm.broker.journal.salvage import open_or_salvage
from swarm.broker.journal.store import Bounds, Moment, Store
from swarm.broker.journal.writer import Fact, JournalWriter
from swarm.broker.lockkeeper import LockKeeper
from swarm.broker.process import descriptor_limit, num_descriptors, process_figures
from swarm.broker.questions.solver import Solver
from swarm.broker.questions.status import status
from swarm.broker.reception import Reception
from swarm.broker.settings import Endpoints, core_settings, plan_rules
from swarm.broker.state.past import Past, following
from swarm.clock import Clock, SystemClock
from swarm.config.shown import report
from swarm.errors import WireError
from swarm.log import get_logger
from swarm.service import handed, words
from swarm.service.unit import Unit
from swarm.wire.codec import DATA, ORDER, SERVER
from swarm.wire.door.keys import reached
from swarm.wire.door.knocking import why_unreachable
from swarm.wire.door.relay import Relay
from swarm.wire.messages import NOBODYS, Report
from swarm.wire.push import PushChannel
from swarm.wire.sockets import bind
from swarm.wire.tensors import Bytes

if TYPE_CHECKING:
    from swarm.config import Settings

TICK_S = 0.05
FIGURES_S = 1.0  # between two samples of the process's resources
RETRY_S = 0.002  # delay until an unsent step is tried again: a new connection takes a moment to be established

_POINTS: dict[type, str] = {
    act.Dispatch: "broker.dispatch",
    act.OrderWorker: "broker.order",
    act.WriteTokens: "broker.tokens",
}

log = get_logger(__name__)


def run(settings: Settings, unit: Unit | None = None) -> int:
    """Run until SIGTERM or SIGINT; return the process's exit code. ``unit``: the systemd service."""
    failpoints.arm(os.environ)
    _allow_connections()
    return uvloop.run(_main(settings, unit))


def _allow_connections() -> None:
    """Raise the limit of file descriptors to the maximum: each connection takes one, and a shell's default is low."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # some systems grant fewer than they report
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _main(settings: Settings, unit: Unit | None) -> int:
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
        self, settings: Settings, context: zmq.Context[zmq.Socket[bytes]], clock: Clock, unit: Unit | None = None
    ) -> None:
        self._context = context
        self._unit = unit or Unit.nobodys(settings)
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        past = self._open_journal(settings)
        self._pipe: PushChannel | None = None  # connection to the first stage
        self._writes: list[Write] = []  # of the present turn of the loop
        self._unsent: deque[list[Bytes]] = deque()  # bounded by the core: never more than the steps in flight
        self._can_retry = asyncio.Event()
        self._stop = asyncio.Event()
        self._solver = Solver(self._feed)
        self._tries: set[asyncio.Task[None]] = set()  # running tests of routes; bounded: each ends soon by itself
        self.exit_code = 0
        self._tells_events = settings.log.level == "debug"
        self._host = settings.broker.host
        self._keeper = keeper = LockKeeper(settings)
        self._reception = reception = Reception(settings, keeper, clock, self._feed)
        others = keeper.addresses
        # Without other machines no worker needs a relay.
        self._relay = (
            Relay([bind(host, reception.port + 4) for host in (self._host, *others)], self._fail_soon)
            if others
            else None
        )
        endpoints = Endpoints(*reception.advertised, f"tcp://*:{reception.port + 4}" if others else "")
        key = keeper.pair and keeper.pair.public
        self._core = BrokerCore(core_settings(settings, endpoints, self._lineage, key), clock.now(), past)
        if unused := handed.left():
            log.warning(
                "handed_doors_unused", at=unused, note="swarm-broker.socket names other addresses than the settings"
            )
        keeper.keep(reception.doors, reception.front, reception.control, self._feed, self._core.workers_here)
        log.info("broker_listens", clients=reception.front.endpoint, workers=reception.control.endpoint, others=others)

    def _open_journal(self, settings: Settings) -> Past | None:
        """Open the journal on disk if there is a state directory, else none. Returns what it recorded of the past."""
        self._writer: JournalWriter | None = None
        self._readers: tuple[JournalReader, ...] = ()
        if settings.state_dir is None:
            self._lineage = following(NOBODYS, SystemRandom())
            return None
        bounds = Bounds(settings.journal.keep_s, int(settings.journal.max_bytes))
        retain_s = settings.broker.retain_s
        store, notes = open_or_salvage(settings.state_dir, bounds, retain_s)
        past = store.past(Moment.now(), retained_s=retain_s)
        self._lineage = store.begin()

        def told(facts: list[Fact] | list[Found]) -> None:
            self._loop.call_soon_threadsafe(self._feed_all, facts)

        def renewed(new: Store) -> None:
            for reader in self._readers:
                reader.turn_to(new.for_reading())

        self._writer = JournalWriter(store, self._clock, told, self._fail_soon, renewed)
        self._reader = JournalReader(store.for_reading(), told, self._fail_soon, self._writer.doubt)
        self._reporter = JournalReader(
            store.for_reading(), told, self._fail_soon, self._writer.doubt, max_waiting=MAX_REPORTS, rest=REST
        )
        self._readers = (self._reader, self._reporter)
        return replace(past, notes=notes)

    def _fail_soon(self, error: BaseException) -> None:
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
        self._unit.listen(loop, frozenset({"plan"}), self._read_again)
        self._unit.manager.ready()
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._reception.serve_clients()),
                group.create_task(self._reception.serve_workers()),
                group.create_task(self._reception.hear_beats()),
                group.create_task(self._reception.take_finished_steps()),
                group.create_task(self._retry_unsent()),
                group.create_task(self._tick()),
                group.create_task(self._watch_itself()),
                group.create_task(self._solver.run()),
                group.create_task(self._keeper.run()),
            ]
            await self._stop.wait()
            self._unit.manager.stopping("stopping; accepted requests are in the journal")
            for task in (*loops, *self._tries):
                task.cancel()
        log.info("broker_stops")

    def _read_again(self, settings: Settings) -> None:
        """Apply reloaded settings: those of plans may have changed, all others take effect at the next start."""
        self._feed(RulesChanged(plan_rules(settings)))

    def close(self) -> None:
        for reader in self._readers:
            reader.close()
        if self._writer is not None:
            self._writer.close()
        for channel in self._reception.doors.values():
            channel.close()
        if self._relay is not None:
            self._relay.close()
        self._close_pipe()

    # --- time --------------------------------------------------------------------------------------------------------

    async def _tick(self) -> None:
        while True:
            if failpoints.armed:
                failpoints.reached("broker.tick")
            self._reception.hear_waiting_beats()  # verdicts are given only after all received heartbeats are read
            self._feed(Tick())
            self._unit.manager.alive()
            await asyncio.sleep(TICK_S)

    async def _watch_itself(self) -> None:
        process = psutil.Process()
        while True:
            with contextlib.suppress(OSError):  # sampling takes a descriptor, and there may be none
                self._feed(ProcessFigures(process_figures(process)))
            if self._unit.manager.is_there:
                self._unit.manager.status(words.of_broker(status(self._core.state, self._clock.now())))
            await asyncio.sleep(FIGURES_S)

    # --- events and actions ------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        """Hand an event to the core and carry out its actions; events that these cause immediately are fed in turn."""
        facts = deque([event])
        try:
            self._carry_out(facts)
        finally:
            self._hand_over()

    def _carry_out(self, facts: deque[Event]) -> None:
        while facts:
            fact = facts.popleft()
            actions = self._core.handle(fact, self._clock.now())
            cause = self._core.cause
            if self._tells_events and (fields := described(fact)) is not None:
                log.debug("event", cause=cause, **fields)
            for action in actions:
                answer = self._perform(act.caused(action, cause))
                if answer is not None:
                    facts.append(answer)

    def _perform(self, action: act.Action) -> Event | None:
        if failpoints.armed and (place := _POINTS.get(type(action))) is not None:
            failpoints.reached(place)
        if isinstance(action, Write):
            return self._write(action)
        match action:
            case act.SayClient() | act.OrderWorker() | act.Dispatch():
                return self._send(action)
            case act.ReadRequest() | act.ReadList():  # without a journal the core does not ask
                return (self._reader if isinstance(action, act.ReadRequest) else self._reporter).ask(action)
            case act.OpenPipe(_, endpoint):
                self._close_pipe()
                self._pipe = PushChannel(reached(endpoint, self._host), pair=self._keeper.pair)
            case act.ClosePipe():
                self._close_pipe()
            case act.ShowOwnSettings(client):
                told = report("broker", self._unit.shown("broker"))
                return self._send(act.SayClient(client, Report(what="settings", ok=True, body=told)))
            case act.Relay(tickets):
                if self._relay is not None:
                    self._relay.admit(tickets)
            case act.CountDescriptors() | act.OpenDoor() | act.Admit() | act.Solve() | act.TryDoor():
                return self._see_to(action)
            case act.Note(event, level, fields):
                getattr(log, level)(event, **fields)
        return None

    def _send(self, action: act.SayClient | act.OrderWorker | act.Dispatch) -> Event | None:
        """Send a message. A message that its own schema rejects is a bug, or follows from a peer's input: it is logged
        and dropped, and its recipient runs into a deadline. It must not end the process, which would send the same
        again after its next start."""
        front, control = self._reception.front, self._reception.control
        try:
            match action:
                case act.SayClient(client, message, payload):
                    frames = SERVER.encode(message, payload, version=front.version_of(client))
                    if not front.send(client, frames):
                        return ClientStuck(client) if front.has(client) else ClientUnreachable(client)
                case act.OrderWorker(peer, order):
                    if not control.send(peer, ORDER.encode(order, version=control.version_of(peer))):
                        log.warning("order_not_sent", worker=peer.decode(errors="replace"), kind=type(order).__name__)
                case act.Dispatch(step):
                    self._unsent.append(DATA.encode(step))
                    self._flush()
        except WireError as error:
            log.error("message_not_encoded", action=type(action).__name__, reason=str(error))
        return None

    def _see_to(
        self, action: act.CountDescriptors | act.OpenDoor | act.Admit | act.Solve | act.TryDoor
    ) -> Event | None:
        match action:
            case act.CountDescriptors():
                return DescriptorsCounted(num_descriptors(), descriptor_limit())
            case act.OpenDoor(door):
                self._reception.doors[door].let_in()
            case act.Admit(door, keys):
                self._keeper.admit(door, keys)
            case act.Solve(number, question):
                self._solver.ask(number, question)
            case act.TryDoor(epoch, endpoint):
                task = asyncio.create_task(self._try_door(epoch, endpoint), name="try a door")
                self._tries.add(task)
                task.add_done_callback(self._tries.discard)
        return None

    async def _try_door(self, epoch: int, endpoint: str) -> None:
        self._feed(DoorTried(epoch, await asyncio.to_thread(why_unreachable, endpoint)))

    def _write(self, write: Write) -> Event | None:
        """Queue a write for the journal's thread; its event comes later. Without a journal it counts as written
        immediately. The thread is woken after this turn's messages are sent: otherwise it takes the interpreter from
        the next step, which is about to be sent."""
        if self._writer is None:
            return written(write)
        self._writes.append(write)
        return None

    def _hand_over(self) -> None:
        """Hand this turn's writes to the journal's thread."""
        if self._writes and self._writer is not None:
            writes, self._writes = self._writes, []
            self._writer.write(*writes)

    def _feed_all(self, facts: Sequence[Event]) -> None:
        """Feed events of the journal's thread."""
        for fact in facts:
            self._feed(fact)

    def _flush(self) -> None:
        """Send queued steps, in order, as far as the connection takes them."""
        while self._unsent and self._pipe is not None:
            if not self._pipe.send(self._unsent[0]):
                self._can_retry.set()
                return
            self._unsent.popleft()

    async def _retry_unsent(self) -> None:
        while True:
            await self._can_retry.wait()
            self._can_retry.clear()
            await asyncio.sleep(RETRY_S)
            self._flush()

    def _close_pipe(self) -> None:
        self._unsent.clear()
        if self._pipe is not None:
            self._pipe.close()
            self._pipe = None
