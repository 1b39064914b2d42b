"""A stage's figures, its profile lines, and the names in its log lines."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.series import RunningStats
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.engine.device import HostClock, make_clock, memory_stats
from swarm.stage.events import LoadFailed
from swarm.stage.executor import ForwardResult
from swarm.stage.statistics import StageStatistics
from swarm.wire.messages import Hop, LayerRange, Prepare, Rejoin, Row
from tests.unit.stage.bench import EDGE, NUM_LAYERS, StageBench, hidden_of, opened, step_of

MakeStage = Callable[..., StageBench]


def notes(actions: list[act.Action]) -> list[act.WriteStageLog]:
    return [action for action in actions if isinstance(action, act.WriteStageLog)]


def test_a_series_knows_its_last_total_and_greatest() -> None:
    """How many, the last, the total, the greatest; averages since a moment."""
    series = RunningStats()
    assert (series.average, series.average_since((0, 0.0))) == (0.0, 0.0)
    for value in (3.0, 5.0, 1.0):
        series.add(value)
    assert series.size_report() == {"total": 9.0, "last": 1.0, "average": 3.0, "most": 5.0}
    assert series.time_report() == {"total": 9e6, "last": 1e6, "average": 3e6}
    mark = series.snapshot()
    assert series.average_since(mark) == 0.0
    series.add(7.0)
    assert series.average_since(mark) == 7.0


def test_how_long_a_step_was_held(stage: StageBench) -> None:
    """From its arrival to its handing on: waiting behind another one, computing, and what it takes besides."""
    stage.step(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.now += 0.5
    stage.step(step_of(2, Row(2, 0, 3, True), open=(opened(2),)))  # waits for the first
    stage.now += 1.0
    stage.compute()
    stage.now += 0.25
    (out,) = stage.compute()
    assert isinstance(out, act.SendStep)
    (hop,) = out.step.hops
    assert (hop.wait_s, hop.held_s) == (1.0, 1.25)
    values = stage.core.statistics.flat_values()
    assert (values["calls"], values["overlapped_calls"]) == (2, 2)
    assert values["microseconds.total.last"] == 1.25e6
    assert values["microseconds.total.total"] == 2.75e6
    assert (values["sizes.rows.total"], values["sizes.positions.average"]) == (2, 3)
    assert (values["sizes.bytes_in.total"], values["sizes.bytes_in.most"]) == (14, 7)


def test_steps_that_wait_are_the_queue(stage: StageBench) -> None:
    """Those behind the one that begins."""
    for number in (1, 2, 3):
        stage.step(step_of(number, Row(number, 0, 3, True), open=(opened(number),)))
    for _ in range(3):
        stage.compute()
    depth = stage.core.statistics.queue_depth
    assert (depth.most, depth.total) == (1, 1)  # the first had nobody behind it yet, the second the third


def test_a_step_alone_does_not_overlap(stage: StageBench) -> None:
    """The broker says whether others are in flight."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),), alone=True))
    stage.run(step_of(2, Row(1, 3, 1, True)))
    assert (stage.core.statistics.calls, stage.core.statistics.overlapped_calls) == (2, 1)


def test_steps_without_rows_are_no_calls(stage: StageBench) -> None:
    """They compute nothing."""
    stage.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),)))
    stage.run(step_of(2, release=(1,)))
    assert stage.core.counters["steps"] == 2
    assert stage.core.statistics.calls == 1


def test_parts_of_computing() -> None:
    """The copy where something is handed on, the head and the sampling where tokens are drawn."""
    statistics = StageStatistics()
    hop = Hop("w0", LayerRange(0, 3), 0.0, 0.02, 0.004, 0.0, 7, 0.03)
    step = step_of(1, Row(1, 0, 3, True))
    statistics.add_step(step, ForwardResult(hidden_of(3), (), (), 0.02, 0.0, copy_s=0.001), hop, 0)
    statistics.add_step(step, ForwardResult(None, (), (), 0.02, 0.004, head_s=0.005), hop, 0)
    statistics.add_decoding(0.0001)
    statistics.add_sending(0.0002, 4096)
    values = statistics.flat_values()
    assert (values["microseconds.copy.total"], values["microseconds.head.last"]) == (1000.0, 5000.0)
    assert (values["microseconds.sample.average"], values["microseconds.compute.total"]) == (4000.0, 40000.0)
    assert (values["microseconds.bridge_in.last"], values["microseconds.bridge_out.last"]) == (100.0, 200.0)
    assert values["sizes.bytes_out.last"] == 4096


def test_profile_lines_on_request() -> None:
    """Every so many calls, with the averages since the last line."""
    bench = StageBench()
    bench.core = StageCore(StageSettings("w0", "w0.1", NUM_LAYERS, log_bytes=1 << 20, profile_every=2))
    bench.activate()
    lines = notes(bench.run(step_of(1, Row(1, 0, 3, True), open=(opened(1),))))
    for number in range(2, 6):
        lines += notes(bench.run(step_of(number, Row(1, number + 1, 1, True))))
    assert [line.event for line in lines] == ["profile", "profile"]
    assert [line.fields["positions"] for line in lines] == [2.0, 1.0]
    assert lines[0].fields["compute_us"] == 1000.0


def test_lines_about_a_plan_name_its_cause(make_stage: MakeStage) -> None:
    """Epoch and cause of the order that they follow from, also when loading ends long after it, among other orders."""
    stage = make_stage()
    prepare = Prepare(epoch=3, layers=LayerRange(0, 3), standby=(), edge=EDGE, max_sequences=4, cause="b-17")
    stage.order(prepare)
    (rejoining,) = notes(stage.order(Rejoin(reason="declared out", cause="b-18")))
    assert (rejoining.event, rejoining.fields["cause"]) == ("rejoining", "b-18")
    (failed,) = notes(stage.feed(LoadFailed(3, "no room")))
    assert (failed.event, failed.fields["epoch"], failed.fields["cause"]) == ("load_failed", 3, "b-17")


def test_lines_about_a_step_name_it(stage: StageBench) -> None:
    """Step, epoch and cause; the answer and what is sent on carry the cause further."""
    first = msgspec.structs.replace(step_of(1, Row(1, 0, 3, True), open=(opened(1),)), cause="b-1")
    (out,) = (action for action in stage.run(first) if isinstance(action, act.SendStep))
    assert out.step.cause == "b-1"
    wrong = msgspec.structs.replace(step_of(2, Row(1, 7, 1, True)), cause="b-2")
    (trouble,) = notes(stage.step(wrong))
    assert (trouble.event, trouble.fields["cause"]) == ("trouble", "b-2")
    assert (trouble.fields["epoch"], trouble.fields["step"]) == (1, 2)


def test_the_answer_carries_the_cause(last: StageBench) -> None:
    """So that the broker's log can be followed through a step."""
    step = msgspec.structs.replace(step_of(1, Row(1, 0, 3, True), open=(opened(1),)), cause="b-9")
    (done,) = (action for action in last.run(step) if isinstance(action, act.SendDone))
    assert done.done.cause == "b-9"


def test_the_hosts_clock() -> None:
    """Where work is done when the call returns, moments are readings of a clock."""
    readings = iter([1.0, 3.5])
    clock = HostClock(lambda: next(readings))
    first, last = clock.mark(), clock.mark()
    assert clock.elapsed_s(first, last) == 2.5


def test_the_processors_clock_and_memory() -> None:
    """On the CPU: the host's clock, the process's memory and the machine's."""
    torch = pytest.importorskip("torch")
    assert isinstance(make_clock(torch.device("cpu")), HostClock)
    memory = memory_stats(torch.device("cpu"))
    assert 0 < memory["device_memory_bytes"] < memory["device_memory_total_bytes"]
