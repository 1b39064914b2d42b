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
import sys
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
from swarm.auth.rotation import CredentialStore
from swarm.clock import Clock, SystemClock
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.engine.device import resolve_device
from swarm.stage.events import BrokerConnected, OrderArrived
from swarm.stage.shell import fast_exit
from swarm.stage.shell.compute import ComputeThread, ControlAction
from swarm.stage.shell.connections import PeerConnector, StepListener, broker_host, tcp_figures
from swarm.stage.shell.control import (
    RECONNECT_SILENT_S,
    ControlConnection,
    RotateKeyPair,
    build_hello,
    settings_message,
)
from swarm.stage.shell.heartbeat import HeartbeatThread
from swarm.stage.shell.kv_receiver import open_kv_listener
from swarm.stage.shell.resources import WorkerResources, open_resources
from swarm.stage.shell.shutdown import RELEASE_TIMEOUT_S, ShutdownAction, ShutdownSequence
from swarm.stage.shell.spill_thread import open_spill_files
from swarm.stage.shell.vitals import LOOP_INTERVAL_S, Vitals, read_process_usage
from swarm.systemd import status_text
from swarm.systemd.manager import ProgressDetector
from swarm.systemd.service_context import ServiceContext
from swarm.wire.messages import (
    ASSET_PART_BYTES,
    NO_LINEAGE,
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
from swarm.wire.transport.keys import KeyPair, address_and_key, new_pair

if TYPE_CHECKING:
    from swarm.config import Settings

STATS_EVERY_S = 1.0
STOP_GRACE_S = 2.0
# how long an order to rejoin may wait for the compute thread; a running step reaches the end of its layer by then
REJOIN_TIMEOUT_S = 10.0


log = get_logger(__name__)


def run(
    settings: Settings,
    pair: KeyPair | None = None,
    credentials: CredentialStore | None = None,
    rotate: RotateKeyPair | None = None,
    unit: ServiceContext | None = None,
) -> int:
    """Run until a signal, the broker or an error ends the worker; return the exit code.

    ``pair``: key pair by which the broker recognises this machine; by default a temporary one, which suffices on the
    broker's own machine. ``credentials``: where the key pair and the broker's key are stored. ``rotate``: replaces the
    key pair and returns an error text. ``unit``: the process as systemd sees it.
    """
    failpoints.arm(os.environ)
    device = resolve_device(settings.worker.device, settings.worker.bits)
    settings = settings.model_copy(update={"worker": settings.worker.model_copy(update={"device": device})})
    # Not with a device: its driver holds memory of this process, too, and its handling of a second task is not known.
    with fast_exit.keep_memory() if settings.worker.device == "cpu" else nullcontext():
        return _run_until_exit(settings, pair or new_pair(), credentials, rotate, unit)


def _run_until_exit(
    settings: Settings,
    pair: KeyPair,
    credentials: CredentialStore | None,
    rotate: RotateKeyPair | None,
    unit: ServiceContext | None,
) -> int:
    dtype = ""
    while True:
        resources = open_resources(settings, pair, dtype)
        # otherwise every full collection walks through all of torch: half a second in which nothing else runs
        gc.freeze()
        result = uvloop.run(_main(settings, resources, credentials, rotate, unit))
        gc.freeze()  # the interpreter's last collection, too
        if isinstance(result, int):
            return result
        dtype = result.dtype
        gc.unfreeze()  # so that the former resources can be collected


async def _main(
    settings: Settings,
    equipment: WorkerResources,
    credentials: CredentialStore | None,
    rotate: RotateKeyPair | None,
    unit: ServiceContext | None,
) -> int | act.RestartWithDtype:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    service = WorkerService(
        settings, equipment, context, SystemClock(), credentials=credentials, rotate=rotate, unit=unit
    )
    has_ended = False
    try:
        result = await service.run()
    finally:
        has_ended = service.close()
        if has_ended:
            context.term()
    if isinstance(result, int) and not has_ended and settings.worker.device != "cpu":
        _leave_at_once(result)
    return result


def _leave_at_once(code: int) -> None:
    """End the process without the interpreter's end: there a GPU's driver may wait for the work that the compute thread
    waits for, without an end."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(code)


class WorkerService:
    """Shell around a :class:`StageCore`."""

    def __init__(
        self,
        settings: Settings,
        resources: WorkerResources,
        context: zmq.Context[zmq.Socket[bytes]],
        clock: Clock,
        *,
        credentials: CredentialStore | None = None,
        rotate: RotateKeyPair | None = None,
        unit: ServiceContext | None = None,
    ) -> None:
        executor = resources.executor
        self._unit = unit or ServiceContext.unmanaged(settings)
        self._progress = ProgressDetector()
        # the settings, for Hello
        self._settings_message = settings_message(self._unit.describe_settings("worker", settings))
        self._resources = resources
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
                resources.log_bytes,
                settings.log.profile_every,
                resources.dtypes,
                state_stride=executor.manifest.state_stride,
                state_bytes=executor.manifest.state_bytes,
            )
        )
        self._connector = PeerConnector(resources.key_pair, broker_host(settings))
        self._listener = StepListener.open(settings, resources.key_pair)
        self._kv_listener = open_kv_listener(settings, resources.key_pair)
        self._compute = ComputeThread(
            self._connector,
            listener=self._listener,
            core=self._core,
            executor=executor,
            vitals=self._vitals,
            clock=clock,
            on_control_action=self._on_control_action,
            kv_listener=self._kv_listener,
            spill_files=open_spill_files(int(settings.worker.spill)),
            logs_steps=settings.log.level == "debug",
        )
        self._control = ControlConnection(
            context,
            settings,
            self._connector,
            clock,
            self,
            name=self._name,
            incarnation=self._incarnation,
            credentials=credentials,
            rotate=rotate,
        )
        self._heartbeats: HeartbeatThread | None = None
        self._shutdown = ShutdownSequence()
        self._stop = asyncio.Event()
        self._exit_code = 0
        self._restart: act.RestartWithDtype | None = None  # set when the worker restarts with another dtype
        self._lineage = NO_LINEAGE  # of the broker that welcomed this worker last

    async def run(self) -> int | act.RestartWithDtype:
        """Serve until the worker ends. Return the exit code, or the order to restart with another dtype."""
        for number in (signal.SIGTERM, signal.SIGINT):
            self._loop.add_signal_handler(number, self._on_signal, number)
        self._unit.enable_reload(self._loop)
        self._loop.set_exception_handler(self._on_callback_error)
        self._compute.start()
        log.info(
            "worker_started",
            worker=self._name,
            broker=address_and_key(self._settings.client.url)[0],
            model=self._executor.manifest.name,
        )
        async with asyncio.TaskGroup() as group:
            loops = [
                group.create_task(self._control.run()),
                group.create_task(self._control.measure_link()),
                group.create_task(self._report_stats()),
                group.create_task(self._measure_loop_lag()),
            ]
            await self._stop.wait()
            for task in loops:
                task.cancel()
        if self._compute.failure is not None:
            self._exit_code = 1
        return self._restart or self._exit_code

    def close(self) -> bool:
        """Stop threads and close sockets. Returns False if the compute thread is still busy and holds its sockets."""
        if self._heartbeats is not None:
            self._heartbeats.stop()
        ended = self._compute.stop(STOP_GRACE_S)
        self._control.close()
        return ended

    def _on_callback_error(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """End after an exception in a callback, which is a bug: a worker that limps on would hide it. A supervisor
        restarts it."""
        loop.default_exception_handler(context)
        self._exit_code = 1
        self._stop.set()

    # --- leaving -----------------------------------------------------------------------------------------------------

    def _on_signal(self, number: signal.Signals) -> None:
        is_member = self._control.is_connected and self._core.welcome is not None
        action = self._shutdown.on_signal(number, is_member=is_member)
        log.info("worker_asked_to_end", by=number.name, at_once=action is ShutdownAction.END)
        self._unit.manager.send_stopping("leaving: other workers take over its layers")
        if action is ShutdownAction.NOTIFY_BROKER:
            self._control.send(Leaving(incarnation=self._incarnation, reason=f"it received {number.name}"))
            self._loop.call_later(RELEASE_TIMEOUT_S, self._apply_shutdown, ShutdownAction.END)
        self._apply_shutdown(action)

    def _apply_shutdown(self, action: ShutdownAction | None) -> None:
        if action is ShutdownAction.END and self._shutdown.exit_code is not None:
            self._exit_code = self._shutdown.exit_code
            self._stop.set()

    # --- control -----------------------------------------------------------------------------------------------------

    def on_connected(self) -> None:
        """Start the join: the core sends Hello over the new connection."""
        self._compute.post(BrokerConnected())

    def on_lost(self) -> None:
        """Handle the loss of the broker: a shutdown need not wait for its release."""
        self._apply_shutdown(self._shutdown.on_disconnected())

    def on_order(self, order: Order) -> None:
        """Pass an order to the core, which lives in the compute thread."""
        if isinstance(order, Release):
            self._apply_shutdown(self._shutdown.on_release())
        if isinstance(order, Rejoin):
            self._loop.call_later(REJOIN_TIMEOUT_S, self._end_if_stuck, self._clock.now())
        self._raise_fence_flag(order)
        self._compute.post(OrderArrived(order))

    def end(self, code: int, reason: str) -> None:
        """End this process: it can't work here."""
        self._exit_code = self._shutdown.exit_code or code
        (log.error if code else log.info)("worker_ends", reason=reason, code=self._exit_code)
        self._stop.set()

    def _restart_with_dtype(self, recast: act.RestartWithDtype) -> None:
        """Restart with weights of another type, unless this process is ending."""
        if not self._stop.is_set():
            log.info("worker_recast", dtype=recast.dtype, reason=recast.reason)
            self._restart = recast
            self._stop.set()

    def _end_if_stuck(self, ordered_at: float) -> None:
        """End a worker whose compute thread has not reacted to an order to rejoin.

        This process is of no more use to the broker; its supervisor is to start another one.
        """
        turned_at = self._vitals.last_turn_at
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

    async def _report_stats(self) -> None:
        process = psutil.Process()
        while True:
            await asyncio.sleep(STATS_EVERY_S)
            with contextlib.suppress(OSError):  # reading needs a descriptor, and there may be none left
                self._vitals.memory_bytes = process.memory_info().rss
                self._vitals.process_usage = read_process_usage(process)
            self._report_to_systemd()
            if not self._compute.is_alive:
                self._stop.set()
            if self._core.is_parked:
                self._retry_broker()
            elif self._core.welcome is not None:
                self._control.send(Stats(incarnation=self._incarnation, values=self._stats()))

    def _report_to_systemd(self) -> None:
        """Report the state to the service manager; the worker is ready once the broker has welcomed it."""
        core, manager = self._core, self._unit.manager
        if not manager.is_present:
            return
        status = status_text.worker_status(
            is_welcome=core.welcome is not None and not core.is_parked,
            broker=address_and_key(self._settings.client.url)[0],
            epoch=core.active,
            layers=core.layers.label if core.layers else "",
            condition=self._vitals.visible_condition,
        )
        (manager.send_ready if core.welcome is not None else manager.send_status)(status)

    def _retry_broker(self) -> None:
        """Reconnect to a broker that has long been silent.

        The connection may be dead without an error because this machine's address has changed. Then other workers can't
        reach this worker's listener either, and its supervisor is to restart it.
        """
        if now_at := self._listener.new_address(self._settings):
            log.error("address_changed", worker=self._name, was=self._listener.host, is_now=now_at)
            self._exit_code = 1
            self._stop.set()
        self._control.reconnect_after(self._core.membership.last_order_at, RECONNECT_SILENT_S)

    def _stats(self) -> dict[str, float]:
        """Return counters of the core and the executor. They are read across threads: a value may be a moment old."""
        values = dict(self._core.counters) | self._executor.stats() | self._core.statistics.flat_values()
        values["log_bytes"] = self._core.log.num_bytes
        values["log_evicted"] = self._core.log.num_evicted
        values["sequences"] = len(self._core.sequences)
        values["resident_bytes"] = self._vitals.memory_bytes
        values["limit_bytes"] = self._resources.limit_bytes
        values["knockers_refused"] = self._listener.pull.num_refused
        values["door_shut"] = self._listener.pull.num_accept_paused
        values["threads"] = threading.active_count()
        values |= self._compute.kv.values() | self._vitals.process_usage | tcp_figures(self._compute.next_tcp_info())
        values["clock_s"] = time.time()  # the broker compares it with its own clock on arrival
        return {name: float(value) for name, value in values.items()}

    async def _measure_loop_lag(self) -> None:
        while True:
            self._vitals.record_loop_turn()
            if self._progress.update(self._vitals.last_turn_at, self._vitals.progress):
                self._unit.manager.send_alive()
            await asyncio.sleep(LOOP_INTERVAL_S)
            if failpoints.armed:
                failpoints.hit("loop.turn")

    # --- actions of the core -----------------------------------------------------------------------------------------

    def _on_control_action(self, action: ControlAction) -> None:
        message = self._build_hello() if isinstance(action, act.SendHello) else None
        self._loop.call_soon_threadsafe(self._perform, action, message)

    def _perform(self, action: ControlAction, hello: Hello | None) -> None:
        match action:
            case act.SendHello():
                assert hello is not None
                if self._control.is_connected:  # otherwise Hello is sent after the connection is made
                    self._control.send_hello(hello)
            case act.SendToBroker(message):
                self._control.send(message)
            case act.StartHeartbeats(endpoint, interval_s):
                self._start_heartbeats(endpoint, interval_s)
            case act.SendAssets(names):
                self._send_assets(names)
            case act.Exit(code, reason):
                self.end(code, reason)
            case act.RestartWithDtype():
                self._restart_with_dtype(action)

    def _build_hello(self) -> Hello:
        """Build Hello in the compute thread, which owns the stored sequences."""
        hello = build_hello(
            self._core,
            self._resources,
            self._listener,
            self._kv_listener,
            key=self._connector.pair.public,
            link=self._control.link,
        )
        worker = self._settings.worker
        return replace(hello, settings=self._settings_message, spill_from=worker.spill_from if worker.spill else 0)

    def _start_heartbeats(self, endpoint: str, interval_s: float) -> None:
        if self._heartbeats is not None:
            self._heartbeats.stop()
        self._heartbeats = HeartbeatThread(self._connector, endpoint, interval_s, self._incarnation, self._vitals)
        self._heartbeats.start()

    def _send_assets(self, names: tuple[str, ...]) -> None:
        for name in names:
            data = (self._executor.checkpoint.folder / name).read_bytes()
            log.debug("asset_sent", name=name, digest=xxhash.xxh3_128_hexdigest(data))
            for offset in range(0, max(1, len(data)), ASSET_PART_BYTES):
                part = data[offset : offset + ASSET_PART_BYTES]
                message = AssetPart(name=name, offset=offset, total=len(data), payload=pack_bytes(part))
                self._control.send(message, part)
