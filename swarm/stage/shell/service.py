"""The worker's process: starts its threads and passes the broker's orders on. It decides nothing; the stage's core
does.

* the main thread runs asyncio: the control connection, signals, statistics;
* the compute thread (``compute``) owns the data sockets, the core and the computing;
* the heartbeat thread (``heartbeat``) reports, over a socket of its own, that the process is alive and how far it is;
* a loader thread (``loader``) runs for each load.
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
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING

import psutil
import uvloop
import xxhash
import zmq
from msgspec.structs import replace

from swarm import failpoints
from swarm.clock import Clock, SystemClock
from swarm.lock.rotation import Home
from swarm.log import get_logger
from swarm.service import words
from swarm.service.manager import Progress
from swarm.service.unit import Unit
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import BrokerConnected, OrderArrived
from swarm.stage.shell import keeper
from swarm.stage.shell.beats import BeatThread
from swarm.stage.shell.compute import ComputeThread, Outward
from swarm.stage.shell.control import LOOK_AGAIN_S, Control, Rotate, as_told, introduction
from swarm.stage.shell.equipment import Equipment, equip
from swarm.stage.shell.leaving import PATIENCE_S, Departure, Farewell
from swarm.stage.shell.vitals import LOOK_S, Vitals, process_figures
from swarm.stage.shell.way import StepDoor, Way, broker_host, figures_of
from swarm.wire.door.keys import KeyPair, address_and_key, new_pair
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    NOBODYS,
    Activate,
    AssetPart,
    Fence,
    Hello,
    Leaving,
    Order,
    Rejoin,
    Release,
    Stats,
    Welcome,
)
from swarm.wire.tensors import pack_bytes

if TYPE_CHECKING:
    from swarm.config import Settings

STATS_EVERY_S = 1.0
STOP_GRACE_S = 2.0
# how long an order to rejoin may wait for the compute thread; a running step reaches the end of its layer by then
OBEY_S = 10.0


log = get_logger(__name__)


def run(
    settings: Settings,
    pair: KeyPair | None = None,
    home: Home | None = None,
    rotate: Rotate | None = None,
    unit: Unit | None = None,
) -> int:
    """Run until a signal, the broker or an error ends the worker; return the exit code.

    ``pair``: key pair by which the broker recognises this machine; by default a temporary one, which suffices on the
    broker's own machine. ``credentials``: where the key pair and the broker's key are stored. ``rotate``: replaces the
    key pair and returns an error text. ``unit``: the process as systemd sees it.
    """
    failpoints.arm(os.environ)
    # Not with a device: its driver holds memory of this process, too, and its handling of a second task is not known.
    with keeper.kept() if settings.worker.device == "cpu" else nullcontext():
        return _work(settings, pair or new_pair(), home, rotate, unit)


def _work(settings: Settings, pair: KeyPair, home: Home | None, rotate: Rotate | None, unit: Unit | None) -> int:
    dtype = ""
    while True:
        equipment = equip(settings, pair, dtype)
        # otherwise every full collection walks through all of torch: half a second in which nothing else runs
        gc.freeze()
        ended = uvloop.run(_main(settings, equipment, home, rotate, unit))
        gc.freeze()  # the interpreter's last collection, too
        if isinstance(ended, int):
            return ended
        dtype = ended.dtype
        gc.unfreeze()  # so that the former resources can be collected


async def _main(
    settings: Settings, equipment: Equipment, home: Home | None, rotate: Rotate | None, unit: Unit | None
) -> int | act.Recast:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = WorkerService(settings, equipment, context, SystemClock(), home=home, rotate=rotate, unit=unit)
    try:
        return await service.run()
    finally:
        if service.close():
            context.term()


class WorkerService:
    """Shell around a :class:`StageCore`."""

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
        self._told = as_told(self._unit.shown("worker", settings))  # the settings, for Hello
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
                equipment.dtypes,
            )
        )
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
        self._control = Control(
            context,
            settings,
            self._way,
            clock,
            self,
            name=self._name,
            incarnation=self._incarnation,
            home=home,
            rotate=rotate,
        )
        self._beats: BeatThread | None = None
        self._departure = Departure()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._recast: act.Recast | None = None  # set when the worker restarts with another dtype
        self._lineage = NOBODYS  # of the broker that welcomed this worker last

    async def run(self) -> int | act.Recast:
        """Serve until the worker ends. Return the exit code, or the order to restart with another dtype."""
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
                group.create_task(self._control.hear()),
                group.create_task(self._control.measure_link()),
                group.create_task(self._tell_stats()),
                group.create_task(self._watch_lag()),
            ]
            await self._stop.wait()
            for task in loops:
                task.cancel()
        if self._compute.failure is not None:
            self._exit_code = 1
        return self._recast or self._exit_code

    def close(self) -> bool:
        """Stop threads and close sockets. Returns False if the compute thread is still busy and holds its sockets."""
        if self._beats is not None:
            self._beats.stop()
        ended = self._compute.stop(STOP_GRACE_S)
        self._control.close()
        return ended

    def _fail(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End after an exception in a callback, which is a bug: a worker that limps on would hide it. A supervisor
        restarts it."""
        loop.default_exception_handler(context)
        self._exit_code = 1
        self._stop.set()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _signalled(self, number: signal.Signals) -> None:
        is_member = self._control.is_connected and self._core.welcome is not None
        farewell = self._departure.signalled(number, is_member=is_member)
        log.info("worker_asked_to_end", by=number.name, at_once=farewell is Farewell.END)
        self._unit.manager.stopping("leaving: other workers take over its layers")
        if farewell is Farewell.TELL:
            self._control.send(Leaving(incarnation=self._incarnation, reason=f"it received {number.name}"))
            self._loop.call_later(PATIENCE_S, self._say_goodbye, Farewell.END)
        self._say_goodbye(farewell)

    def _say_goodbye(self, farewell: Farewell | None) -> None:
        if farewell is Farewell.END and self._departure.exit_code is not None:
            self._exit_code = self._departure.exit_code
            self._stop.set()

    # --- control -----------------------------------------------------------------------------------------------------

    def connected(self) -> None:
        """Have the core send Hello."""
        self._compute.post(BrokerConnected())

    def lost(self) -> None:
        """Handle the loss of the broker: a shutdown need not wait for its release."""
        self._say_goodbye(self._departure.disconnected())

    def ordered(self, order: Order) -> None:
        """Pass an order to the core, which lives in the compute thread."""
        if isinstance(order, Release):
            self._say_goodbye(self._departure.released())
        if isinstance(order, Rejoin):
            self._loop.call_later(OBEY_S, self._end_if_stuck, self._clock.now())
        self._raise_fence_flag(order)
        self._compute.post(OrderArrived(order))

    def end(self, code: int, reason: str) -> None:
        """End this process: it can't work here."""
        self._exit_code = self._departure.exit_code or code
        (log.error if code else log.info)("worker_ends", reason=reason, code=self._exit_code)
        self._stop.set()

    def _begin_anew(self, recast: act.Recast) -> None:
        """Restart with weights of another type, unless this process is ending."""
        if not self._stop.is_set():
            log.info("worker_recast", dtype=recast.dtype, reason=recast.reason)
            self._recast = recast
            self._stop.set()

    def _end_if_stuck(self, ordered_at: float) -> None:
        """End a worker whose compute thread has not reacted to an order to rejoin.

        This process is of no more use to the broker; its supervisor is to start another one.
        """
        turned_at = self._vitals.turned_at
        if turned_at is not None and turned_at < ordered_at and not self._stop.is_set():
            log.error("worker_is_stuck", worker=self._name, stands_still_s=round(self._clock.now() - turned_at, 1))
            self._exit_code = 1
            self._stop.set()

    def _raise_fence_flag(self, order: Order) -> None:
        """Update the fence flag directly: during a long step, ``forward`` reads it between layers."""
        if isinstance(order, Welcome) and order.lineage != self._lineage:
            self._lineage, self._vitals.fence = order.lineage, order.epoch
        if isinstance(order, Fence | Activate) and order.lineage == self._lineage:
            self._vitals.fence = max(self._vitals.fence, order.epoch)

    async def _tell_stats(self) -> None:
        process = psutil.Process()
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            with contextlib.suppress(OSError):  # reading needs a descriptor, and there may be none left
                self._vitals.memory_bytes = process.memory_info().rss
                self._vitals.process = process_figures(process)
            self._tell_manager()
            if not self._compute.alive:
                self._stop.set()
            if self._core.parked:
                self._look_for_the_broker()
            elif self._core.welcome is not None:
                self._control.send(Stats(incarnation=self._incarnation, values=self._stats()))

    def _tell_manager(self) -> None:
        """Report the state to the service manager; the worker is ready once the broker has welcomed it."""
        core, manager = self._core, self._unit.manager
        if not manager.is_there:
            return
        said = words.of_worker(
            is_welcome=core.welcome is not None and not core.parked,
            broker=address_and_key(self._settings.client.url)[0],
            epoch=core.active,
            layers=core.layers.in_words if core.layers else "",
            condition=self._vitals.shown,
        )
        (manager.ready if core.welcome is not None else manager.status)(said)

    def _look_for_the_broker(self) -> None:
        """Reconnect to a broker that has long been silent.

        The connection may be dead without an error because this machine's address has changed. Then other workers can't
        reach this worker's listener either, and its supervisor is to restart it.
        """
        if now_at := self._door.moved_to(self._settings):
            log.error("address_changed", worker=self._name, was=self._door.host, is_now=now_at)
            self._exit_code = 1
            self._stop.set()
        self._control.renew_after(self._core.membership.heard_at, LOOK_AGAIN_S)

    def _stats(self) -> dict[str, float]:
        """Return counters of the core and the executor. They are read across threads: a value may be a moment old."""
        values = dict(self._core.counters) | self._executor.stats() | self._core.statistics.values()
        values["log_bytes"] = self._core.log.num_bytes
        values["log_evicted"] = self._core.log.num_evicted
        values["sequences"] = len(self._core.sequences)
        values["resident_bytes"] = self._vitals.memory_bytes
        values["knockers_refused"] = self._door.pull.num_refused
        values["door_shut"] = self._door.pull.num_shut
        values["threads"] = threading.active_count()
        values |= self._vitals.process | figures_of(self._compute.seen_of_next())
        values["clock_s"] = time.time()  # the broker compares it with its own clock on arrival
        return {name: float(value) for name, value in values.items()}

    async def _watch_lag(self) -> None:
        while True:
            self._vitals.loop_turned()
            if self._progress.is_made(self._vitals.turned_at, self._vitals.progress):
                self._unit.manager.alive()
            await asyncio.sleep(LOOK_S)
            if failpoints.armed:
                failpoints.reached("loop.turn")

    # --- actions of the core -----------------------------------------------------------------------------------------

    def _from_compute_thread(self, action: Outward) -> None:
        message = self._hello() if isinstance(action, act.Introduce) else None
        self._loop.call_soon_threadsafe(self._perform, action, message)

    def _perform(self, action: Outward, hello: Hello | None) -> None:
        match action:
            case act.Introduce():
                assert hello is not None
                if self._control.is_connected:  # otherwise Hello is sent after the connection is made
                    self._control.introduce(hello)
            case act.Tell(message):
                self._control.send(message)
            case act.StartBeats(endpoint, interval_s):
                self._start_beats(endpoint, interval_s)
            case act.SendAssets(names):
                self._send_assets(names)
            case act.Exit(code, reason):
                self.end(code, reason)
            case act.Recast():
                self._begin_anew(action)

    def _hello(self) -> Hello:
        """Build Hello in the compute thread, which owns the stored sequences."""
        hello = introduction(self._core, self._equipment, self._door, self._way.pair.public, self._control.link)
        return replace(hello, settings=self._told)

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
                self._control.send(message, part)
