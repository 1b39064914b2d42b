"""The compute thread: it owns the data sockets, the stage's core and the computing half of the executor.

A plain thread, since a hop through asyncio costs twice as much. Everything that happens to the stage arrives here as an
event: steps from the data socket; orders and connections from the control loop, and load results from the loader,
through ``post``, which any thread may call.

While the next stage accepts nothing, sent steps wait in the outbox and no further ones are received. The broker bounds
the steps in flight, which bounds the outbox, too. The worker's heartbeats name the stage on which it is blocked.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from swarm import failpoints
from swarm.clock import Clock
from swarm.errors import DeviceError, KvFull, SwarmError, WireError, report_thread_errors
from swarm.log import bind, get_logger
from swarm.stage import actions as act
from swarm.stage.core import StageCore
from swarm.stage.events import (
    Computed,
    ComputeFailed,
    ComputeFenced,
    DeviceTested,
    Event,
    Idle,
    KvArrived,
    KvOverfull,
    OrderArrived,
    RecheckComputed,
    RecheckFailed,
    StageTick,
    StepArrived,
    StepRefused,
)
from swarm.stage.executor import Executor, FenceRaised, ForwardResult, is_device_lost, is_out_of_memory
from swarm.stage.shell.connections import RETRY_S, PeerConnector, RecheckConnection, StepListener, edge_key
from swarm.stage.shell.kv_channels import KvChannels
from swarm.stage.shell.kv_receiver import KvReceiver
from swarm.stage.shell.kv_traffic import KvTraffic
from swarm.stage.shell.loader import PlanLoader
from swarm.stage.shell.pieces import forward_in_pieces
from swarm.stage.shell.spill_files import SpillFiles
from swarm.stage.shell.spill_thread import SpillThread
from swarm.stage.shell.vitals import Vitals
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import REPLAY_STEP, Step, StepDone
from swarm.wire.push import PushChannel
from swarm.wire.tcp_info import TcpInfo
from swarm.wire.transport.io_loop import WakeupFd

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


TICK_S = 0.1  # between two ``StageTick`` events
STORE_S = 0.001  # for which arrived copies are stored before the next look for a step
INBOX_SIZE = 4096  # events waiting for the compute thread; a full inbox means that it has hung

log = get_logger(__name__)

DEVICE_ERRORS = (RuntimeError, ValueError, MemoryError, ArithmeticError)  # torch's own errors are RuntimeErrors

# actions carried out by the control loop
ControlAction = (
    act.SendHello | act.SendToBroker | act.StartHeartbeats | act.SendAssets | act.Exit | act.RestartWithDtype
)


class ComputeThread:
    """Thread that runs a :class:`StageCore`.

    ``on_control_action`` carries out actions of the control loop; it is called from this thread and must not block.
    """

    def __init__(
        self,
        connector: PeerConnector,
        *,
        listener: StepListener,
        core: StageCore,
        executor: Executor,
        vitals: Vitals,
        clock: Clock,
        on_control_action: Callable[[ControlAction], None],
        kv_listener: StepListener | None = None,
        spill_files: SpillFiles | None = None,
        logs_steps: bool = False,
    ) -> None:
        self._connector = connector
        self._listener = listener
        self._pull = listener.pull
        self._core = core
        self._executor = executor
        self._vitals = vitals
        self._clock = clock
        self.on_control_action = on_control_action
        self._logs_steps = logs_steps  # log a line per step, at level debug
        self._wake = WakeupFd()  # wakes the thread when an event is posted
        self._inbox: queue.Queue[Event] = queue.Queue(INBOX_SIZE)
        self._events: deque[Event] = deque()  # events to handle next, before the inbox
        self._overfull: KvOverfull | None = None  # the event's sequences, or its step, that found no memory
        self._outbox: deque[Step | StepDone] = deque()  # messages that the next stage has not accepted yet
        self._outbox_tensors: deque[NDArray[np.float32] | None] = deque()  # tensors of the messages in ``_outbox``
        self._next: PushChannel | None = None  # connection to the next stage
        self._next_key: str | None = None  # key of its listener, to recognise a blocked worker
        self._next_name = ""
        self._recheck_connection = RecheckConnection(connector)
        channels = KvChannels(connector, executor, core.settings.incarnation)
        spill = None if spill_files is None else self._make_spill_thread(spill_files)
        self.kv = KvTraffic(channels, self._make_receiver(kv_listener), executor, clock, spill)
        self._last_tick_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._loader = PlanLoader(
            self, core.settings.incarnation, executor, vitals, clock, broker_host=connector.broker_host
        )
        self.failure: BaseException | None = None  # the bug that ended a thread

    def _make_receiver(self, listener: StepListener | None) -> KvReceiver | None:
        if listener is None:
            return None
        return KvReceiver(
            listener, self._clock, fits=self._executor.fits_kv, on_part=self._wake.set, on_crash=self.fail
        )

    def _make_spill_thread(self, files: SpillFiles) -> SpillThread:
        executor = self._executor
        return SpillThread(
            files,
            executor.manifest,
            self._clock,
            identity=executor.kv_identity,
            fits=executor.fits_kv,
            on_read=self._wake.set,
            on_crash=self.fail,
        )

    def start(self) -> None:
        self.kv.start()
        self._thread.start()

    def next_tcp_info(self) -> TcpInfo | None:
        """Return TCP figures of the connection to the next stage. May be called from any thread."""
        edge = self._next
        return None if edge is None else edge.tcp_info()

    def post(self, event: Event) -> None:
        """Queue an event for the core. May be called from any thread."""
        self._inbox.put_nowait(event)
        self._wake.set()

    def stop(self, grace_s: float) -> bool:
        """Stop the thread, and the receiver's. Returns False if one is still busy after the grace time (they are
        daemons: the process may end)."""
        self._stopping = True
        self._wake.set()
        self._thread.join(grace_s)
        return self.kv.stop(grace_s) and not self._thread.is_alive()

    @property
    def is_stopping(self) -> bool:
        return self._stopping

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            with report_thread_errors(self._on_crash):
                self._executor.enter_thread()
                while not self._stopping:
                    outgoing, takes = self._blocked_channels(), not self._outbox
                    self._pull.wait(self._wait_s(), wake=self._wake, outgoing=outgoing, incoming=takes)
                    self._run_once()
        finally:
            self._close_connection()
            self._recheck_connection.close()
            self.kv.close_channels()
            self._pull.close()

    def _on_crash(self, error: BaseException) -> None:
        if self.end_if_device_lost(error):
            return
        log.exception("compute_thread_died")
        self.fail(error)

    def _has_idle_time(self) -> bool:
        return self._core.has_idle_work and not self._outbox

    def _wait_s(self) -> float:
        if self._has_idle_time():
            return 0.0
        wait_s = RETRY_S if self._recheck_connection.is_full else TICK_S
        return min(wait_s, self._kv_wait_s(), max(0.0, self._core.next_deadline - self._clock.now()))

    def _kv_wait_s(self) -> float:
        may_take = not self._core.is_parked
        return self.kv.wait_s(self._clock.now(), may_take=may_take, may_send_at=self._core.next_kv_turn_at)

    def fail(self, error: BaseException) -> None:
        """End the worker after a bug in any thread: a worker that limps on would hide it. A supervisor restarts it."""
        self.failure = error
        self._end(f"{type(error).__name__}: {error}")

    def end_if_device_lost(self, error: BaseException) -> bool:
        """End the worker, and return True, after an error that leaves its device unusable for this process. A
        supervisor restarts it; meanwhile other workers take over its layers. May be called from any thread."""
        if not is_device_lost(error):
            return False
        reason = str(error).strip().partition("\n")[0]
        self._end(f"device {self._executor.device} can't be used by this process any more: {reason}")
        return True

    def _end(self, reason: str) -> None:
        self._stopping = True
        self._wake.set()
        self.on_control_action(act.Exit(1, reason))

    def _blocked_channels(self) -> tuple[PushChannel, ...]:
        if self._core.is_parked:
            return ()
        blocked = self.kv.blocked_channels()
        return (self._next, *blocked) if self._outbox and self._next is not None else blocked

    def _run_once(self) -> None:
        """Do everything that is possible without blocking."""
        self._wake.clear()
        self._flush()
        self._take_inbox()
        self._handle_events()
        has_received = False
        while not self._outbox and not self._stopping and (frames := self._pull.receive()) is not None:
            if has_received:  # a step after a step: others may follow
                self._move_kv(is_idle=False)
            has_received = True
            self._receive(frames)
            self._take_inbox()
            self._handle_events()
            self.kv.notice()
        has_idle_work = self._has_idle_time()
        if not has_received and has_idle_work:
            self._events.append(Idle())
            self._handle_events()
        self._move_kv(is_idle=not has_idle_work)
        self._recheck_connection.flush(self._clock.now())
        now = self._clock.now()
        if now - self._last_tick_at >= TICK_S or now >= self._core.next_deadline:
            self._last_tick_at = now
            self.kv.free_bytes = self._executor.kv_free_bytes()
            self._events.append(StageTick(self.kv.free_bytes))
            self._handle_events()
            self.kv.notice()
        self._flush()
        self._update_vitals()

    def _take_inbox(self) -> None:
        for _ in range(self._inbox.qsize()):
            event = self._inbox.get_nowait()
            self._events.append(event)
            if isinstance(event, OrderArrived):
                self.kv.hurry()

    def _move_kv(self, *, is_idle: bool) -> None:
        """Store parts of copies for a moment, or send some if the core wants to. A parked worker sends nothing."""
        if self._core.is_parked:
            return
        stops_at = self._clock.now() + STORE_S
        while (event := self.kv.next_event(is_idle=is_idle, may_send_at=self._core.next_kv_turn_at)) is not None:
            self._events.append(event)
            self._handle_events()
            if not isinstance(event, KvArrived) or self._clock.now() >= stops_at:
                break

    def _receive(self, frames: list[memoryview]) -> None:
        began_at, sender = self._clock.now(), self._pull.sender_key
        try:
            message, data = DATA.decode(frames)
        except WireError as error:
            self._events.append(StepRefused(str(error), sender))
            return
        if not isinstance(message, Step):
            self._events.append(
                StepRefused(f"a {type(message).__name__} arrived, which is no message for a stage", sender)
            )
            return
        hidden = None if message.tensor is None or data is None else tensors.unpack(message.tensor, data)
        size = self._executor.manifest.row_width
        if hidden is not None and hidden.shape[1] != size:
            reason = f"step.tensor.shape: {list(hidden.shape)}, but this model's stages pass on {size} numbers"
            self._events.append(StepRefused(reason, sender))
            return
        if failpoints.armed and not message.replay:
            failpoints.hit("step.arrived")
        self._core.statistics.add_decoding(self._clock.now() - began_at)
        self._events.append(StepArrived(message, hidden, sum(len(f) for f in frames), sender))

    def _handle_events(self) -> None:
        while self._events and not self._stopping:
            event = self._events.popleft()
            _hit_order_failpoint("order", event)
            for action in self._core.handle(event, self._clock.now()):
                self._perform(action)
            if self._overfull is not None:
                self._events.appendleft(self._overfull)
                self._overfull = None
            _hit_order_failpoint("handled", event)
            self._take_inbox()

    def _update_vitals(self) -> None:
        vitals = self._vitals
        vitals.last_turn_at = self._clock.now()
        vitals.epoch = self._core.active or 0
        vitals.kv_used, vitals.kv_capacity = self._executor.kv_used(), self._executor.kv_capacity()
        if self._core.is_parked:
            vitals.set_condition("parked")
        elif self._outbox:
            vitals.set_condition("blocked", self._next_name)
        else:
            vitals.set_condition("idle")

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Compute():
                self._compute(action)
            case act.ComputeRecheck() | act.SendRecheck() | act.TestDevice() | act.FreeSpareMemory():
                self._perform_spare(action)
            case act.SendStep(step, hidden):
                self._send(step, hidden)
            case act.SendDone(done):
                self._send(done, None)
            case (
                act.OpenSequence()
                | act.ForkSequence()
                | act.SharePrefix()
                | act.ShrinkSequence()
                | act.TruncateSequence()
                | act.ReleaseSequence()
                | act.DropKv()
            ):
                self._apply_to_executor(action)
            case act.AllowSenders(keys, relay):
                self._listener.set_allowed(keys, self._connector.resolve(relay))
            case act.UseLayers():
                self._use_layers(action)
            case act.OpenEdge() | act.DisconnectKey():
                self._change_connection(action)
            case (
                act.SendKvParts()
                | act.StoreKv()
                | act.ConnectKvTargets()
                | act.AllowKvSenders()
                | act.SpillChunk()
                | act.ReadSpilled()
                | act.StoreSpilled()
                | act.StopReadingSpilled()
            ):
                self._events.extendleft(self.kv.perform(action))
            case act.LoadLayers() | act.LoadStandby() | act.StopStandby() | act.LoadAdapters() | act.DropAdapters():
                self._perform_loading(action)
            case act.WriteStageLog(event, level, fields):
                getattr(log, level)(event, **fields)
            case _:
                self.on_control_action(action)

    def _use_layers(self, action: act.UseLayers) -> None:
        try:
            self._executor.activate(action.layers, action.kept, action.share_unit)
        except KvFull as error:
            self._overfull = KvOverfull(str(error))
        bind(stage=str(action.layers))

    def _apply_to_executor(self, action: act.SequenceAction) -> None:
        try:
            act.apply_to_executor(self._executor, action)
        except KvFull as error:
            assert isinstance(action, act.ForkSequence | act.SharePrefix)
            unopened = () if self._overfull is None else self._overfull.unopened
            self._overfull = KvOverfull(str(error), (*unopened, action.sequence))

    def _change_connection(self, action: act.OpenEdge | act.DisconnectKey) -> None:
        if isinstance(action, act.OpenEdge):
            self._close_connection()
            self._next = self._connector.open(action.edge.endpoint)
            self._next_key, self._next_name = edge_key(action.edge), action.edge.to
            return
        if action.key == self._next_key:
            self._close_connection()
        self._recheck_connection.disconnect_key(action.key)
        self.kv.disconnect_key(action.key)

    def _perform_loading(
        self, action: act.LoadLayers | act.LoadStandby | act.StopStandby | act.LoadAdapters | act.DropAdapters
    ) -> None:
        match action:
            case act.LoadLayers():
                self._loader.load(action, self._core.lineage)
            case act.LoadStandby(layers):
                self._loader.load_standby(layers)
            case act.StopStandby():
                self._loader.stop_standby()
            case act.LoadAdapters(adapters):
                self._loader.load_adapters(adapters)
            case act.DropAdapters(keys):
                self._executor.drop_adapters(keys)

    def _compute(self, action: act.Compute) -> None:
        """Run a batch through the layers. Any error of the device becomes a ComputeFailed event.

        Nothing is computed if a sequence of the same step could not be opened.
        """
        if self._overfull is not None:
            return
        self._vitals.set_condition("computing")
        if self._logs_steps:
            rows = len(action.batch.rows)
            log.debug("step_computes", epoch=action.epoch, step=action.step, cause=action.cause, rows=rows)
        try:
            if failpoints.armed:
                _hit_failpoints_before(action)
            forward = partial(forward_in_pieces, self._executor) if action.in_pieces else self._executor.forward
            forwarded = forward(
                action.batch, lambda: self._vitals.fence > action.epoch or self._stopping, self._on_progress
            )
            if failpoints.armed:
                forwarded = _hit_failpoints_after(action, forwarded)
        except FenceRaised:
            self._events.appendleft(ComputeFenced(action.epoch, action.step))
        except KvFull as error:
            self._overfull = KvOverfull(str(error))
        except DEVICE_ERRORS as error:
            if self.end_if_device_lost(error):
                return
            log.exception("compute_failed", epoch=action.epoch, step=action.step, cause=action.cause)
            reason = f"{type(error).__name__}: {error}"
            self._events.appendleft(ComputeFailed(action, reason, is_out_of_memory(error)))
        else:
            self._events.appendleft(Computed(action.epoch, action.step, forwarded))

    def _test_device(self) -> None:
        """Test the device. Each layer's progress counts as a turn, so that the broker does not take the test for a
        hang."""
        self._vitals.set_condition("computing")
        problem = ""
        try:
            if failpoints.armed:
                failpoints.hit("step.computes")
            self._executor.test(self._on_test_progress)
        except (DeviceError, *DEVICE_ERRORS) as error:
            if self.end_if_device_lost(error):
                return
            problem = f"{type(error).__name__}: {error}"
        self._events.appendleft(DeviceTested(problem))

    def _on_test_progress(self) -> None:
        self._on_progress()
        self._vitals.last_turn_at = self._clock.now()

    def _perform_spare(
        self, action: act.ComputeRecheck | act.SendRecheck | act.TestDevice | act.FreeSpareMemory
    ) -> None:
        """Carry out an action that no step waits for."""
        match action:
            case act.ComputeRecheck():
                self._compute_recheck(action)
            case act.SendRecheck():
                self._recheck_connection.send(
                    action.edge, _encode_frames(action.step, action.hidden), self._clock.now()
                )
            case act.TestDevice():
                self._test_device()
            case act.FreeSpareMemory():
                self._executor.drop_spare()

    def _compute_recheck(self, action: act.ComputeRecheck) -> None:
        """Compute a chunk of a recheck. An error fails only this recheck."""
        self._vitals.set_condition("computing")
        try:
            forwarded = self._executor.recheck(
                action.batch,
                action.limit,
                lambda: self._vitals.fence > action.epoch or self._stopping,
                self._on_progress,
            )
        except (FenceRaised, SwarmError, *DEVICE_ERRORS) as error:
            if self.end_if_device_lost(error):
                return
            self._events.appendleft(RecheckFailed(action.ticket, f"{type(error).__name__}: {error}"))
        else:
            self._events.appendleft(RecheckComputed(action.ticket, forwarded))

    def _on_progress(self) -> None:
        self._vitals.computed += 1

    def _send(self, message: Step | StepDone, hidden: NDArray[np.float32] | None) -> None:
        self._outbox.append(message)
        self._outbox_tensors.append(hidden)
        self._flush()
        if failpoints.armed:
            failpoints.hit("replay.sent" if message.step == REPLAY_STEP else "step.sent")
            if isinstance(message, Step) and message.proposed:
                failpoints.hit("step.proposes")

    def _flush(self) -> None:
        """Send queued messages as far as the next stage accepts them. A parked worker sends nothing."""
        while self._outbox and self._next is not None and not self._core.is_parked:
            began = self._clock.now()
            frames = _encode_frames(self._outbox[0], self._outbox_tensors[0])
            if not self._next.send(frames):
                return
            self._core.statistics.add_sending(self._clock.now() - began, sum(map(len, frames)))
            self._outbox.popleft()
            self._outbox_tensors.popleft()

    def _close_connection(self) -> None:
        self._outbox.clear()
        self._outbox_tensors.clear()
        if self._next is not None:
            self._next.close()
            self._next = self._next_key = None


# --- failpoints: the names of the places that an event or a computation passes ---------------------------------------


def _hit_order_failpoint(when: str, event: Event) -> None:
    if failpoints.armed and isinstance(event, OrderArrived):
        failpoints.hit(f"{when}.{event.order.__struct_config__.tag}")


def _hit_failpoints_before(action: act.Compute) -> None:
    batch = action.batch
    if action.step == REPLAY_STEP:
        failpoints.hit("replay.begins")
        return
    sequences = [row.sequence for row in batch.rows]
    parts = [part for parts in batch.image_parts for part in range(parts.first, parts.stop)]
    failpoints.hit("step.computes", token=batch.tokens.tolist(), sequence=sequences, part=parts)
    if any(row.count > 1 for row in batch.rows):
        failpoints.hit("step.prefill")


def _hit_failpoints_after(action: act.Compute, forwarded: ForwardResult) -> ForwardResult:
    place = "replay.computed" if action.step == REPLAY_STEP else "step.computed"
    if forwarded.hidden is not None:
        forwarded = replace(forwarded, hidden=failpoints.falsified_values(place, forwarded.hidden))
    else:
        failpoints.hit(place)
    if forwarded.sampled or forwarded.vectors:
        failpoints.hit("step.sampled")
    return forwarded


def _encode_frames(message: Step | StepDone, hidden: NDArray[np.float32] | None) -> list[tensors.Bytes]:
    if hidden is None:
        return DATA.encode(message)
    spec, data = tensors.pack(hidden)
    return DATA.encode(msgspec.structs.replace(message, tensor=spec), data)
