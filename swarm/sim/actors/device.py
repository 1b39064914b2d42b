"""The device of a simulated worker, and its faults."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from swarm.sim.actors.environment import Environment
from swarm.sim.checks.audit import Violation
from swarm.stage.actions import Compute
from swarm.stage.events import Computed, ComputeFailed, ComputeFenced, DeviceTested
from swarm.stage.executor import FenceRaised, ForwardResult
from swarm.testing import FakeExecutor

PARTIAL_WRITE = 0.5  # share of failing steps that have written something before they fail


class SimDevice:
    """Executor of one worker."""

    def __init__(self, cluster: Environment, executor: FakeExecutor, slowness: float) -> None:
        self.executor = executor
        self._cluster = cluster
        self._world = cluster.world
        self._slowness = slowness
        self.crawls_s = 0.0  # extra time of each computation, which shows progress meanwhile
        self.num_not_finite = 0  # computations still to give numbers that are not finite
        self.num_failures = 0  # computations still to fail
        self.num_until_broken: int | None = None  # computations left until all of them fail; None: no fault

    def break_after(self, num_computed: int, *, is_seen_by_test: bool) -> None:
        """Make all computations fail after this number of further ones. ``is_seen_by_test``: tests of the device fail,
        too."""
        self.num_until_broken = num_computed
        self.executor.broken = "RuntimeError: the device is lost" if is_seen_by_test else ""

    def heal(self) -> None:
        self.crawls_s, self.num_not_finite, self.num_failures, self.num_until_broken = 0.0, 0, 0, None
        self.executor.broken = ""

    @property
    def draw_duration_s(self) -> float:
        """Draw the duration of the next computation."""
        duration_s = self._slowness * self._world.draw(self._world.pace.compute)
        return duration_s + (self._world.draw((0.0, self.crawls_s)) if self.crawls_s else 0.0)

    def compute(self, action: Compute, fenced: Callable[[], bool]) -> Computed | ComputeFailed | ComputeFenced:
        """Compute a step, or fail."""
        vocab_size = self.executor.manifest.vocab_size
        if action.batch.hidden is None and any(not 0 <= token < vocab_size for token in action.batch.tokens):
            raise Violation(f"I17: step {action.step} has tokens outside of the vocabulary")
        problem = self._problem(action)
        try:
            if problem and self._world.random.random() >= PARTIAL_WRITE:
                return ComputeFailed(action, problem, "memory" in problem)
            forwarded = self.executor.forward(action.batch, fenced, lambda: None)
        except FenceRaised:
            return ComputeFenced(action.epoch, action.step)
        if problem:
            return ComputeFailed(action, problem, "memory" in problem)
        return Computed(action.epoch, action.step, self._make_not_finite(forwarded))

    def test(self) -> DeviceTested:
        """Test the device."""
        try:
            self.executor.test(lambda: None)
        except RuntimeError as error:
            return DeviceTested(str(error))
        return DeviceTested()

    def _problem(self, action: Compute) -> str:
        """Return the error of this computation; empty: it succeeds."""
        if self.num_until_broken is not None:
            if not self.num_until_broken:
                return "RuntimeError: the device is lost"
            self.num_until_broken -= 1
        if self.num_failures:
            self.num_failures -= 1
            return "MemoryError: no memory" if self._world.random.random() < PARTIAL_WRITE else "RuntimeError: a hiccup"
        layers = action.batch.through or self.executor.layers
        sequences = [row.sequence for row in action.batch.rows]
        if layers is not None and self._cluster.blame_check.can_fail(
            sequences, layers, self._cluster.broker.core.state
        ):
            return "RuntimeError: a request that no device can compute"
        return ""

    def _make_not_finite(self, forwarded: ForwardResult) -> ForwardResult:
        if not self.num_not_finite or forwarded.hidden is None:
            return forwarded
        self.num_not_finite -= 1
        forwarded.hidden[self._world.random.randrange(len(forwarded.hidden)), 0] = np.nan
        return forwarded
