"""The device of a simulated worker, and its faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from swarm.sim.actors.surroundings import Surroundings
from swarm.stage.actions import Compute
from swarm.stage.events import Computed, ComputeFailed, ComputeFenced, DeviceTested
from swarm.stage.executor import Fenced, Forwarded
from swarm.testing import FakeExecutor

GARBAGE = 0.5  # share of failing steps that have written something before they fail


class Device:
    """Executor of one worker."""

    def __init__(self, cluster: Surroundings, executor: FakeExecutor, slowness: float) -> None:
        self.executor = executor
        self._cluster = cluster
        self._world = cluster.world
        self._slowness = slowness
        self.crawls_s = 0.0  # extra time of each computation, which shows progress meanwhile
        self.poisons = 0  # computations still to give numbers that are not finite
        self.fails = 0  # computations still to fail
        self.lasts: int | None = None  # computations left until all of them fail; None: no fault

    def break_after(self, num_computed: int, *, is_seen_by_test: bool) -> None:
        """Let all computations fail after this number of further ones. ``is_seen_by_test``: tests of the device fail,
        too."""
        self.lasts = num_computed
        self.executor.broken = "RuntimeError: the device is lost" if is_seen_by_test else ""

    def heal(self) -> None:
        self.crawls_s, self.poisons, self.fails, self.lasts = 0.0, 0, 0, None
        self.executor.broken = ""

    @property
    def takes_s(self) -> float:
        """Draw the duration of the next computation."""
        took = self._slowness * self._world.draw(self._world.pace.compute)
        return took + (self._world.draw((0.0, self.crawls_s)) if self.crawls_s else 0.0)

    def compute(self, action: Compute, fenced: Callable[[], bool]) -> Computed | ComputeFailed | ComputeFenced:
        """Compute a step, or fail."""
        problem = self._problem(action)
        try:
            if problem and self._world.random.random() >= GARBAGE:
                return ComputeFailed(action, problem, "memory" in problem)
            forwarded = self.executor.forward(action.batch, fenced, lambda: None)
        except Fenced:
            return ComputeFenced(action.epoch, action.step)
        if problem:
            return ComputeFailed(action, problem, "memory" in problem)
        return Computed(action.epoch, action.step, self._poisoned(forwarded))

    def test(self) -> DeviceTested:
        """Test the device."""
        try:
            self.executor.test(lambda: None)
        except RuntimeError as error:
            return DeviceTested(str(error))
        return DeviceTested()

    def _problem(self, action: Compute) -> str:
        """Return the error of this computation; empty: it succeeds."""
        if self.lasts is not None:
            if not self.lasts:
                return "RuntimeError: the device is lost"
            self.lasts -= 1
        if self.fails:
            self.fails -= 1
            return "MemoryError: no memory" if self._world.random.random() < GARBAGE else "RuntimeError: a hiccup"
        layers = action.batch.through or self.executor.layers
        sequences = [row.sequence for row in action.batch.rows]
        if layers is not None and self._cluster.blame.makes_fail(sequences, layers, self._cluster.broker.core.state):
            return "RuntimeError: a request that nobody can compute"
        return ""

    def _poisoned(self, forwarded: Forwarded) -> Forwarded:
        if not self.poisons or forwarded.hidden is None:
            return forwarded
        self.poisons -= 1
        forwarded.hidden[self._world.random.randrange(len(forwarded.hidden)), 0] = np.nan
        return forwarded
