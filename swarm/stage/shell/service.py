"""The worker's process: its threads and its control connection. It decides nothing; the stage's core does.

* the main thread runs asyncio: the control connection, signals, statistics;
* the compute thread (``compute``) owns the data sockets, the core and the computing;
* the beat thread (``beats``) says that the process lives and how far it is, over a socket of its own;
* a loader thread (``loader``) comes and goes with each plan.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import secrets
import signal
import socket
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING

import psutil
import uvloop
import xxhash
import zmq

from swarm import failpoints
from swarm.clock import Clock, SystemClock
from swarm.errors import ConfigError, ForeignMessage, WireError
from swarm.lock.rotation import Home
from swarm.log import Damper, get_logger
from swarm.service import words
from swarm.service.manager import Progress
from swarm.service.unit import Unit
from swarm.stage import actions as act
from swarm.stage.core import EX_CONFIG, StageCore, StageSettings
from swarm.stage.events import BrokerConnected, OrderArrived
from swarm.stage.shell import keeper
from swarm.stage.shell.beats import BeatThread
from swarm.stage.shell.compute import ComputeThread, Outward
from swarm.stage.shell.equipment import Equipment, equip
from swarm.stage.shell.introduction import code_without, introduction
from swarm.stage.shell.leaving import PATIENCE_S, Departure, Farewell
from swarm.stage.shell.probing import LinkProbe
from swarm.stage.shell.vitals import LOOK_S, Vitals, process_figures
from swarm.stage.shell.way import StepDoor, Way, broker_host
from swarm.wire.codec import ORDER, WORKER
from swarm.wire.dealer import DealerChannel, Link
from swarm.wire.door.keys import KeyPair, address_and_key, new_pair
from swarm.wire.greeting import Greeting, greeting, read_greeting, spoken_with, why_strangers
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    NOBODYS,
    PROTOCOL_VERSION,
    Activate,
    AssetPart,
    BrokerKey,
    BrokerKeyKept,
    Fence,
    Hello,
    Leaving,
    LinkCost,
    Order,
    Probed,
    Rejoin,
    Release,
    RotateYours,
    Stats,
    Welcome,
    WorkerMessage,
)
from swarm.wire.schema import schema
from swarm.wire.tensors import pack_bytes

if TYPE_CHECKING:
    from swarm.config import Settings

STATS_EVERY_S = 1.0
STOP_GRACE_S = 2.0
GREET_S = 3.0  # a broker that lives greets back at once
LOOK_AGAIN_S = 30.0  # between two new connections to a broker that says nothing
RENEW_S = 2.0  # between two new connections for orders that can't be understood
OBEY_S = 10.0  # for which an order to join anew may wait for the compute thread; a step ends with its layer by then

Rotate = Callable[[Home], str]

log = get_logger(__name__)


def run(
    settings: Settings,
    pair: KeyPair | None = None,
    home: Home | None = None,
    rotate: Rotate | None = None,
    unit: Unit | None = None,
) -> int:
    """Run until told to stop: by a signal, by the broker, or because it can't work. Returns the exit code. ``pair``: by
    which the broker knows this machine; without one it gets one for this life, which is enough on the broker's own.
    ``home``: where it is kept, and the broker's. ``rotate``: puts another one in its place, and says why not. ``unit``:
    as systemd sees it."""
    failpoints.arm(os.environ)
    # Not with a device: its driver holds memory of this process, too, and what it makes of another user is not known.
    with keeper.kept() if settings.worker.device == "cpu" else nullcontext():
        return _work(settings, pair or new_pair(), home, rotate, unit)


def _work(settings: Settings, pair: KeyPair, home: Home | None, rotate: Rotate | None, unit: Unit | None) -> int:
    equipment = equip(settings, pair)
    gc.freeze()  # else every full collection walks through all of torch, for half a second in which nothing else runs
    code = uvloop.run(_main(settings, equipment, home, rotate, unit))
    gc.freeze()  # the interpreter's last one, too
    return code


async def _main(
    settings: Settings, equipment: Equipment, home: Home | None, rotate: Rotate | None, unit: Unit | None
) -> int:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = WorkerService(settings, equipment, context, SystemClock(), home=home, rotate=rotate, unit=unit)
    try:
        return await service.run()
    finally:
        if service.close():
            context.term()


class WorkerService:
    """The shell around a :class:`StageCore`."""

    def __init__(
        self,
        settings: Settings,
        equipment: Equipment,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        *,
        home: Home | None = None,
        rotate: Rotate | None = None,
        unit: Unit | None = None,
    ) -> None:
        executor = equipment.executor
        self._unit = unit or Unit.nobodys(settings)
        self._progress = Progress()
        self._equipment = equipment
        self._settings = settings
        self._executor = executor
        self._context = context
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._name = settings.worker.name or f"{socket.gethostname()}-{os.getpid()}"
        self._incarnation = f"{self._name}-{secrets.token_hex(4)}"
        self._vitals = Vitals(clock)
        self._core = StageCore(
            StageSettings(
                self._name,
                self._incarnation,
                executor.manifest.num_layers,
                equipment.log_bytes,
                settings.log.profile_every,
            )
        )
        self._home, self._rotate = home, rotate
        self._looked_at = float("-inf")
        self._rotation: asyncio.Task[None] | None = None
        self._way = Way(equipment.pair, broker_host(settings))
        self._door = StepDoor.open(settings, equipment.pair)
        self._compute = ComputeThread(
            self._way,
            door=self._door,
            core=self._core,
            executor=executor,
            vitals=self._vitals,
            clock=clock,
            outward=self._from_compute_thread,
            tells_steps=settings.log.level == "debug",
        )
        self._control = DealerChannel(
            context,
            control_endpoint(settings.client.url),
            self._incarnation.encode(),
            ORDER.frame_limit_bytes,
            equipment.pair,
        )
        self._beats: BeatThread | None = None
        self._connected = self._closed = False
        self._spoken = PROTOCOL_VERSION  # with this broker
        self._ungreeted: object | None = None  # the connection on which the broker's greeting is awaited
        self._damper = Damper()  # for orders that can't be understood
        self._renewed_at: float | None = None
        self._up = asyncio.Event()
        self._probe = LinkProbe(self._send, clock)
        self._link: LinkCost | None = None
        self._link_is_known = False  # or that it won't be
        self._departure = Departure()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._lineage = NOBODYS  # of the broker that welcomed this worker last

    async def run(self) -> int:
        """Serve until something ends it; returns the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._signalled, number)
        self._unit.listen(self._loop)
        self._loop.set_exception_handler(self._fail)
        self._compute.start()
        log.info(
            "worker_started",
            worker=self._name,
            broker=address_and_key(self._settings.client.url)[0],
            model=self._executor.manifest.name,
        )
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._hear_orders()),
                group.create_task(self._measure_link()),
                group.create_task(self._tell_stats()),
                group.create_task(self._watch_lag()),
            ]
            await self._stop.wait()
            for task in loops:
                task.cancel()
        if self._compute.failure is not None:
            self._exit_code = 1
        return self._exit_code

    def close(self) -> bool:
        """End threads and sockets; False if the compute thread is still busy and holds its sockets."""
        if self._beats is not None:
            self._beats.stop()
        ended = self._compute.stop(STOP_GRACE_S)
        self._closed = True  # what the compute thread handed over last may still be waiting for its turn
        self._control.close()
        return ended

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A callback raised: that is a bug, and a worker that limps on would hide it. End; somebody starts us again."""
        loop.default_exception_handler(context)
        self._exit_code = 1
        self._stop.set()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _signalled(self, number: signal.Signals) -> None:
        is_member = self._connected and self._core.welcome is not None
        farewell = self._departure.signalled(number, is_member=is_member)
        log.info("worker_asked_to_end", by=number.name, at_once=farewell is Farewell.END)
        self._unit.manager.stopping("leaving: others take over its layers")
        if farewell is Farewell.TELL:
            self._send(Leaving(incarnation=self._incarnation, reason=f"it was asked to end by {number.name}"))
            self._loop.call_later(PATIENCE_S, self._say_goodbye, Farewell.END)
        self._say_goodbye(farewell)

    def _say_goodbye(self, farewell: Farewell | None) -> None:
        if farewell is Farewell.END and self._departure.exit_code is not None:
            self._exit_code = self._departure.exit_code
            self._stop.set()

    # --- control -----------------------------------------------------------------------------------------------------

    async def _hear_orders(self) -> None:
        async for event in self._control:
            if event is Link.UP:
                self._control.send(greeting(schema()))
                waits_for = self._ungreeted = object()
                self._loop.call_later(GREET_S, self._miss_greeting, waits_for)
            elif event is Link.DOWN:
                self._connected, self._ungreeted = False, None
                self._say_goodbye(self._departure.disconnected())
                log.warning("broker_gone", note="knocking until it is back")
            elif event is Link.TURNED_AWAY:
                self._turned_away()
            elif event is Link.UNHEARD:
                self._look_at_home()
            elif not isinstance(event, Link):
                self._take_order(event)

    def _turned_away(self) -> None:
        """Our key opens that door no more: perhaps since this machine has another one by now. Connections that stand
        are the broker's to end."""
        if not self._takes_up():
            self._perform(act.Exit(EX_CONFIG, _turned_away(self._settings.client.url)), None)

    def _look_at_home(self) -> None:
        """Nobody heard us out: perhaps the broker has another key, which another process of this machine was told."""
        if self._clock.now() - self._looked_at >= RENEW_S:
            self._looked_at = self._clock.now()
            if not self._takes_up() and (left_out := self._damper.asks(self._clock.now())) is not None:
                note = "who listens there has another key than is known here, or is busy; invited anew: --join"
                log.warning(
                    "broker_hangs_up", at=address_and_key(self._settings.client.url)[0], note=note, left_out=left_out
                )

    def _takes_up(self) -> bool:
        """Knock with the keys that are kept by now, if they are others."""
        kept = None if self._home is None else self._home.take_up()
        if kept is None:
            return False
        log.info("key_changed", worker=self._name, key=kept.pair.public[:16], broker=kept.broker[:16])
        self._way.pair = kept.pair
        self._control.move(control_endpoint(kept.endpoint))
        self._control.renew(kept.pair)
        return True

    def _broker_moves(self, key: str) -> None:
        """The broker has another key: it is kept, and used at the next connection."""
        if self._home is None:
            return
        try:
            kept = self._home.broker_is(key)
        except ConfigError as error:
            log.error("broker_key_not_kept", worker=self._name, key=key, reason=str(error))
            return
        log.info("broker_key_kept", worker=self._name, broker=key[:16])
        self._control.move(control_endpoint(kept.endpoint))
        self._send(BrokerKeyKept(key=key))

    async def _change_key(self, home: Home, rotate: Rotate) -> None:
        """Who governs wants another key of this machine. The old one's end is seen by being turned away."""
        if reason := await asyncio.to_thread(rotate, home):
            log.error("key_not_changed", worker=self._name, reason=reason)

    def _greeted(self, theirs: Greeting) -> None:
        """Take the broker's greeting; before it, nothing else is said to it."""
        self._ungreeted = None
        reason = why_strangers(theirs, schema())
        if reason is not None:
            reason = (
                f"this worker can't talk to the broker at {address_and_key(self._settings.client.url)[0]}: {reason}"
            )
            self._perform(act.Exit(EX_CONFIG, reason), None)
            return
        self._spoken = spoken_with(theirs)
        self._connected = True
        self._up.set()
        if self._link_is_known:
            self._compute.post(BrokerConnected())

    def _miss_greeting(self, waits_for: object) -> None:
        if waits_for is self._ungreeted:
            url = self._settings.client.url
            log.error("broker_does_not_greet", url=url, note="it is no broker, or one of an older version")

    async def _measure_link(self) -> None:
        """Measure the way to the broker once, before the first Hello, which tells of it."""
        await self._up.wait()
        self._link = await self._probe.measure()
        self._link_is_known = True
        if self._connected:
            self._compute.post(BrokerConnected())

    def _take_order(self, frames: list[memoryview]) -> None:
        theirs = read_greeting(frames)
        if theirs is not None:
            self._greeted(theirs)
            return
        try:
            order, _ = ORDER.decode(frames)
        except ForeignMessage as error:
            reason = f"the broker says what this worker does not understand ({error}): install the same version on both"
            self._perform(act.Exit(EX_CONFIG, reason), None)
            return
        except WireError as error:
            self._refuse_order(str(error))
            return
        if isinstance(order, Probed):
            self._probe.answered(order.ticket)
            return
        if isinstance(order, BrokerKey):
            self._broker_moves(order.key)
            return
        if isinstance(order, RotateYours):
            if self._home and self._rotate and (self._rotation is None or self._rotation.done()):
                self._rotation = self._loop.create_task(self._change_key(self._home, self._rotate), name="change key")
            return
        if isinstance(order, Release):
            self._say_goodbye(self._departure.released())
        if isinstance(order, Rejoin):
            self._loop.call_later(OBEY_S, self._end_if_stuck, self._clock.now())
        self._raise_fence_flag(order)
        self._compute.post(OrderArrived(order))

    def _refuse_order(self, reason: str) -> None:
        """Knock anew: the lost order may be the one that everybody waits for, and isn't said again. We say Hello
        with what we hold, and the broker goes on from there; not too often, should it never say what we understand."""
        now = self._clock.now()
        if (left_out := self._damper.asks(now)) is not None:
            log.warning("order_refused", reason=reason, left_out=left_out)
        if self._renewed_at is None or now - self._renewed_at >= RENEW_S:
            self._renewed_at = now
            self._control.renew()

    def _end_if_stuck(self, ordered_at: float) -> None:
        """End a worker that was told to join anew, and whose compute thread stands still. Nobody can use this
        process any more; whoever starts workers shall start another."""
        turned_at = self._vitals.turned_at
        if turned_at is not None and turned_at < ordered_at and not self._stop.is_set():
            log.error("worker_is_stuck", worker=self._name, stands_still_s=round(self._clock.now() - turned_at, 1))
            self._exit_code = 1
            self._stop.set()

    def _raise_fence_flag(self, order: Order) -> None:
        """The compute thread may be in the middle of a long step: forward looks at this flag between layers."""
        if isinstance(order, Welcome) and order.lineage != self._lineage:
            self._lineage, self._vitals.fence = order.lineage, order.epoch
        if isinstance(order, Fence | Activate) and order.lineage == self._lineage:
            self._vitals.fence = max(self._vitals.fence, order.epoch)

    async def _tell_stats(self) -> None:
        process = psutil.Process()
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            with contextlib.suppress(OSError):  # reading it takes a descriptor, and there may be none
                self._vitals.memory_bytes = process.memory_info().rss
                self._vitals.process = process_figures(process)
            self._tell_manager()
            if not self._compute.alive:
                self._stop.set()
            if self._core.parked:
                self._look_for_the_broker()
            elif self._core.welcome is not None:
                self._send(Stats(incarnation=self._incarnation, values=self._stats()))

    def _tell_manager(self) -> None:
        """It serves what it is for when the broker has let it in."""
        core, manager = self._core, self._unit.manager
        if not manager.is_there:
            return
        said = words.of_worker(
            is_welcome=core.welcome is not None and not core.parked,
            broker=address_and_key(self._settings.client.url)[0],
            epoch=core.active,
            layers=str(core.layers or ""),
            condition=self._vitals.shown,
        )
        (manager.ready if core.welcome is not None else manager.status)(said)

    def _look_for_the_broker(self) -> None:
        """No word of it for long: perhaps over a connection that nobody will ever end, since this machine's address is
        another one by now. Then others can't reach this worker's door either: whoever starts workers shall start it."""
        if now_at := self._door.moved_to(self._settings):
            log.error("address_changed", worker=self._name, was=self._door.host, is_now=now_at)
            self._exit_code = 1
            self._stop.set()
        now = self._clock.now()
        if now - (self._renewed_at or self._core.heard_at) >= LOOK_AGAIN_S:
            self._renewed_at = now
            self._control.renew()

    def _stats(self) -> dict[str, float]:
        """Counters of the core and the executor. Read across threads: a value may be a moment old."""
        values = dict(self._core.counters) | self._executor.stats() | self._core.statistics.values()
        values["log_bytes"] = self._core.log.num_bytes
        values["log_evicted"] = self._core.log.num_evicted
        values["sequences"] = len(self._core.sequences)
        values["resident_bytes"] = self._vitals.memory_bytes
        values["knockers_refused"] = self._door.pull.num_refused
        values["door_shut"] = self._door.pull.num_shut
        values["threads"] = threading.active_count()
        values |= self._vitals.process
        return {name: float(value) for name, value in values.items()}

    async def _watch_lag(self) -> None:
        while True:
            self._vitals.loop_turned()
            if self._progress.is_made(self._vitals.turned_at, self._vitals.progress):
                self._unit.manager.alive()
            await asyncio.sleep(LOOK_S)
            if failpoints.armed:
                failpoints.reached("loop.turn")

    def _send(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Send a message, unless its own schema refuses it; if the broker waits for it, that has a deadline."""
        try:
            self._say(message, payload)
        except WireError as error:
            log.error("message_not_encoded", kind=type(message).__name__, reason=str(error))

    def _say(self, message: WorkerMessage, payload: bytes | None = None) -> None:
        """Send a message. Raises WireError."""
        kind = type(message).__name__
        if failpoints.armed:
            failpoints.reached(f"tell.{kind.lower()}")
        frames = WORKER.encode(message, payload, version=self._spoken)
        if self._closed or not self._control.send(frames):
            log.warning("control_not_sent", kind=kind)
        if failpoints.armed:
            failpoints.reached(f"told.{kind.lower()}")

    # --- what the core wants of the control side ---------------------------------------------------------------------

    def _from_compute_thread(self, action: Outward) -> None:
        message = self._hello() if isinstance(action, act.Introduce) else None
        self._loop.call_soon_threadsafe(self._perform, action, message)

    def _perform(self, action: Outward, hello: Hello | None) -> None:
        match action:
            case act.Introduce():
                assert hello is not None
                if self._connected:  # else it is done when we are
                    self._introduce(hello)
            case act.Tell(message):
                self._send(message)
            case act.StartBeats(endpoint, interval_s):
                self._start_beats(endpoint, interval_s)
            case act.SendAssets(names):
                self._send_assets(names)
            case act.Exit(code, reason):
                self._exit_code = self._departure.exit_code or code
                (log.error if code else log.info)("worker_ends", reason=reason, code=self._exit_code)
                self._stop.set()

    def _introduce(self, hello: Hello) -> None:
        """A message that its own schema refuses is nobody's to answer: without an introduction there is no work."""
        try:
            self._say(hello)
        except WireError as error:
            reason = (
                f"this worker can't introduce itself to the broker: {error}; correct what this names, then start it"
            )
            self._perform(act.Exit(code_without(hello), reason), None)

    def _hello(self) -> Hello:
        """Introduce the worker, in the compute thread: what is held belongs to it."""
        return introduction(self._core, self._equipment, self._door, self._way.pair.public, self._link)

    def _start_beats(self, endpoint: str, interval_s: float) -> None:
        if self._beats is not None:
            self._beats.stop()
        self._beats = BeatThread(self._way, endpoint, interval_s, self._incarnation, self._vitals)
        self._beats.start()

    def _send_assets(self, names: tuple[str, ...]) -> None:
        for name in names:
            data = (self._executor.checkpoint.folder / name).read_bytes()
            log.debug("asset_sent", name=name, digest=xxhash.xxh3_128_hexdigest(data))
            for offset in range(0, max(1, len(data)), ASSET_PART_BYTES):
                part = data[offset : offset + ASSET_PART_BYTES]
                message = AssetPart(name=name, offset=offset, total=len(data), payload=pack_bytes(part))
                self._send(message, part)


def _turned_away(url: str) -> str:
    return (
        f"the broker at {address_and_key(url)[0]} does not take this machine's key: it was revoked, or is not a "
        "worker's; join again (swarm worker --join)"
    )


def control_endpoint(url: str) -> str:
    """Workers knock one port above the clients' door."""
    scheme, _, rest = url.partition("://")
    host, _, port = rest.rpartition(":")
    if scheme != "tcp" or not port.isdecimal():
        raise ConfigError(f"{url!r} is no broker's address: write it as tcp://HOST:PORT, say tcp://127.0.0.1:5700")
    return f"tcp://{host}:{int(port) + 1}"
