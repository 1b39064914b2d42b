"""From what workers said to a plan: modes, objectives, thresholds, forecasts, suppositions; when a plan is changed."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.core import CoreSettings
from swarm.broker.planner.load import PlannedLoad
from swarm.broker.planner.problem import Shortage
from swarm.broker.planner.tables import HOP_S, STEP_S
from swarm.broker.planning.proposals import propose
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.wire.messages import (
    Denied,
    Hop,
    LayerCost,
    LayerRange,
    LinkCost,
    PlanWhatIf,
    Probe,
    Probed,
    Query,
)
from tests.unit.broker.bench import MIB, Bench, orders, ranges, settings, submit

LOAD = PlannedLoad(rows=1, context=0, prompt=0.0)
S = pytest.approx


def ruled(**fields: object) -> CoreSettings:
    rules = PlanRules(**({"load": LOAD} | fields))  # type: ignore[arg-type]
    return settings(plan=ReconfigurationSettings(settle_s=0.0, rules=rules))


def costs(layer_s: float, *, alone_s: float | None = None, head_s: float = 0.0) -> tuple[LayerCost, ...]:
    found = [LayerCost("decode", 1, 0, layer_s, False)]
    if head_s:
        found.append(LayerCost("head", 1, 0, head_s, False))
    if alone_s is not None:
        found.append(LayerCost("decode", 1, 0, alone_s, True))
    return tuple(found)


def join(bench: Bench, name: str, layer_s: float, **fields: object) -> None:
    """A worker that measured so many seconds for a layer."""
    extra = {key: fields.pop(key) for key in ("alone_s", "head_s") if key in fields}
    worker = bench.add(name, **{k: v for k, v in fields.items() if k in ("host", "memory_bytes", "device")})
    said = {key: fields[key] for key in ("link", "cores") if key in fields}
    bench.tell(name, worker.hello(costs=costs(layer_s, **extra), **said))  # type: ignore[arg-type]


def lengths(bench: Bench) -> dict[str, int]:
    return {name: len(layers) for name, layers in ranges(bench).items()}


def plan_of(bench: Bench, **suppose: object) -> dict[str, object]:
    asked = PlanWhatIf(**suppose) if suppose else None  # type: ignore[arg-type]
    answer = bench.ask(Query(what="plan", suppose=asked))
    return {**answer.body, "ok": answer.ok}


# --- by measurement ---------------------------------------------------------------------------------------------------


def why_of(bench: Bench) -> list[str]:
    """The plan in force, explained."""
    return plan_of(bench)["why"]  # type: ignore[return-value]


def test_shares_follow_what_was_measured(make_bench: Callable[..., Bench]) -> None:
    """A worker that is half as quick gets half as much; whoever has the head gets less."""
    bench = make_bench(ruled())
    join(bench, "quick", 0.001)
    join(bench, "slow", 0.002)
    bench.tick()
    assert lengths(bench) == {"quick": 4, "slow": 2}
    bench = make_bench(ruled())
    join(bench, "w0", 0.001, head_s=0.002)
    join(bench, "w1", 0.001, head_s=0.002)
    bench.tick()
    assert list(lengths(bench).values()) == [4, 2]


def test_one_that_measured_nothing_counts_as_the_others(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled())
    join(bench, "w0", 0.005)
    bench.join("w1")
    bench.tick()
    assert lengths(bench) == {"w0": 3, "w1": 3}


def test_workers_of_one_machine_take_turns_and_share_evenly(make_bench: Callable[..., Bench]) -> None:
    """Their figures are of the same cores, so a difference is noise; a step takes the sum, with all cores."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.004, alone_s=0.002, host="here")
    join(bench, "w1", 0.005, alone_s=0.003, host="here")
    bench.tick()
    assert lengths(bench) == {"w0": 3, "w1": 3}
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert forecast is not None
    assert forecast.takes_turns
    assert sum(stage.compute_s for stage in forecast.stages) == pytest.approx(6 * 0.002)
    assert forecast.step_s >= 0.012
    # A newcomer on the same machine gets its part, though nothing becomes quicker.
    join(bench, "w2", 0.004, alone_s=0.002, host="here")
    bench.tick()
    assert lengths(bench) == {"w0": 2, "w1": 2, "w2": 2}


@pytest.mark.parametrize(("mode", "in_turns"), [("batch", True), ("overlapped", False), ("auto", False)])
def test_the_mode_says_whether_stages_take_turns(make_bench: Callable[..., Bench], mode: str, in_turns: bool) -> None:
    """On two machines: a batch goes through one stage after the other, whatever else they could do meanwhile."""
    bench = make_bench(ruled(mode=mode))
    join(bench, "w0", 0.001, host="here")
    join(bench, "w1", 0.001, host="there")
    bench.tick()
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert forecast.takes_turns is in_turns  # type: ignore[union-attr]
    step_s = 0.006 + STEP_S if in_turns else (0.006 + HOP_S + STEP_S) / 2
    assert forecast.step_s == pytest.approx(step_s, rel=0.001)  # type: ignore[union-attr]


def test_overlapped_is_measured_by_the_slowest(make_bench: Callable[..., Bench]) -> None:
    """In mode overlapped, also on one machine: with the threads of a step among others."""
    bench = make_bench(ruled(mode="overlapped"))
    join(bench, "w0", 0.004, alone_s=0.001, host="here")
    join(bench, "w1", 0.006, alone_s=0.001, host="here")
    bench.tick()
    assert lengths(bench) == {"w0": 4, "w1": 2}
    assert bench.state.plans.current.forecast.step_s == pytest.approx(0.016)  # type: ignore[union-attr]


def test_a_machine_alone_may_be_quicker_than_all(make_bench: Callable[..., Bench]) -> None:
    """Two workers of one machine and a snail elsewhere: the machine alone, in turns, leaves the snail out."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.004, alone_s=0.001, host="here")
    join(bench, "w1", 0.004, alone_s=0.001, host="here")
    join(bench, "snail", 0.1, host="there")
    bench.tick()
    assert lengths(bench) == {"w0": 3, "w1": 3}
    assert any(text.startswith("snail is left out") for text in why_of(bench))


@pytest.mark.parametrize(
    ("other", "is_alike"),
    [
        ({}, True),
        ({"host": "there"}, False),
        ({"cores": 4}, False),
        ({"device": "cuda"}, False),
    ],
    ids=["alike", "another machine", "more cores", "a GPU"],
)
def test_whose_figures_are_taken_for_the_same(
    make_bench: Callable[..., Bench], other: dict[str, object], is_alike: bool
) -> None:
    """Of processes that take turns, those with the same cores of the same machine are equally quick, by the best figure
    that any of them has. Everybody else is as quick as it measured."""
    pins = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
    bench = make_bench(ruled(mode="batch", pins=pins))
    join(bench, "w0", 0.002, alone_s=0.002, host="here", cores=2)
    join(bench, "w1", 0.003, **({"alone_s": 0.003, "host": "here", "cores": 2} | other))
    bench.tick()
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert [stage.compute_s / 3 for stage in forecast.stages] == pytest.approx(  # type: ignore[union-attr]
        [0.002, 0.002 if is_alike else 0.003]
    )


def test_two_gpus_of_one_machine_are_not_alike(make_bench: Callable[..., Bench]) -> None:
    """They share nothing that they would have to wait for: each is as quick as it measured, and works meanwhile."""
    bench = make_bench(ruled(mode="batch", pins={"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}))
    join(bench, "w0", 0.002, alone_s=0.002, host="here", device="cuda:0")
    join(bench, "w1", 0.003, alone_s=0.003, host="here", device="cuda:1")
    bench.tick()
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert [stage.compute_s / 3 for stage in forecast.stages] == pytest.approx([0.002, 0.003])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("devices", "in_turns"),
    [(("cpu", "cpu"), True), (("cpu", "cuda"), False), (("cuda:0", "cuda:1"), False), (("cuda:0", "cuda:0"), True)],
    ids=["two processes", "one and a GPU", "two GPUs", "one GPU"],
)
def test_only_processes_on_the_same_cores_take_turns(
    make_bench: Callable[..., Bench], devices: tuple[str, str], in_turns: bool
) -> None:
    """A GPU of the same machine computes while the cores do."""
    bench = make_bench(ruled())
    for index, device in enumerate(devices):
        join(bench, f"w{index}", 0.002, alone_s=0.002, host="here", device=device)
    bench.tick()
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert forecast.takes_turns is in_turns  # type: ignore[union-attr]
    assert lengths(bench) == {"w0": 3, "w1": 3}


def test_stages_on_one_gpu_share_its_time(make_bench: Callable[..., Bench]) -> None:
    """With several steps in flight, its kernels wait for one another: a step takes as long as all stages there."""
    pins = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
    took = {}
    for device in ("cuda:0", "cuda:1"):
        bench = make_bench(ruled(mode="overlapped", pins=pins))
        join(bench, "w0", 0.002, alone_s=0.002, host="here", device="cuda:0")
        join(bench, "w1", 0.002, alone_s=0.002, host="here", device=device)
        bench.tick()
        forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
        took[device] = forecast.bound, forecast.step_s  # type: ignore[union-attr]
    assert took["cuda:0"][0] == "cores"
    assert took["cuda:0"][1] > 1.5 * took["cuda:1"][1]


def test_the_cores_alone_may_be_quicker_than_with_a_gpu(make_bench: Callable[..., Bench]) -> None:
    """A machine's processes are looked at by themselves, too, without the snail of a GPU beside them."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.004, alone_s=0.001, host="here")
    join(bench, "w1", 0.004, alone_s=0.001, host="here")
    join(bench, "snail", 0.1, host="here", device="cuda")
    bench.tick()
    assert lengths(bench) == {"w0": 3, "w1": 3}
    assert bench.state.plans.current.forecast.takes_turns  # type: ignore[union-attr]


def test_latency_takes_the_sum(make_bench: Callable[..., Bench]) -> None:
    """For a single answer, one quick worker is better than two with a way between them; throughput uses both."""
    link = LinkCost(0.02, 1e9)
    for objective, expected in (("latency", {"w0"}), ("throughput", {"w0", "w1"}), ("auto", {"w0", "w1"})):
        bench = make_bench(ruled(objective=objective))
        join(bench, "w0", 0.001, link=link)
        join(bench, "w1", 0.001, link=link)
        bench.tick()
        assert set(ranges(bench)) == expected, objective


def test_the_broker_s_ways_are_in_a_step_that_waits_for_them(make_bench: Callable[..., Bench]) -> None:
    """The two that are far away are neighbours: four ways lie between a step and the next otherwise. With a step per
    stage in flight, nobody waits for a way."""
    caps = {"w0": 2, "w1": 2, "w2": 2}
    bench = make_bench(ruled(objective="latency", caps=caps))
    join(bench, "w0", 0.001, link=LinkCost(0.02, 1e9))
    join(bench, "w1", 0.001, link=LinkCost(0.0002, 1e9))
    join(bench, "w2", 0.001, link=LinkCost(0.02, 1e9))
    bench.tick()
    told = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert told.broker_s == pytest.approx(0.01)
    parts = sum(s.compute_s + s.hop_s for s in told.stages)
    assert told.step_s == pytest.approx(parts + told.broker_s + told.beside_s)
    assert told.beside_s == STEP_S
    assert any("2 ms of a step is spent outside of the stages" in text for text in why_of(bench))
    assert sum(s.hop_s for s in told.stages) == pytest.approx(0.02, rel=0.05)
    assert any("10 ms of a step is latency between the broker" in text for text in why_of(bench))
    bench = make_bench(ruled(objective="throughput", caps=caps))
    for name in ("w0", "w1", "w2"):
        join(bench, name, 0.001, link=LinkCost(0.02, 1e9))
    bench.tick()
    assert bench.state.plans.current.forecast.broker_s == 0.0  # type: ignore[union-attr]


def test_a_late_answer_to_one_of_a_machine_s_workers_keeps_none_of_them_out(make_bench: Callable[..., Bench]) -> None:
    """The machine is as near as its quickest answer was."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.001, host="here", link=LinkCost(0.0002, 1e9))
    join(bench, "w1", 0.001, host="here", link=LinkCost(0.003, 1e9))
    bench.tick()
    assert lengths(bench) == {"w0": 3, "w1": 3}
    assert bench.state.plans.current.forecast.broker_s == 0.0  # type: ignore[union-attr]


def test_room_for_keys_and_values_or_a_word_about_it(make_bench: Callable[..., Bench]) -> None:
    """Where the wanted positions don't fit, the plan does without, and says so."""
    bench = make_bench(ruled(kv_positions=1 << 40))
    bench.join("w0")
    bench.tick()
    assert set(ranges(bench)) == {"w0"}
    assert any("no room for keys and values" in text for text in why_of(bench))


# --- by hand ----------------------------------------------------------------------------------------------------------


def test_pins_caps_and_exclusions(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled(pins={"w1": LayerRange(0, 1)}, caps={"w0": 2}, exclude=frozenset({"w3"})))
    bench.join("w0", "w1", "w2", "w3")
    bench.tick()
    assert ranges(bench)["w1"] == LayerRange(0, 1)
    assert lengths(bench)["w0"] <= 2
    assert "w3" not in ranges(bench)
    assert any("w3 is left out: it is excluded by the settings (plan.exclude)" in text for text in why_of(bench))


def test_if_all_are_excluded_that_is_said(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled(exclude=frozenset({"w0"})))
    bench.join("w0")
    bench.tick()
    assert bench.state.plans.waits_for == "a worker besides w0, which must not be used"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        (
            {"min_memory_bytes": 300 * MIB},
            "it may use 200 MiB for the model, and this swarm takes workers from 300 MiB",
        ),
        ({"min_layers_per_s": 600.0}, "it was measured to compute 500 layers a second"),
    ],
)
def test_who_is_too_small_or_too_slow_is_told_so(
    make_bench: Callable[..., Bench], rule: dict[str, object], text: str
) -> None:
    """Who has too little memory, or is too slow, is turned away and told why."""
    bench = make_bench(ruled(**rule))
    join(bench, "w0", 0.002)
    (order,) = [o for _, o in orders(bench.log) if isinstance(o, Denied)]
    assert text in order.reason
    assert not bench.state.workers


# --- forecasts --------------------------------------------------------------------------------------------------------


def test_a_forecast_tells_the_slowest_stage_and_what_else_could_be(make_bench: Callable[..., Bench]) -> None:
    """Stage times, the slowest, the margin to the next, even shares beside it, one more worker."""
    bench = make_bench(ruled())
    join(bench, "quick", 0.010)
    join(bench, "slow", 0.018)
    bench.tick()
    body = plan_of(bench)
    found = body["forecast"]
    assert isinstance(found, dict)
    assert found["step_s"] == pytest.approx(0.040)
    assert found["even_s"] == pytest.approx(0.054)
    assert found["tokens_per_second"] == pytest.approx(25)
    assert found["margin"] == pytest.approx(0.1)
    assert found["one_more"] == {"like": "quick", "step_s": S(0.030), "now_step_s": S(0.040), "sequences": 3}
    assert {stage["worker"]: stage["predicted_s"] for stage in found["stages"]} == pytest.approx(
        {"quick": 0.040, "slow": 0.036}
    )


def test_who_makes_it_slower_is_named(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled())
    join(bench, "w0", 0.001)
    join(bench, "snail", 0.1)
    join(bench, "tiny", 0.001, memory_bytes=60 * MIB)
    bench.tick()
    why = why_of(bench)
    assert "snail is left out: a step would be slower with it: 100 ms instead of 8 ms" in why
    assert any(text.startswith("tiny is left out: it lacks 5 MiB of memory for a single layer") for text in why)


def test_suppositions_change_nothing(make_bench: Callable[..., Bench]) -> None:
    """Without a worker, with more, with another objective; unknown names are errors."""
    bench = make_bench(ruled())
    join(bench, "quick", 0.001)
    join(bench, "slow", 0.002)
    bench.tick()
    bench.take()
    without = plan_of(bench, without=("slow",))
    assert without["state"] == "would be made"
    assert without["step_s"] == pytest.approx(0.006 + STEP_S)
    assert without["now_step_s"] is None
    more = plan_of(bench, more=1, like="quick")
    assert [stage["worker"] for stage in more["stages"]].count("quick+1") == 1  # type: ignore[attr-defined]
    assert more["now_step_s"] == pytest.approx((0.008 + HOP_S + STEP_S) / 2, rel=0.001)
    assert plan_of(bench, objective="latency")["objective"] == "latency"
    assert plan_of(bench, without=("nobody",))["ok"] is False
    none = plan_of(bench, without=("quick", "slow"))
    assert none["waits_for"] == "a worker besides quick, slow, which must not be used"
    assert plan_of(bench, objective="throughput")["state"] == "would stay as it is"
    bench.tick(1.0)
    assert bench.epoch == 1
    assert lengths(bench) == {"quick": 4, "slow": 2}


def test_what_is_missing_in_a_supposed_shortage(make_bench: Callable[..., Bench]) -> None:
    bench = make_bench(ruled())
    bench.join("w0", "w1", memory_bytes=68 * MIB)
    bench.tick()
    short = plan_of(bench, without=("w1",))
    assert short["missing_bytes"] == 4 * MIB
    assert "4 MiB more memory" in str(short["waits_for"])
    assert isinstance(propose(bench.state, PlanRules(), suppose=PlanWhatIf(without=("w0", "w1"))), Shortage)


# --- when a plan is changed -------------------------------------------------------------------------------------------


def test_a_newcomer_that_gains_little_changes_nothing(make_bench: Callable[..., Bench]) -> None:
    """Layers are moved for speed only if that pays more than the margin."""
    bench = make_bench(ruled(margin=0.6))
    join(bench, "w0", 0.001)
    join(bench, "w1", 0.001)
    bench.tick()
    join(bench, "w2", 0.001)  # 2 instead of 3 ms: half as much again
    bench.tick(1.0)
    assert lengths(bench) == {"w0": 3, "w1": 3}
    bench = make_bench(ruled(margin=0.4))
    join(bench, "w0", 0.001)
    join(bench, "w1", 0.001)
    bench.tick()
    join(bench, "w2", 0.001)
    bench.tick(1.0)
    assert lengths(bench) == {"w0": 2, "w1": 2, "w2": 2}


def shares_of(bench: Bench, rules: PlanRules) -> list[int]:
    """How many layers each stage would have if the plan were made now."""
    found = propose(bench.state, rules)
    assert not isinstance(found, Shortage)
    return [len(layers) for _, layers in found.shares]


@pytest.fixture
def uneven(make_bench: Callable[..., Bench]) -> Bench:
    """A plan of three layers each, of which the second stage has become slower: four and two would be 5 % quicker."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.010)
    join(bench, "w1", 0.010)
    bench.tick()
    assert list(lengths(bench).values()) == [3, 3]
    stages = bench.state.plans.current.stages  # type: ignore[union-attr]
    bench.state.workers[stages[1].incarnation].pace = 1.4
    return bench


def test_the_plan_in_force_is_proposed_where_another_gains_little(uneven: Bench) -> None:
    """Otherwise the standby layers, and what is told of a plan, would be those of one that is never made."""
    assert shares_of(uneven, PlanRules(load=LOAD)) == [3, 3]
    found = propose(uneven.state, PlanRules(load=LOAD))
    assert not isinstance(found, Shortage)
    assert found.is_like(uneven.state.plans.current)  # type: ignore[arg-type]
    assert found.now_s == pytest.approx(found.forecast.step_s) == pytest.approx(0.042)
    assert shares_of(uneven, PlanRules(load=LOAD, margin=0.03)) == [4, 2]


def test_the_plan_in_force_is_not_proposed_to_who_refuses_it(uneven: Bench) -> None:
    """However little another one gains: this one can't be had again."""
    stage = uneven.state.plans.current.stages[1]  # type: ignore[union-attr]
    uneven.state.workers[stage.incarnation].record_refusal(stage.layers, "no memory", uneven.now)
    assert shares_of(uneven, PlanRules(load=LOAD)) == [4, 2]


def test_a_supposition_is_not_kept_back_by_the_plan_in_force(uneven: Bench) -> None:
    """Who asks what would be is told that, though the gain is little."""
    found = propose(uneven.state, PlanRules(load=LOAD), suppose=PlanWhatIf(objective="throughput"))
    assert not isinstance(found, Shortage)
    assert [len(layers) for _, layers in found.shares] == [4, 2]


def test_a_pace_that_lasts_moves_layers(make_bench: Callable[..., Bench]) -> None:
    """A worker that turns out to be far slower than it measured gives layers away, once, and not before it is sure."""
    bench = make_bench(ruled())
    join(bench, "w0", 0.001)
    join(bench, "w1", 0.001)
    bench.tick()
    bench.say(submit(max_tokens=400, ignore_eos=True))
    for _ in range(200):
        hops = tuple(
            Hop(name, layers, 0.0, len(layers) * (0.005 if name == "w1" else 0.001), 0.0, 0.0, 0)
            for name, layers in ranges(bench).items()
        )
        bench.finish(hops=hops)
    assert lengths(bench) == {"w0": 3, "w1": 3}
    measured = {row["worker"]: row for row in plan_of(bench)["stages"]}  # type: ignore[attr-defined]
    assert measured["w1"]["seen_s"] == pytest.approx(0.015)
    assert measured["w1"]["expected_s"] == pytest.approx(0.003, rel=0.1)
    cooldown_s = PlanRules().cooldown_s
    bench.tick(cooldown_s + 1)
    assert lengths(bench) == {"w0": 5, "w1": 1}
    assert bench.epoch == 2
    bench.tick(3 * cooldown_s)
    assert bench.epoch == 2


def test_a_newcomer_is_as_slow_as_its_machine(make_bench: Callable[..., Bench]) -> None:
    """Stages that wait for each other's cores take longer than they measured alone. A process that is started again
    there is not taken for the only quick one, which would have to do everything. One elsewhere is what it says."""
    bench = make_bench(ruled(mode="overlapped"))
    for name in ("w0", "w1", "w2"):
        join(bench, name, 0.001, host="here")
    bench.tick()
    for name, pace in (("w0", 7.0), ("w1", 8.0), ("w2", 9.0)):
        bench.state.workers[f"{name}.1"].pace = pace
    bench.lose("w1")
    bench.tick()
    again = bench.add("w1", "w1.2", host="here")
    bench.tell("w1", again.hello(costs=costs(0.001)))
    bench.tick(1.0)
    assert bench.state.workers["w1.2"].pace == 7.0
    assert lengths(bench) == {"w0": 2, "w1": 2, "w2": 2}
    join(bench, "w3", 0.001, host="elsewhere")
    assert bench.state.workers["w3.1"].pace == 1.0


def test_probes_are_answered_before_anything_else(bench: Bench) -> None:
    """A worker measures its way to the broker before it says Hello."""
    bench.add("w0")
    bench.tell("w0", Probe(ticket=7))
    assert orders(bench.log) == [("w0.1", Probed(epoch=0, ticket=7))]
    assert not bench.state.workers


def test_a_pinned_newcomer_gets_its_layers(make_bench: Callable[..., Bench]) -> None:
    """Though the plan in force, in which somebody else stood in for it, is as quick."""
    pins = {"w0": LayerRange(0, 2), "w1": LayerRange(2, 4), "w2": LayerRange(4, 6)}
    bench = make_bench(ruled(pins=pins))
    for name in ("w0", "w1", "spare"):
        join(bench, name, 0.001, host="here")
    bench.tick()
    assert ranges(bench) == {"w0": LayerRange(0, 2), "w1": LayerRange(2, 4), "spare": LayerRange(4, 6)}
    join(bench, "w2", 0.001, host="here")
    bench.tick()
    assert ranges(bench) == pins
