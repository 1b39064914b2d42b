"""Reactions of a stage to a step that can't be computed, and its reports to the broker.

* *Memory.* If the device had too little memory, the stage drops its standby layers and computes the same step again,
  in pieces. That happens once per step: the second failure is final.
* *Report.* The stage reports which layers and which rows failed (``StepFailure``). The broker finds out whether the
  worker or a request is to blame.
* *Doubt.* A stage whose last step failed is in doubt until it has computed one. While in doubt, it sends no Hello
  before its device has passed a test (``TestDevice``). A failed test is repeated after a pause. After the third
  failure in a row the process ends, since some device errors last as long as the process.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from swarm.stage.actions import Action, Exit, FreeSpareMemory, SendToBroker, StopStandby, TestDevice
from swarm.stage.events import ComputeFailed, DeviceTested
from swarm.stage.membership import LogWriter
from swarm.stage.pending_plan import PendingPlan
from swarm.wire.messages import (
    DataPathError,
    KeptWarm,
    LayerRange,
    NotFinite,
    SelfTested,
    SequencePosition,
    Step,
    StepFailure,
)
from swarm.wire.tensors import describe_positions

MAX_FAILED_TESTS = 3
TEST_RETRY_S = 5.0  # after the first failed test; twice as long after the second


@dataclass(slots=True)
class FaultHandler:
    """State of a stage after failed steps. Appends its actions to ``actions``."""

    incarnation: str
    pending_plan: PendingPlan
    actions: list[Action]
    write_log: LogWriter
    count: Callable[[str], None]
    # A step failed, and none has succeeded under a later plan. Later steps of the same plan don't count: the broker has
    # given them up.
    is_in_doubt: bool = False
    failed_epoch: int = 0  # epoch of the last failed step
    is_testing: bool = False  # a test is running
    num_failed_tests: int = 0  # since the last test that passed
    retry_test_at: float | None = None  # when a failed test is repeated; None: no test is due

    # --- a step failed -----------------------------------------------------------------------------------------------

    def retry_in_pieces(self, failed: ComputeFailed, epoch: int) -> bool:
        """Compute a step again, in pieces, if it has failed for lack of memory for the first time.

        Returns whether it is retried. ``epoch`` is the highest epoch received, for the message about dropped standby
        layers.
        """
        if not failed.is_memory or failed.compute.in_pieces:
            return False
        dropped = self.pending_plan.drop_standby()
        self.count("memory_shortages")
        self.write_log("memory_short", "warning", reason=failed.reason, dropped=[str(layers) for layers in dropped])
        if self.pending_plan.is_loading_standby:
            self.actions.append(StopStandby())
        self.actions.append(FreeSpareMemory())
        if dropped:
            message = KeptWarm(epoch=epoch, incarnation=self.incarnation, layers=(), wanted=dropped, load_s=0.0)
            self.actions.append(SendToBroker(message))
        self.actions.append(replace(failed.compute, in_pieces=True))
        return True

    def record_failure(self, failed: ComputeFailed, layers: LayerRange) -> StepFailure:
        """Record that a step in these layers failed finally; return the details for the broker."""
        self.is_in_doubt, self.failed_epoch = True, failed.compute.epoch
        batch = failed.compute.batch
        rows = tuple(SequencePosition(row.sequence, row.start + row.count) for row in batch.rows)
        rows += tuple(SequencePosition(parts.sequence, parts.image.stop) for parts in batch.image_parts if parts.stop)
        return StepFailure(batch.through or layers, rows, failed.is_memory)

    def record_success(self, epoch: int) -> None:
        """Record that a step of this epoch went through the layers."""
        self.is_in_doubt = self.is_in_doubt and epoch == self.failed_epoch

    # --- the test ----------------------------------------------------------------------------------------------------

    def defer_hello(self) -> bool:
        """Return whether Hello must wait for a device test. Starts the test if none is running or scheduled."""
        if self.is_in_doubt and not self.is_testing and self.retry_test_at is None:
            self._start_test()
        return self.is_in_doubt

    def tick(self, now: float) -> None:
        """Repeat a failed test when it is due."""
        if self.retry_test_at is not None and now >= self.retry_test_at:
            self._start_test()

    def _start_test(self) -> None:
        self.is_testing, self.retry_test_at = True, None
        self.actions.append(TestDevice())

    def on_device_tested(self, event: DeviceTested, now: float) -> bool:
        """Record a test's result and report it; return whether a Hello may be sent."""
        self.is_testing = False
        problem = event.problem[:4000]
        self.actions.append(SendToBroker(SelfTested(epoch=0, incarnation=self.incarnation, problem=problem)))
        if not problem:
            self.is_in_doubt, self.num_failed_tests = False, 0
            self.write_log("device_test_passed")
            return True
        self.num_failed_tests += 1
        self.retry_test_at = now + TEST_RETRY_S * self.num_failed_tests
        self.write_log("device_test_failed", "error", reason=problem, times=self.num_failed_tests)
        if self.num_failed_tests >= MAX_FAILED_TESTS:
            text = f"its device failed {self.num_failed_tests} tests in a row after a step had failed: {problem}"
            self.actions.append(Exit(1, text))
        return False

    # --- reports to the broker ---------------------------------------------------------------------------------------

    def report_error(
        self,
        epoch: int,
        reason: str,
        *,
        damaged: bool = False,
        not_finite: NotFinite | None = None,
        failed: StepFailure | None = None,
        kv_overfull: bool = False,
        misplaced: bool = False,
        step: int | None = None,
    ) -> None:
        """Report to the broker that the data path of this epoch broke here.

        ``step``: the affected step, for the log.
        """
        step_field = {} if step is None else {"step": step}
        self.write_log("trouble", "error", reason=reason, epoch=epoch, **step_field)
        message = DataPathError(
            epoch=epoch,
            incarnation=self.incarnation,
            reason=reason[:4000],
            damaged=damaged,
            not_finite=not_finite,
            failed=failed,
            kv_overfull=kv_overfull,
            misplaced=misplaced,
        )
        self.actions.append(SendToBroker(message))

    def refuse_not_finite(self, epoch: int, step: Step, rows: tuple[SequencePosition, ...]) -> None:
        """Refuse a step with numbers that are not finite, which would spread, and report its sender."""
        self.count("not_finite_refused")
        problem = f"hidden states that are not finite came in step {step.step}: {describe_positions(rows)}"
        if not step.hops:  # no stage sends such a step
            self.report_error(epoch, f"{problem}, from no stage", damaged=True)
            return
        sender = step.hops[-1]
        report = NotFinite(sender.worker, sender.layers, rows)
        self.report_error(epoch, f"{problem}, from {sender.worker}, layers {sender.layers}", not_finite=report)
