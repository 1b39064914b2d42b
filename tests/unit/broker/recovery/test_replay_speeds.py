"""Forecasts of replays and loads follow what this plan's prompts, earlier replays and earlier loads took."""

from __future__ import annotations

import pytest

from swarm.broker.planner.load import ChunkRatio, PlanGauge, Speeds, StepShape
from swarm.broker.planner.takeover import CHUNK_S, FIRST_CHUNK_S, MIN_LOAD_S
from swarm.broker.planning.measurements import LOAD_BYTES_PER_S, load_rate, replay_pace
from swarm.broker.recovery.worker_orders import StandbyOrders
from swarm.broker.state import Worker
from tests.unit.broker.bench import Bench, submit
from tests.unit.broker.recovery.test_rebuild import done, lose_one, ordered, replays

SLOWER = 3.0  # multiple of the benchmark's time


def predicted_s(bench: Bench, through: int, shape: StepShape) -> float:
    """Time of a chunk in this number of layers by the benchmark; all workers of the bench have the same."""
    speeds = Speeds.from_costs(next(iter(bench.state.workers.values())).hello.costs, alone=False)
    assert speeds is not None
    return speeds.step_s(shape, float(through), has_head=False, has_embedding=False)


def rebuild_slowly(bench: Bench, slower: float) -> None:
    """All chunks take this multiple of the benchmark's time."""
    is_first = True
    while orders := replays(bench):
        order = orders[0]
        shape = StepShape.from_rows([(order.start, order.stop - order.start, False)])
        besides_s = CHUNK_S + (FIRST_CHUNK_S if is_first else 0.0)
        bench.now += besides_s + slower * predicted_s(bench, len(order.through), shape)
        is_first = False
        done(bench, order)


def holders(bench: Bench) -> list[Worker]:
    names = ordered(bench)
    return [w for w in bench.state.workers.values() if w.name in names and not w.is_gone]


def test_a_slow_replay_raises_the_next_forecast() -> None:
    """The same loss again is predicted to take as long as the first one did, not as the benchmarks say."""
    bench = lose_one(chunk=4)
    workers, gauge = list(bench.state.workers.values()), PlanGauge()
    before = [replay_pace(worker, workers, gauge) for worker in holders(bench)]
    rebuild_slowly(bench, SLOWER)
    assert before == [1.0, 1.0]
    assert [replay_pace(worker, workers, gauge) for worker in holders(bench)] == [pytest.approx(SLOWER, rel=0.05)] * 2


def test_the_recovery_report_has_the_corrected_forecast() -> None:
    """What ``swarmctl recoveries`` predicts for a second loss, after a first one whose replays were slow or not."""

    def second_forecast_s(slower: float) -> float:
        bench = lose_one(chunk=4)
        rebuild_slowly(bench, slower)
        bench.run_dry(3)
        bench.join("again")
        bench.lose(ordered(bench)[1])
        current = bench.state.recoveries.current or bench.state.recoveries.past[-1]
        assert current.predicted is not None
        return current.predicted.replay_s

    assert second_forecast_s(4 * SLOWER) > second_forecast_s(1.0) + CHUNK_S


def test_a_chunk_beside_a_step_does_not_count() -> None:
    """The step took a part of its time."""
    bench = lose_one(chunk=4, count=2)
    assert not any(worker.chunk_ratio.num for worker in bench.state.workers.values())
    (first, second) = replays(bench)[:2]
    done(bench, first)
    counted = [worker.chunk_ratio.num for worker in holders(bench)]
    bench.say(submit("another", num_prompt=3))
    assert bench.pipe
    bench.now += 5.0
    done(bench, second)
    assert [worker.chunk_ratio.num for worker in holders(bench)] == counted


def test_prompts_show_the_speed_of_replays() -> None:
    """A worker without any of its own is like the others on its machine."""
    bench = Bench().serve(2, host="here")
    bench.join("spare", host="here")
    workers = list(bench.state.workers.values())
    for worker in workers[:2]:
        for _ in range(8):
            worker.chunk_ratio.record(0.01, 0.02)
    assert [replay_pace(worker, workers, PlanGauge()) for worker in workers] == [pytest.approx(2.0)] * 3
    elsewhere = Bench().serve(2)
    alone = list(elsewhere.state.workers.values())
    alone[0].chunk_ratio.record(0.01, 0.02)
    alone[0].chunk_ratio.record(0.01, 0.02)
    assert replay_pace(alone[1], alone, PlanGauge()) == 1.0


def test_the_latest_chunks_count_most() -> None:
    ratio = ChunkRatio()
    assert ratio.value is None
    for _ in range(50):
        ratio.record(0.01, 0.01)
    for _ in range(50):
        ratio.record(0.01, 0.02)
    assert ratio.value == pytest.approx(2.0, rel=0.05)


def test_a_load_beside_steps_never_lowers_the_rate(serving: Bench) -> None:
    """And the time that any load takes is no part of it: the forecast would count it twice."""
    orders, (worker, other, *_) = (
        StandbyOrders(serving.state, serving.core._out),
        list(serving.state.workers.values()),
    )
    large = 1 << 40
    assert load_rate(worker, [worker, other]) == LOAD_BYTES_PER_S
    orders.record_load(worker, large, MIN_LOAD_S + large / 2e9, is_alone=True)
    assert load_rate(worker, [worker]) == pytest.approx(2e9, rel=0.01)
    orders.record_load(worker, large, large / 1e9, is_alone=False)
    assert load_rate(worker, [worker]) == pytest.approx(2e9, rel=0.01)
    orders.record_load(worker, large, large / 1e9, is_alone=True)
    assert load_rate(worker, [worker]) == pytest.approx(1e9, rel=0.01)
    orders.record_load(worker, 2 << 20, 0.2, is_alone=True)
    assert load_rate(worker, [worker]) > LOAD_BYTES_PER_S / 4
