"""Forecasts of replays and loads follow what this plan's prompts, earlier replays and earlier loads took."""

from __future__ import annotations

import pytest

from swarm.broker.planner.load import ChunkRatio, PlanGauge, Speeds, StepShape
from swarm.broker.planner.takeover import CHUNK_S, FIRST_CHUNK_S, MIN_LOAD_S
from swarm.broker.planning.measurements import LOAD_BYTES_PER_S, load_rate, replay_pace
from swarm.broker.recovery.worker_orders import StandbyOrders
from swarm.broker.state import Worker
from swarm.wire.messages import Hello, LayerCost
from tests.unit.broker.bench import Bench, FakeWorker, submit
from tests.unit.broker.recovery.test_rebuild import done, lose_one, ordered, replays

SLOWER = 3.0  # multiple of the benchmark's time
COSTS = (LayerCost("decode", 1, 0, 0.01, False), LayerCost("prefill", 4, 0, 0.02, False))


@pytest.fixture
def with_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers report the same benchmark."""
    plain = FakeWorker.hello

    def hello(self: FakeWorker, **changes: object) -> Hello:
        return plain(self, **({"costs": COSTS} | changes))

    monkeypatch.setattr(FakeWorker, "hello", hello)


def benchmark_s(num_layers: int, shape: StepShape) -> float:
    speeds = Speeds.from_costs(COSTS, alone=False)
    assert speeds is not None
    return speeds.step_s(shape, float(num_layers), has_head=False, has_embedding=False)


def rebuild_slowly(bench: Bench, slower: float) -> None:
    """All chunks take this multiple of the benchmark's time."""
    is_first = True
    while orders := replays(bench):
        order = orders[0]
        shape = StepShape.from_rows([(order.start, order.stop - order.start, False)])
        besides_s = CHUNK_S + (FIRST_CHUNK_S if is_first else 0.0)
        bench.now += besides_s + slower * benchmark_s(len(order.through), shape)
        is_first = False
        done(bench, order)


def holders(bench: Bench) -> list[Worker]:
    names = ordered(bench)
    return [w for w in bench.state.workers.values() if w.name in names and not w.is_gone]


@pytest.mark.usefixtures("with_benchmarks")
def test_a_slow_replay_raises_the_next_forecast() -> None:
    """The same loss again is predicted to take as long as the first one did, not as the benchmarks say."""
    bench = lose_one(chunk=4)
    workers, gauge = list(bench.state.workers.values()), PlanGauge()
    before = [replay_pace(worker, workers, gauge) for worker in holders(bench)]
    rebuild_slowly(bench, SLOWER)
    assert before == [1.0, 1.0]
    after = [replay_pace(worker, workers, gauge) for worker in holders(bench)]
    assert after == [1.0, pytest.approx(SLOWER, rel=0.05)]  # the first stage has computed no replay


@pytest.mark.usefixtures("with_benchmarks")
def test_the_recovery_report_has_the_corrected_forecast() -> None:
    """What ``swarmctl recoveries`` predicts for a second loss, after a first one whose replays were slow or not."""

    def second_forecast_s(slower: float) -> float:
        bench = lose_one(chunk=4)
        rebuild_slowly(bench, slower)
        for _ in range(2):
            bench.finish()
        bench.lose(ordered(bench)[0])
        current = bench.state.recoveries.current or bench.state.recoveries.past[-1]
        assert current.predicted is not None
        return current.predicted.replay_s

    assert second_forecast_s(4 * SLOWER) > second_forecast_s(1.0) + 0.1


@pytest.mark.usefixtures("with_benchmarks")
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


def test_a_load_beside_steps_never_lowers_the_rate(bench: Bench) -> None:
    """And the time that any load takes is no part of it: the forecast would count it twice."""
    bench.join("w0")
    orders, worker = StandbyOrders(bench.state, bench.core._out), bench.state.workers["w0.1"]
    large = 1 << 40
    assert load_rate(worker, [worker]) == LOAD_BYTES_PER_S
    orders.record_load(worker, large, MIN_LOAD_S + large / 2e9, is_alone=True)
    assert load_rate(worker, [worker]) == pytest.approx(2e9, rel=0.01)
    orders.record_load(worker, large, large / 1e9, is_alone=False)
    assert load_rate(worker, [worker]) == pytest.approx(2e9, rel=0.01)
    orders.record_load(worker, large, large / 1e9, is_alone=True)
    assert load_rate(worker, [worker]) == pytest.approx(1e9, rel=0.01)


def test_a_small_load_hardly_changes_the_forecast(bench: Bench) -> None:
    """Most of its time is that of any load."""
    bench.join("w0")
    orders, worker = StandbyOrders(bench.state, bench.core._out), bench.state.workers["w0.1"]
    orders.record_load(worker, 2 << 20, 0.1, is_alone=True)
    assert LOAD_BYTES_PER_S / 4 < load_rate(worker, [worker]) < LOAD_BYTES_PER_S


def test_a_worker_that_has_loaded_nothing_is_like_the_best_of_its_machine() -> None:
    """The others may have loaded at the same time, from a cold disk."""
    bench = Bench()
    for name in ("w0", "w1", "w2"):
        bench.join(name, host="here")
    workers = list(bench.state.workers.values())
    workers[0].load_bytes_per_s, workers[1].load_bytes_per_s = 1e8, 2e8
    workers[2].load_bytes_per_s = None
    assert load_rate(workers[2], workers) == 2e8
    assert load_rate(workers[0], workers) == 1e8
