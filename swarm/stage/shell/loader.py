"""Loading the layers of a plan, standby layers, and adapters, each in a short-lived thread.

A plan loads at full speed if no plan is in force. If another plan serves meanwhile, its steps have priority. Standby
layers load in the background: while steps run, loading takes a small share of the time.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

import psutil

from swarm import failpoints
from swarm.clock import Clock
from swarm.errors import ModelError, report_thread_errors
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.events import AdaptersLoaded, Event, Loaded, LoadFailed, StandbyLoaded, StandbyProgressed
from swarm.stage.executor import Executor
from swarm.stage.shell.vitals import Vitals
from swarm.wire.messages import AdapterEntry, LayerRange, Lineage, LoadProgress
from swarm.wire.transport.client_handshake import check_reachable
from swarm.wire.transport.keys import with_host

LOAD_ERRORS = (ModelError, RuntimeError, MemoryError, OSError)  # torch's own errors are RuntimeErrors
PROGRESS_EVERY_S = 0.2
BACKGROUND_SHARE = 0.05  # share of the time for background work while steps run
# A worker that has computed nothing for this long is idle. Between two tokens of one sequence, the other stages
# compute, often on the same cores, so a short gap does not mean that the worker is idle.
IDLE_AFTER_S = 2.0
SAMPLE_S = 0.1  # between two samples of the machine's activity
# Cores kept busy by other processes of this machine. Below this value they count as idle: a swarm without work takes a
# few hundredths.
BUSY_CORES = 0.5
MAX_REST_S = 5.0  # after one piece of work: the broker waits for a sign of progress
MAX_TOTAL_REST_S = 60.0  # total rest of a plan that loads while another one serves

log = get_logger(__name__)


class LoaderOwner(Protocol):
    """Interface of the compute thread for its loader. Every method may be called from any thread."""

    @property
    def on_control_action(self) -> Callable[[act.SendToBroker], None]: ...

    @property
    def is_stopping(self) -> bool: ...

    def post(self, event: Event) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def end_if_device_lost(self, error: BaseException) -> bool: ...


@dataclass(slots=True)
class StepActivity:
    """Detector of computation that background loading would slow down: this worker's steps, or other processes that use
    the cores."""

    num_computed: Callable[[], int]  # layers computed by this worker's steps so far
    busy_s: Callable[[], float]  # processor time of all other processes of this machine so far
    sampled_at: float = field(init=False)
    _num_computed: int = field(init=False)
    _busy_s: float = field(init=False)
    _computed_at: float = -inf  # when this worker's steps last made progress
    _others_are_busy: bool = False

    def start(self, now: float) -> None:
        self.sampled_at, self._num_computed, self._busy_s = now, self.num_computed(), self.busy_s()

    def sample(self, now: float) -> bool:
        """Take a sample, and return whether steps are running."""
        num_computed, passed_s = self.num_computed(), now - self.sampled_at
        if num_computed != self._num_computed:
            self._num_computed, self._computed_at = num_computed, now
        if passed_s >= SAMPLE_S:  # the operating system counts in hundredths of a second
            busy_s = self.busy_s()
            self._others_are_busy = busy_s - self._busy_s >= BUSY_CORES * passed_s
            self.sampled_at, self._busy_s = now, busy_s
        return self._others_are_busy or now - self._computed_at < IDLE_AFTER_S


@dataclass(slots=True)
class Throttle:
    """Throttle of background work: a rest after each piece, in proportion to the time that the piece took.

    Without running steps, work continues at full speed.
    """

    clock: Clock
    steps: StepActivity
    # wait for this number of seconds; returns True early if the work is to end or to hurry
    wait: Callable[[float], bool]
    max_rest_s: float = inf  # limit of all rests together
    worked_s: float = 0.0  # time in pieces, without rests
    rested_s: float = 0.0
    _piece_began_at: float = field(init=False)

    def __post_init__(self) -> None:
        self._piece_began_at = self.clock.now()
        self.steps.start(self._piece_began_at)

    def rest(self) -> None:
        """End a piece of work, pause in proportion to its duration, and start the next piece."""
        now = self.clock.now()
        piece_s = now - self._piece_began_at
        self.worked_s += piece_s
        rest_s = min(piece_s * (1 / BACKGROUND_SHARE - 1), MAX_REST_S, self.max_rest_s - self.rested_s)
        began, until = now, now + rest_s
        while now < until and self.steps.sample(now) and not self.wait(min(until - now, SAMPLE_S)):
            now = self.clock.now()
        self._piece_began_at = self.clock.now()
        self.rested_s += self._piece_began_at - began

    def finish(self) -> None:
        """End the last piece of work, without a rest."""
        self.worked_s += self.clock.now() - self._piece_began_at


def _other_processes_busy_s() -> float:
    """Return the processor time of all processes of this machine except this one."""
    times = psutil.cpu_times()
    return sum(times) - times.idle - getattr(times, "iowait", 0.0) - time.process_time()


class PlanLoader:
    """Loader that carries out ``LoadLayers`` and ``LoadStandby``, and posts the results as events."""

    def __init__(
        self,
        owner: LoaderOwner,
        incarnation: str,
        executor: Executor,
        vitals: Vitals,
        clock: Clock,
        *,
        broker_host: str,
    ) -> None:
        """Initialise. ``broker_host``: see ``PeerConnector``."""
        self._owner = owner
        self._broker_host = broker_host
        self._incarnation = incarnation
        self._executor = executor
        self._vitals = vitals
        self._clock = clock
        self._stop_standby = threading.Event()

    def load(self, action: act.LoadLayers, lineage: Lineage) -> None:
        self._start_thread(functools.partial(self._load_plan, action, lineage))

    def load_standby(self, layers: tuple[LayerRange, ...]) -> None:
        self._stop_standby.clear()
        self._start_thread(functools.partial(self._load_standby, layers))

    def load_adapters(self, adapters: tuple[AdapterEntry, ...]) -> None:
        """Load adapters. They are small: steps have no priority. A hub that stalls does not look like loading."""
        threading.Thread(target=self._run_adapters, args=(adapters,), name="adapters", daemon=True).start()

    def _run_adapters(self, adapters: tuple[AdapterEntry, ...]) -> None:
        with report_thread_errors(self._on_crash):
            self._executor.enter_thread()
            try:
                event = AdaptersLoaded(self._executor.load_adapters(adapters))
            except LOAD_ERRORS as error:
                if self._owner.end_if_device_lost(error):
                    return
                event = AdaptersLoaded((), str(error))
            self._owner.post(event)

    def stop_standby(self) -> None:
        self._stop_standby.set()

    def _start_thread(self, load: Callable[[], Event]) -> None:
        threading.Thread(target=self._run, args=(load,), name="loader", daemon=True).start()

    def _run(self, load: Callable[[], Event]) -> None:
        self._vitals.set_loading(True)
        with report_thread_errors(self._on_crash):
            try:
                self._executor.enter_thread()
                event = load()
            finally:
                self._vitals.set_loading(False)
            self._owner.post(event)

    def _on_crash(self, error: BaseException) -> None:
        log.exception("loader_died")
        self._owner.fail(error)

    def _load_plan(self, action: act.LoadLayers, lineage: Lineage) -> Event:
        """Load a plan. Errors of the machine, the files or the plan become a LoadFailed event; any other error is a
        bug."""
        reported_at = self._clock.now()  # warm layers are there before a first report would be due
        throttle = self._plan_throttle(action)

        def on_progress(loaded_bytes: int, total_bytes: int) -> None:
            nonlocal reported_at
            self._vitals.loaded += 1
            if throttle is not None:
                throttle.rest()
            if failpoints.armed:
                failpoints.hit("load.tensor")
            now = self._clock.now()
            if now - reported_at >= PROGRESS_EVERY_S:
                reported_at = now
                message = LoadProgress(
                    epoch=action.epoch,
                    lineage=lineage,
                    incarnation=self._incarnation,
                    loaded_bytes=loaded_bytes,
                    total_bytes=total_bytes,
                )
                self._owner.on_control_action(act.SendToBroker(message))

        if action.relay and (problem := check_reachable(with_host(action.relay, self._broker_host))):
            return LoadFailed(
                action.epoch,
                f"the relay can't be reached, and this worker's own listener is not reachable either: {problem}",
            )
        if problem := check_reachable(with_host(action.edge.endpoint, self._broker_host)):
            return LoadFailed(action.epoch, problem, action.edge.to)
        try:
            capacity = self._executor.prepare(action.layers, action.standby, action.max_sequences, on_progress)
            if failpoints.armed:
                failpoints.hit("load.done")
        except LOAD_ERRORS as error:
            self._owner.end_if_device_lost(error)
            return LoadFailed(action.epoch, str(error))
        return Loaded(action.epoch, capacity)

    def _load_standby(self, layers: tuple[LayerRange, ...]) -> Event:
        """Load standby layers, a piece at a time, and rest in between while steps run."""
        throttle = self._throttle(self._wait_for_stop)
        reported: tuple[LayerRange, ...] | None = None
        reported_s = 0.0
        bits = self._executor.loaded_bits

        def on_progress(_: int, __: int) -> None:
            self._vitals.loaded += 1
            throttle.rest()

        def is_stopped(kept: tuple[LayerRange, ...]) -> bool:
            nonlocal reported, reported_s
            throttle.rest()
            if reported is not None and kept != reported:
                self._owner.post(StandbyProgressed(kept, throttle.worked_s - reported_s, bits()))
                reported_s = throttle.worked_s
            reported = kept
            return self._wait_for_stop(0.0)

        problem = ""
        try:
            standby = self._executor.keep(layers, on_progress, is_stopped)
        except LOAD_ERRORS as error:
            self._owner.end_if_device_lost(error)
            standby, problem = self._executor.keep((), on_progress, lambda _: True), str(error)
        throttle.finish()
        return StandbyLoaded(standby, throttle.worked_s - reported_s, problem, bits())

    def _plan_throttle(self, action: act.LoadLayers) -> Throttle | None:
        """Return the throttle of a load beside a plan that serves; None if no plan does."""
        wait = functools.partial(self._wait_for_fence, action.epoch)
        return self._throttle(wait, MAX_TOTAL_REST_S) if action.gently else None

    def _throttle(self, wait: Callable[[float], bool], max_rest_s: float = inf) -> Throttle:
        return Throttle(
            self._clock, StepActivity(lambda: self._vitals.computed, _other_processes_busy_s), wait, max_rest_s
        )

    def _wait_for_fence(self, epoch: int, seconds: float) -> bool:
        """Wait for ``seconds``, and return whether the plan in force has ended: then loading need not yield to its
        steps."""
        time.sleep(seconds)
        return self._vitals.fence >= epoch or self._owner.is_stopping

    def _wait_for_stop(self, seconds: float) -> bool:
        return self._stop_standby.wait(seconds) or self._owner.is_stopping
