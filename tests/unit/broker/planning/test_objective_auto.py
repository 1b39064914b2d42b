"""Objective auto: for one answer at a time while little is asked, for many at once while much is; and no change of
plan that is not worth it."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from swarm.broker.core import CoreSettings
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planning.demand import BUSY_S
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.testing import fake_manifest
from swarm.wire.messages import LayerCost, PlanCommand, PlanOverrides, Query
from tests.unit.broker.bench import Bench, ranges, settings, submit

MakeBench = Callable[..., Bench]
QUIET_S = 60.0
QUICK_S = 0.0001  # of a layer: the way to another machine is worth many of them
SLOW_S = 0.1


def ruled(**fields: object) -> CoreSettings:
    rules = PlanRules(**({"load": PlannedLoad(1, 0, 0.0), "quiet_s": QUIET_S} | fields))  # type: ignore[arg-type]
    return settings(plan=ReconfigurationSettings(settle_s=0.0, rules=rules))


def serving(bench: Bench, layer_s: float = QUICK_S, **fields: object) -> Bench:
    for name in ("w0", "w1"):
        worker = bench.add(name, **fields)
        bench.tell(name, worker.hello(costs=(LayerCost("decode", 1, 0, layer_s, False),)))
    bench.tick()
    bench.tick()
    return bench


def lengths(bench: Bench) -> dict[str, int]:
    return {name: len(layers) for name, layers in ranges(bench).items()}


def is_quiet(bench: Bench) -> bool:
    return bench.ask(Query(what="plan")).body["demand"] == "quiet"


def run_for(bench: Bench, seconds: float) -> None:
    """Requests that are there go on meanwhile."""
    until = bench.now + seconds
    while bench.now < until:
        bench.tick()
        if bench.pipe:
            bench.finish()


def ask_for(bench: Bench, *names: str) -> None:
    for name in names:
        bench.say(submit(name, max_tokens=500, ignore_eos=True))


@pytest.mark.slow
def test_it_follows_the_load(make_bench: MakeBench) -> None:
    """First for many; after a quiet minute one machine computes alone, since each step would go to the other and back;
    when many have come and stayed, both do. A single request all the time changes nothing."""
    bench = serving(make_bench(ruled()))
    assert lengths(bench) == {"w0": 3, "w1": 3}
    ask_for(bench, "alone")
    run_for(bench, QUIET_S + 1.0)
    assert lengths(bench) in ({"w0": 6}, {"w1": 6})
    assert bench.state.plans.current is not None
    assert bench.state.plans.current.objective == "latency"
    ask_for(bench, "a", "b")
    run_for(bench, BUSY_S + 1.0)
    assert lengths(bench) == {"w0": 3, "w1": 3}
    assert bench.state.plans.current.objective == "throughput"
    assert bench.epoch == 3


@pytest.mark.slow
def test_a_change_must_be_worth_it(make_bench: MakeBench) -> None:
    """Where the way between machines is short beside the computing, the plan stays: another would gain little."""
    bench = serving(make_bench(ruled()), SLOW_S)
    before = bench.ask(Query(what="plan")).body
    run_for(bench, 10 * QUIET_S)
    assert is_quiet(bench)
    after = bench.ask(Query(what="plan")).body
    assert after == before | {name: after[name] for name in ("demand", "demand_since_s")}
    assert (lengths(bench), bench.epoch) == ({"w0": 3, "w1": 3}, 1)


def test_stages_that_take_turns_stay(make_bench: MakeBench) -> None:
    """On the cores of one machine a step takes the sum, whatever the objective; and whoever starts several workers
    there wants several."""
    bench = serving(make_bench(ruled()), host="here")
    run_for(bench, QUIET_S + 1.0)
    assert (lengths(bench), bench.epoch) == ({"w0": 3, "w1": 3}, 1)


@pytest.mark.parametrize("fields", [{"objective": "throughput"}, {"mode": "overlapped"}, {"quiet_s": 0.0}])
def test_what_is_said_counts(make_bench: MakeBench, fields: dict[str, object]) -> None:
    bench = serving(make_bench(ruled(**fields)))
    run_for(bench, QUIET_S + 1.0)
    assert (lengths(bench), bench.epoch) == ({"w0": 3, "w1": 3}, 1)


@pytest.mark.slow
def test_an_operator_s_objective_counts_before(make_bench: MakeBench) -> None:
    """And auto is taken up again when it is taken back."""
    bench = serving(make_bench(ruled()))
    bench.ask(PlanCommand("plan", by_hand=PlanOverrides(objective="throughput")))
    run_for(bench, QUIET_S + 1.0)
    assert bench.epoch == 1
    bench.ask(PlanCommand("plan"))
    run_for(bench, QUIET_S + 1.0)
    assert bench.state.plans.current is not None
    assert bench.state.plans.current.objective == "latency"


def test_no_request_becomes_too_large(make_bench: MakeBench) -> None:
    """One machine alone has no room for the keys and values of a whole context, both together have: the plan stays, or
    a request that it would have taken would be refused."""
    manifest = msgspec.structs.replace(fake_manifest(), context=1 << 18, kv_bytes_per_token=(40,) * 6)
    bench = serving(make_bench(ruled()), manifest=manifest)
    run_for(bench, QUIET_S + 1.0)
    assert is_quiet(bench)
    assert (lengths(bench), bench.epoch) == ({"w0": 3, "w1": 3}, 1)


def test_the_report_says_so(make_bench: MakeBench) -> None:
    bench = serving(make_bench(ruled()))
    run_for(bench, QUIET_S + 10.0)
    body = bench.ask(Query(what="plan")).body
    assert (body["objective"], body["demand"]) == ("latency", "quiet")
    assert 5.0 < body["demand_since_s"] < 12.0  # type: ignore[operator]
    assert any(
        "objective auto: latency while at most one sequence is under way (plan.quiet_s), throughput again once 2 are"
        in line
        for line in body["why"]  # type: ignore[attr-defined]
    )
