"""The broker's process: sockets and timers around the core. It decides nothing.

One asyncio loop owns everything. Each loop below turns what arrives into an event; ``_feed`` hands it to the core and
carries out what the core asks for. Four doors: clients at the port, workers' control at the port after it, beats and
finished steps at ports of their own that workers are told when they join.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import deque
from typing import TYPE_CHECKING

import uvloop
import zmq

from swarm import __version__
from swarm.broker import actions as act
from swarm.broker.core import BrokerCore, BrokerSettings
from swarm.broker.events import (
    AssetPartArrived,
    BeatHeard,
    ClientSaid,
    ClientUnreachable,
    Event,
    MessageRefused,
    StepFinished,
    Tick,
    WorkerDisconnected,
    WorkerSaid,
    described,
)
from swarm.broker.health import HealthSettings
from swarm.broker.journal import MemoryJournal
from swarm.broker.plan.load import Load
from swarm.broker.planning import PlanSettings
from swarm.broker.rebuild import RebuildSettings
from swarm.broker.requests import RequestSettings
from swarm.broker.scheduler import SchedulerSettings
from swarm.broker.wanted import PlanRules
from swarm.clock import Clock, SystemClock
from swarm.errors import WireError
from swarm.log import get_logger
from swarm.wire.channel import Arrived, AsyncPullChannel, PushChannel, RouterChannel
from swarm.wire.codec import BEAT, CLIENT, DATA, ORDER, SERVER, WORKER
from swarm.wire.messages import AssetPart, LayerRange, Malformed, StepDone, WorkerMessage

if TYPE_CHECKING:
    from swarm.config import Settings

TICK_S = 0.05
RETRY_S = 0.002  # how soon a step that could not be sent is tried again: a fresh edge takes a moment to connect
STEP_QUEUE = 64

log = get_logger(__name__)


def run(settings: Settings) -> int:
    """Run until SIGTERM or SIGINT; the process's exit code."""
    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    try:
        service = BrokerService(settings, context, SystemClock())
        try:
            await service.run()
        finally:
            service.close()
    finally:
        context.term()
    return 0


class BrokerService:
    """The shell around a :class:`BrokerCore`."""

    def __init__(self, settings: Settings, context: zmq.Context[zmq.Socket[bytes]], clock: Clock) -> None:
        self._context = context
        self._clock = clock
        self._journal = MemoryJournal()
        self._pipe: PushChannel | None = None
        self._unsent: deque[act.Dispatch] = deque()  # bounded by the core: never more than the steps in flight
        self._can_retry = asyncio.Event()
        self._stop = asyncio.Event()
        self._tells_events = settings.log.level == "debug"
        host, port = settings.broker.host, settings.broker.port
        self._front = RouterChannel(context, host, port, CLIENT.frame_limit_bytes)
        self._control = RouterChannel(context, host, port + 1, WORKER.frame_limit_bytes)
        self._beats = AsyncPullChannel(context, host, BEAT.frame_limit_bytes, 1024)
        self._steps = AsyncPullChannel(context, host, DATA.frame_limit_bytes, STEP_QUEUE)
        self._core = BrokerCore(_core_settings(settings, self._beats.endpoint, self._steps.endpoint), clock.now())
        log.info("broker_listens", clients=self._front.endpoint, workers=self._control.endpoint)

    async def run(self) -> None:
        """Serve until told to stop by a signal."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._stop.set)
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._serve_clients()),
                group.create_task(self._serve_workers()),
                group.create_task(self._hear_beats()),
                group.create_task(self._take_finished_steps()),
                group.create_task(self._retry_unsent()),
                group.create_task(self._tick()),
            ]
            await self._stop.wait()
            for task in loops:
                task.cancel()
        log.info("broker_stops")

    def close(self) -> None:
        for channel in (self._front, self._control, self._beats, self._steps):
            channel.close()
        self._close_pipe()

    # --- what arrives ------------------------------------------------------------------------------------------------

    async def _serve_clients(self) -> None:
        async for event in self._front:
            if not isinstance(event, Arrived):
                self._feed(ClientUnreachable(event.peer))
                continue
            try:
                message, _ = CLIENT.decode(event.frames)
            except WireError as error:
                log.warning("client_message_refused", client=event.peer.hex(), reason=str(error))
                self._front.send(event.peer, SERVER.encode(Malformed(reason=str(error)[:4000])))
                self._feed(MessageRefused("client"))
                continue
            self._feed(ClientSaid(event.peer, message))

    async def _serve_workers(self) -> None:
        async for event in self._control:
            if not isinstance(event, Arrived):
                self._feed(WorkerDisconnected(event.peer))
                continue
            try:
                message, payload = WORKER.decode(event.frames)
            except WireError as error:
                log.warning("worker_message_refused", worker=event.peer.decode(errors="replace"), reason=str(error))
                self._feed(MessageRefused("control"))
                continue
            self._worker_said(event.peer, message, payload)

    def _worker_said(self, peer: bytes, message: WorkerMessage, payload: memoryview | None) -> None:
        if not isinstance(message, AssetPart):
            self._feed(WorkerSaid(peer, message))
            return
        data = b"" if payload is None else bytes(payload)
        self._feed(AssetPartArrived(peer, message.name, message.offset, message.total, data))

    async def _hear_beats(self) -> None:
        async for frames in self._beats:
            try:
                beat, _ = BEAT.decode(frames)
            except WireError as error:
                log.warning("beat_refused", reason=str(error))
                self._feed(MessageRefused("beat"))
                continue
            self._feed(BeatHeard(beat))

    async def _take_finished_steps(self) -> None:
        async for frames in self._steps:
            try:
                message, _ = DATA.decode(frames)
            except WireError as error:
                log.warning("step_refused", reason=str(error))
                self._feed(MessageRefused("data"))
                continue
            if isinstance(message, StepDone):
                self._feed(StepFinished(message))
            else:
                log.warning("unexpected_on_data", kind=type(message).__name__)

    async def _tick(self) -> None:
        while True:
            self._feed(Tick())
            await asyncio.sleep(TICK_S)

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _feed(self, event: Event) -> None:
        """Hand a fact to the core and carry out its orders; what follows from those at once is fed in turn."""
        facts = deque([event])
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
        match action:
            case act.SayClient(client, message, payload):
                if not self._front.send(client, SERVER.encode(message, payload)):
                    return ClientUnreachable(client)
            case act.Dispatch():
                self._unsent.append(action)
                self._flush()
            case act.WriteTokens() | act.WriteAcceptance() | act.WriteEpoch() | act.WriteEnd():
                return self._journal.write(action)
            case act.OrderWorker(peer, message):
                if not self._control.send(peer, ORDER.encode(message)):
                    log.warning("order_not_sent", worker=peer.decode(errors="replace"), kind=type(message).__name__)
            case act.OpenPipe(_, endpoint):
                self._close_pipe()
                self._pipe = PushChannel(self._context, endpoint)
            case act.ClosePipe():
                self._close_pipe()
            case act.Note(event, level, fields):
                getattr(log, level)(event, **fields)
        return None

    def _flush(self) -> None:
        """Send what can be sent now, in order."""
        while self._unsent and self._pipe is not None:
            if not self._pipe.send(DATA.encode(self._unsent[0].step)):
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


def _core_settings(settings: Settings, beat_endpoint: str, data_endpoint: str) -> BrokerSettings:
    broker, health = settings.broker, settings.health
    return BrokerSettings(
        beat_endpoint=beat_endpoint,
        data_endpoint=data_endpoint,
        version=__version__,
        beat_interval_s=settings.worker.beat_interval_s,
        lease_s=settings.worker.lease_s,
        prefix_cache=broker.prefix_cache and broker.kv_cache,
        trace_steps=broker.trace_steps,
        profile_every=settings.log.profile_every,
        run=f"{secrets.token_hex(2)}-",
        requests=RequestSettings(broker.max_queue, broker.client_grace_s, broker.retain_s, broker.too_large_patience_s),
        scheduler=SchedulerSettings(
            mode=broker.mode,
            step_tokens=broker.step_tokens,
            prefill_chunk=broker.prefill_chunk,
            max_running=broker.max_running,
            kv_cache=broker.kv_cache,
            step_target_s=broker.step_target_s,
            kv_headroom=broker.kv_headroom,
            max_passed=broker.max_passed,
            max_passed_s=broker.max_passed_s,
        ),
        plan=PlanSettings(
            rules=_rules(settings),
            min_workers=broker.min_workers,
            settle_s=broker.settle_s,
            prepare_timeout_s=broker.prepare_timeout_s,
            activate_timeout_s=broker.activate_timeout_s,
            max_sequences=settings.worker.max_sequences,
            rebuild=RebuildSettings(settings.recovery.chunk, from_tokens=settings.recovery.source == "tokens"),
        ),
        health=HealthSettings(health.beat_timeout_s, health.hang_factor, health.hang_min_s),
    )


def _rules(settings: Settings) -> PlanRules:
    plan, broker = settings.plan, settings.broker
    pins: dict[str, LayerRange] = {}
    for name, text in plan.pins.items():
        first, _, last = text.partition("-")
        pins[name] = LayerRange(int(first), int(last or first) + 1)
    return PlanRules(
        mode=broker.mode,
        objective=plan.objective,
        load=Load(plan.rows, plan.context, plan.prompt),
        kv_positions=plan.kv_positions,
        margin=plan.margin,
        step_positions=broker.step_tokens,
        max_running=broker.max_running,
        min_memory_bytes=int(plan.min_memory),
        min_layers_per_s=plan.min_layers_per_s,
        pins=pins,
        caps=dict(plan.caps),
        exclude=frozenset(plan.exclude),
    )
