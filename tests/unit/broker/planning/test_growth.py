"""Changes of a whole plan for speed alone: when they pay, how often they are made, and what is reported of them."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planning.growth import describe_move, pays_for_itself
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import PlanPhase
from swarm.broker.state.moves import MIN_STEPS, NUM_FIRST, DecodeRates, MovePrediction, PlanMove
from swarm.testing import fake_manifest
from swarm.wire.messages import KeepWarm, LayerCost, PlanCommand, Query
from tests.unit.broker.bench import Bench, orders, ranges, settings, submit

COOLDOWN_S = 30.0
STEP_S = 0.01  # of every step in these tests
NUM_TOKENS = 450
MODEL = fake_manifest(num_layers=12)


def join(bench: Bench, name: str, layer_s: float = 0.001) -> None:
    """A worker on a machine of its own that takes so many seconds for a layer."""
    worker = bench.add(name, bits="alike", manifest=MODEL)
    bench.tell(name, worker.hello(costs=(LayerCost("decode", 1, 0, layer_s, False),)))


def busy(num_requests: int = 1, **rules: object) -> Bench:
    """w0 and w1 serve requests."""
    own = PlanRules(load=PlannedLoad(rows=1, context=0, prompt=0.0), cooldown_s=COOLDOWN_S, **rules)  # type: ignore[arg-type]
    bench = Bench(settings(plan=ReconfigurationSettings(settle_s=0.0, rules=own)))
    join(bench, "w0")
    join(bench, "w1")
    bench.tick(0.5)
    assert set(ranges(bench)) == {"w0", "w1"}
    for number in range(num_requests):
        bench.say(submit(f"r{number}", num_prompt=3, max_tokens=NUM_TOKENS, ignore_eos=True))
    return bench


def run(bench: Bench, num_steps: int, step_s: float = STEP_S) -> None:
    """Steps that take this long."""
    for _ in range(num_steps):
        bench.tick(step_s)
        bench.finish()


def plan_of(bench: Bench) -> dict[str, Any]:
    return bench.ask(Query(what="plan")).body


# --- when -------------------------------------------------------------------------------------------------------------


def test_a_worker_that_joins_under_load_gets_layers() -> None:
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    assert set(ranges(bench)) == {"w0", "w1", "w2"}
    assert bench.state.moves.past[-1].cause == "with w2"


def test_under_load_the_plan_changes_once_per_cooldown() -> None:
    """The third and the fourth worker wait, and then one change gives layers to both."""
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    epoch = bench.epoch
    join(bench, "w3")
    join(bench, "w4")
    bench.tick(COOLDOWN_S - 1.0)
    assert bench.epoch == epoch
    bench.tick(1.5)
    assert bench.epoch == epoch + 1
    assert set(ranges(bench)) == {"w0", "w1", "w2", "w3", "w4"}


def test_meanwhile_new_workers_load_their_layers() -> None:
    """So the change takes no load any more."""
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    bench.take()
    join(bench, "w3")
    bench.tick(1.0)
    kept = [order.layers for peer, order in orders(bench.log, KeepWarm) if peer == "w3.1"]  # type: ignore[attr-defined]
    bench.tick(COOLDOWN_S)
    assert kept[-1] == (ranges(bench)["w3"],)
    assert bench.state.plans.current is not None
    assert next(s.load_bytes for s in bench.state.plans.current.stages if s.name == "w3") == 0


def test_without_requests_the_plan_changes_at_once() -> None:
    """It disturbs nobody."""
    bench = busy(0)
    for number in range(2, 4):
        join(bench, f"w{number}")
        bench.tick(0.3)
        assert len(ranges(bench)) == number + 1


def test_a_drained_worker_does_not_wait_for_the_cooldown() -> None:
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    bench.ask(PlanCommand(verb="drain", worker="w0"))
    bench.tick(0.3)
    assert set(ranges(bench)) == {"w1", "w2"}
    assert bench.state.moves.past[-1].cause == "without w0"


def test_an_operator_does_not_wait_for_the_cooldown() -> None:
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    join(bench, "w3")
    bench.ask(PlanCommand(verb="rebalance"))
    bench.tick(0.3)
    assert set(ranges(bench)) == {"w0", "w1", "w2", "w3"}


def test_a_loss_ends_the_cooldown() -> None:
    """A worker that comes back takes layers again immediately."""
    bench = busy()
    join(bench, "w2")
    bench.tick(0.3)
    bench.lose("w1")
    bench.tick(0.3)
    join(bench, "w3")
    bench.tick(0.3)
    assert set(ranges(bench)) == {"w0", "w2", "w3"}


@pytest.mark.parametrize(
    ("predicted", "pays"),
    [
        (MovePrediction(0.011, 0.010, pause_s=1.0), True),
        (MovePrediction(0.011, 0.010, load_s=600.0), True),
        (MovePrediction(0.011, 0.010, load_s=3600.0), False),
        (MovePrediction(0.011, 0.010, copy_s=600.0), False),
        (MovePrediction(0.011, 0.010, pause_s=60.0), False),
        (MovePrediction(0.020, 0.010, pause_s=60.0), True),
        (MovePrediction(None, 0.010, pause_s=1e6), True),
    ],
)
def test_a_change_must_save_more_than_it_costs(predicted: MovePrediction, pays: bool) -> None:
    """Within twenty cooldowns, ten minutes here."""
    assert pays_for_itself(predicted, COOLDOWN_S) is pays


def test_a_change_that_costs_too_much_is_not_made_while_requests_run() -> None:
    """A worker that loads its layers for hours gets them once nobody waits."""
    bench = busy()
    worker = bench.add("w2", bits="alike", manifest=MODEL)
    bench.mute = {"w2"}
    bench.tell("w2", worker.hello(costs=(LayerCost("decode", 1, 0, 0.001, False),)))
    bench.state.workers["w2.1"].load_bytes_per_s = 1.0
    bench.tick(2 * COOLDOWN_S)
    assert bench.state.plans.phase is PlanPhase.SERVING
    bench.run_dry()
    bench.tick(0.3)
    assert bench.state.plans.phase is PlanPhase.PREPARING


# --- what is reported -------------------------------------------------------------------------------------------------


def test_predicted_and_achieved_gain_are_shown() -> None:
    """By steps with as many sequences under both plans; and how long the worker waited for its layers."""
    bench = busy()
    run(bench, MIN_STEPS + 10)
    join(bench, "w2")
    joined_at = bench.now
    bench.tick(0.3)
    (move,) = plan_of(bench)["moves"]
    assert move["cause"] == "with w2"
    assert move["predicted"]["gain"] == pytest.approx(1.44, abs=0.01)
    assert move["measured"]["gain"] is None
    assert "not measured yet" in " ".join(plan_of(bench)["why"])
    run(bench, MIN_STEPS + 10, STEP_S / 1.4)
    (move,) = plan_of(bench)["moves"]
    assert move["measured"]["gain"] == pytest.approx(1.4, rel=0.02)
    assert move["measured"]["sequences"] == 1
    assert 0 <= move["measured"]["reached_s"] <= bench.now - joined_at
    (text,) = [line for line in plan_of(bench)["why"] if line.startswith("changed")]
    assert "predicted 44% faster, measured 40% faster with 1 sequence" in text


def test_what_was_achieved_stays_when_the_plan_ends() -> None:
    bench = busy()
    run(bench, MIN_STEPS + 10)
    join(bench, "w2")
    bench.tick(0.3)
    run(bench, MIN_STEPS + 10, STEP_S / 2)
    bench.lose("w2")
    bench.tick(0.3)
    (move,) = plan_of(bench)["moves"]
    assert move["measured"]["gain"] == pytest.approx(2.0, rel=0.02)
    assert not any(line.startswith("changed") for line in plan_of(bench)["why"])


def test_a_change_that_is_given_up_is_not_reported() -> None:
    bench = busy()
    bench.mute = {"w2"}
    join(bench, "w2")
    bench.tick(0.3)
    assert bench.state.moves.current is not None
    bench.lose("w2")
    bench.tick(0.3)
    assert bench.state.moves.current is None
    assert "moves" not in plan_of(bench)


def test_rates_are_compared_for_equal_numbers_of_sequences() -> None:
    rates = DecodeRates()
    for _ in range(NUM_FIRST):
        rates.record(1, 1, 0, 100.0)
    for _ in range(MIN_STEPS):
        rates.record(1, 1, 0, 0.1)
        rates.record(4, 4, 0, 0.2)
    rates.record(2, 2, 0, 0.1)
    before = rates.rows_per_s()
    assert before == {(1, 0): pytest.approx(10.0), (4, 0): pytest.approx(20.0)}
    rates.clear()
    assert rates.compare(before) is None
    for _ in range(NUM_FIRST):
        rates.record(4, 4, 0, 100.0)
    for _ in range(2 * MIN_STEPS):
        rates.record(2, 2, 0, 0.001)
        rates.record(4, 4, 0, 0.1)
    for _ in range(MIN_STEPS):
        rates.record(1, 1, 0, 0.1)
    assert rates.compare(before) == (4, pytest.approx(2.0))


def test_rates_are_compared_for_about_equal_numbers_of_proposed_tokens() -> None:
    """A step with many of them takes longer, whatever the plan."""
    rates = DecodeRates()
    for _ in range(NUM_FIRST + MIN_STEPS):
        rates.record(2, 2, 16, 0.2)
        rates.record(2, 2, 1, 0.1)
    before = rates.rows_per_s()
    rates.clear()
    for _ in range(NUM_FIRST + MIN_STEPS):
        rates.record(2, 2, 20, 0.1)
        rates.record(2, 2, 4, 0.001)
    assert rates.compare(before) == (2, pytest.approx(2.0))


def test_text_of_a_change_that_made_steps_slower() -> None:
    move = PlanMove("without w1", MovePrediction(0.01, 0.02), 1.0, {}, stopped_at=2.0, served_at=2.5)
    assert describe_move(move, (8, 0.5), 12.5) == (
        "changed 10 s ago (without w1): predicted 50% slower, measured 50% slower with 8 sequences; it took 1.5 s, and "
        "steps paused for 0.5 s"
    )
