"""Loads the layers of a plan, and those kept warm for others, in a thread that comes and goes with each order."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Protocol

from swarm import failpoints
from swarm.clock import Clock
from swarm.errors import ModelError, whatever_ends_it
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.events import Event, Loaded, LoadFailed, StandbyLoaded
from swarm.stage.executor import Executor
from swarm.stage.shell.vitals import Vitals
from swarm.wire.door.keys import reached
from swarm.wire.door.knocking import why_unreachable
from swarm.wire.messages import LayerRange, Lineage, LoadProgress

REFUSALS = (ModelError, RuntimeError, MemoryError, OSError)  # torch's own errors are RuntimeErrors
PROGRESS_EVERY_S = 0.2

log = get_logger(__name__)


class Owner(Protocol):
    """The compute thread, as its loader needs it: all of it may be called from any thread."""

    @property
    def outward(self) -> Callable[[act.Tell], None]: ...

    @property
    def is_stopping(self) -> bool: ...

    def post(self, event: Event) -> None: ...

    def fail(self, error: BaseException) -> None: ...


class PlanLoader:
    """Carries out ``Load`` and ``LoadStandby``, and posts what came of it."""

    def __init__(
        self, owner: Owner, incarnation: str, executor: Executor, vitals: Vitals, clock: Clock, *, broker_host: str
    ) -> None:
        """``broker_host``: see ``Way``."""
        self._owner = owner
        self._broker_host = broker_host
        self._incarnation = incarnation
        self._executor = executor
        self._vitals = vitals
        self._clock = clock
        self._stop_standby = False

    def load(self, action: act.Load, lineage: Lineage) -> None:
        self._begin(functools.partial(self._loaded, action, lineage))

    def load_standby(self, layers: tuple[LayerRange, ...]) -> None:
        self._stop_standby = False
        self._begin(functools.partial(self._standby_loaded, layers))

    def stop_standby(self) -> None:
        self._stop_standby = True

    def _begin(self, load: Callable[[], Event]) -> None:
        threading.Thread(target=self._run, args=(load,), name="loader", daemon=True).start()

    def _run(self, load: Callable[[], Event]) -> None:
        self._vitals.set_loading(True)
        with whatever_ends_it(self._died):
            try:
                event = load()
            finally:
                self._vitals.set_loading(False)
            self._owner.post(event)

    def _died(self, error: BaseException) -> None:
        log.exception("loader_died")
        self._owner.fail(error)

    def _loaded(self, action: act.Load, lineage: Lineage) -> Event:
        """Load a plan. What the machine, the files or the plan don't allow is a refusal; anything else is a bug."""
        told_at = 0.0

        def progressed(loaded_bytes: int, total_bytes: int) -> None:
            nonlocal told_at
            self._vitals.loaded += 1
            if failpoints.armed:
                failpoints.reached("load.tensor")
            now = self._clock.now()
            if now - told_at >= PROGRESS_EVERY_S:
                told_at = now
                message = LoadProgress(
                    epoch=action.epoch,
                    lineage=lineage,
                    incarnation=self._incarnation,
                    loaded_bytes=loaded_bytes,
                    total_bytes=total_bytes,
                )
                self._owner.outward(act.Tell(message))

        if action.relay and (problem := why_unreachable(reached(action.relay, self._broker_host))):
            return LoadFailed(action.epoch, f"no relay, and nobody reaches this worker's own door: {problem}")
        if problem := why_unreachable(reached(action.edge.endpoint, self._broker_host)):
            return LoadFailed(action.epoch, problem, action.edge.to)
        try:
            capacity = self._executor.prepare(action.layers, action.standby, action.max_sequences, progressed)
            if failpoints.armed:
                failpoints.reached("load.done")
        except REFUSALS as error:
            return LoadFailed(action.epoch, str(error))
        return Loaded(action.epoch, capacity)

    def _standby_loaded(self, layers: tuple[LayerRange, ...]) -> Event:
        def progressed(_: int, __: int) -> None:
            self._vitals.loaded += 1

        began = self._clock.now()
        problem = ""
        try:
            kept = self._executor.keep(layers, progressed, lambda: self._stop_standby or self._owner.is_stopping)
        except REFUSALS as error:
            kept, problem = self._executor.keep((), progressed, lambda: True), str(error)
        return StandbyLoaded(kept, self._clock.now() - began, problem)
