"""The compute thread: it owns the data sockets, the stage's core and the executor's computing half.

A plain thread, since a hop through asyncio costs twice as much. Everything that happens to the stage comes here as an
event: steps from the data socket, orders and connections from the control loop and loading results from the loader
through ``post``, which any thread may call.

While the next stage takes nothing, sent steps wait in the outbox and no further ones are received: what is in flight
is bounded by the broker, so the outbox is too, and the worker says whom it is blocked on.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec
import zmq

from swarm.clock import Clock
from swarm.errors import ModelError, WireError
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.core import StageCore
from swarm.stage.events import (
    Computed,
    ComputeFailed,
    ComputeFenced,
    Event,
    Loaded,
    LoadFailed,
    StepArrived,
    Tick,
)
from swarm.stage.executor import Executor, Fenced
from swarm.stage.vitals import Vitals
from swarm.wire import tensors
from swarm.wire.channel import PullChannel, PushChannel, Wake
from swarm.wire.codec import DATA
from swarm.wire.messages import LoadProgress, Step, StepDone

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

TICK_S = 0.1
INBOX = 4096  # orders and results waiting for the compute thread; a full inbox means that it has hung
PROGRESS_EVERY_S = 0.2

log = get_logger(__name__)

Outward = act.Introduce | act.Tell | act.StartBeats | act.SendAssets | act.Exit


class ComputeThread:
    """Runs a :class:`StageCore`. ``outward`` carries out what concerns the control loop; it is called from this thread
    and must not wait."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        *,
        pull: PullChannel,
        core: StageCore,
        executor: Executor,
        vitals: Vitals,
        clock: Clock,
        outward: Callable[[Outward], None],
        tells_steps: bool = False,
    ) -> None:
        self._context = context
        self._pull = pull
        self._core = core
        self._executor = executor
        self._vitals = vitals
        self._clock = clock
        self._outward = outward
        self._tells_steps = tells_steps  # a line in the log for each, at level debug
        self._wake = Wake()
        self._inbox: queue.Queue[Event] = queue.Queue(INBOX)
        self._events: deque[Event] = deque()
        self._outbox: deque[Step | StepDone] = deque()
        self._outbox_tensors: deque[NDArray[np.float32] | None] = deque()
        self._next: PushChannel | None = None
        self._next_name = ""
        self._ticked_at = 0.0
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="compute", daemon=True)
        self._loader: threading.Thread | None = None
        self.failure: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Event) -> None:
        """Tell the core a fact, from any thread."""
        self._inbox.put_nowait(event)
        self._wake.set()

    def stop(self, grace_s: float) -> bool:
        """End the thread; False if it is still busy after the grace (it is a daemon: the process may end)."""
        self._stopping = True
        self._wake.set()
        self._thread.join(grace_s)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    # --- the loop ----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._pull.wait(TICK_S, wake=self._wake, outgoing=self._blocked_edge())
                self._turn()
        except BaseException as error:
            log.exception("compute_thread_died")
            self._fail(error)
        finally:
            self._close_edge()
            self._pull.close()

    def _fail(self, error: BaseException) -> None:
        """A bug, in whichever thread: a worker that limps on would hide it. Somebody starts us again."""
        self.failure = error
        self._stopping = True
        self._wake.set()
        self._outward(act.Exit(1, f"{type(error).__name__}: {error}"))

    def _blocked_edge(self) -> tuple[PushChannel, ...]:
        is_blocked = self._outbox and not self._core.parked
        return (self._next,) if is_blocked and self._next is not None else ()

    def _turn(self) -> None:
        """Everything that can be done without waiting."""
        self._wake.clear()
        self._flush()
        self._take_inbox()
        self._work()
        while not self._outbox and not self._stopping and (frames := self._pull.receive()) is not None:
            self._receive(frames)
            self._take_inbox()
            self._work()
        now = self._clock.now()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            self._events.append(Tick())
            self._work()
        self._flush()
        self._show_condition()

    def _take_inbox(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._events.append(self._inbox.get_nowait())

    def _receive(self, frames: list[memoryview]) -> None:
        began = self._clock.now()
        try:
            message, data = DATA.decode(frames)
        except WireError as error:
            log.warning("step_refused", reason=str(error))
            self._core.counters["refused_frames"] = self._core.counters.get("refused_frames", 0) + 1
            return
        if not isinstance(message, Step):
            log.warning("unexpected_on_data", kind=type(message).__name__)
            return
        hidden = None if message.tensor is None or data is None else tensors.unpack(message.tensor, data)
        self._core.statistics.received(self._clock.now() - began)
        self._events.append(StepArrived(message, hidden, sum(len(f) for f in frames)))

    def _work(self) -> None:
        while self._events and not self._stopping:
            for action in self._core.handle(self._events.popleft(), self._clock.now()):
                self._perform(action)
            self._take_inbox()

    def _show_condition(self) -> None:
        vitals = self._vitals
        vitals.epoch = self._core.active or 0
        vitals.kv_used, vitals.kv_capacity = self._executor.kv_used(), self._executor.kv_capacity()
        if self._core.parked:
            vitals.set("parked")
        elif self._outbox:
            vitals.set("blocked", self._next_name)
        else:
            vitals.set("idle")

    # --- what is to be done ------------------------------------------------------------------------------------------

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.Compute():
                self._compute(action)
            case act.SendStep(step, hidden):
                self._send(step, hidden)
            case act.SendDone(done):
                self._send(done, None)
            case act.OpenSequence() | act.ForkSequence() | act.ShrinkSequence():
                act.arrange(self._executor, action)
            case act.TruncateSequence() | act.ReleaseSequence():
                act.arrange(self._executor, action)
            case act.UseLayers(layers):
                self._executor.activate(layers)
            case act.OpenEdge(_, edge):
                self._close_edge()
                self._next = PushChannel(self._context, edge.endpoint)
                self._next_name = edge.to
            case act.Load():
                self._loader = threading.Thread(target=self._run_loader, args=(action,), name="loader", daemon=True)
                self._loader.start()
            case act.Note(event, level, fields):
                getattr(log, level)(event, **fields)
            case _:
                self._outward(action)

    def _compute(self, action: act.Compute) -> None:
        """One micro-batch through the layers. What the device can't do becomes a fact, whatever it raises as."""
        self._vitals.set("computing")
        if self._tells_steps:
            rows = len(action.batch.rows)
            log.debug("step_computes", epoch=action.epoch, step=action.step, cause=action.cause, rows=rows)
        try:
            forwarded = self._executor.forward(
                action.batch, lambda: self._vitals.fence > action.epoch or self._stopping, self._progressed
            )
        except Fenced:
            self._events.appendleft(ComputeFenced(action.epoch, action.step))
        except (
            RuntimeError,
            ValueError,
            MemoryError,
            ArithmeticError,
        ) as error:  # torch's own errors are RuntimeErrors
            log.exception("compute_failed", epoch=action.epoch, step=action.step, cause=action.cause)
            self._events.appendleft(ComputeFailed(action.epoch, action.step, f"{type(error).__name__}: {error}"))
        else:
            self._events.appendleft(Computed(action.epoch, action.step, forwarded))

    def _progressed(self) -> None:
        self._vitals.computed += 1

    def _send(self, message: Step | StepDone, hidden: NDArray[np.float32] | None) -> None:
        self._outbox.append(message)
        self._outbox_tensors.append(hidden)
        self._flush()

    def _flush(self) -> None:
        """Send what can be sent now. A worker that is parked keeps it."""
        while self._outbox and self._next is not None and not self._core.parked:
            began = self._clock.now()
            frames = _frames(self._outbox[0], self._outbox_tensors[0])
            if not self._next.send(frames):
                return
            self._core.statistics.sent(self._clock.now() - began, sum(map(len, frames)))
            self._outbox.popleft()
            self._outbox_tensors.popleft()

    def _close_edge(self) -> None:
        self._outbox.clear()
        self._outbox_tensors.clear()
        if self._next is not None:
            self._next.close()
            self._next = None

    # --- loading, in a thread of its own -----------------------------------------------------------------------------

    def _run_loader(self, action: act.Load) -> None:
        try:
            self._load(action)
        except BaseException as error:
            log.exception("loader_died", epoch=action.epoch)
            self._fail(error)

    def _load(self, action: act.Load) -> None:
        """What the machine, the files or the plan don't allow is a refusal; anything else is a bug."""
        self._vitals.set_loading(True)
        told_at = 0.0

        def progressed(loaded_bytes: int, total_bytes: int) -> None:
            nonlocal told_at
            self._vitals.loaded += 1
            now = self._clock.now()
            if now - told_at >= PROGRESS_EVERY_S:
                told_at = now
                message = LoadProgress(
                    epoch=action.epoch,
                    incarnation=self._core.settings.incarnation,
                    loaded_bytes=loaded_bytes,
                    total_bytes=total_bytes,
                )
                self._outward(act.Tell(message))

        try:
            capacity = self._executor.prepare(action.layers, action.standby, action.max_sequences, progressed)
        except (ModelError, RuntimeError, MemoryError, OSError) as error:
            self.post(LoadFailed(action.epoch, str(error)))
        else:
            self.post(Loaded(action.epoch, capacity))
        finally:
            self._vitals.set_loading(False)


def _frames(message: Step | StepDone, hidden: NDArray[np.float32] | None) -> list[tensors.Bytes]:
    if hidden is None:
        return DATA.encode(message)
    spec, data = tensors.pack(hidden)
    return DATA.encode(msgspec.structs.replace(message, tensor=spec), data)
