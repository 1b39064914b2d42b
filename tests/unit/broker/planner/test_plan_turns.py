"""More workers that take turns on one machine than every order of which is looked at; and plans that stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from swarm.broker.planner.solve import MAX_EXACT
from swarm.broker.planner.tables import HOP_S, STEP_S
from swarm.testing import fake_manifest
from swarm.wire.messages import PlanWhatIf, Query
from tests.unit.broker.bench import Bench, ranges
from tests.unit.broker.planning.test_plan_wanted import costs, join, lengths, plan_of, ruled, why_of


def together(bench: Bench, num_layers: int, names: list[str], host: str = "here") -> None:
    for name in names:
        worker = bench.add(name, manifest=fake_manifest(num_layers=num_layers), host=host)
        bench.tell(name, worker.hello(costs=costs(0.001)))


@pytest.mark.parametrize(("layers", "count"), [(24, MAX_EXACT + 1), (24, 12), (6, 20), (10, 9)])
def test_any_number_that_takes_turns_has_even_shares(make_bench: Callable[..., Bench], layers: int, count: int) -> None:
    """As many layers each, up to one; and what is asked for by hand would be the same again."""
    bench = make_bench(ruled())
    together(bench, layers, [f"w{i}" for i in range(count)])
    bench.tick()
    found = list(lengths(bench).values())
    assert len(found) == min(layers, count)
    assert max(found) - min(found) <= 1
    assert plan_of(bench, objective="throughput")["state"] == "would stay as it is"


def test_shares_of_many_stay_when_one_goes(make_bench: Callable[..., Bench]) -> None:
    """One that holds nothing goes: nobody loads anything again."""
    bench = make_bench(ruled())
    together(bench, 6, [f"w{i}" for i in range(MAX_EXACT + 2)])
    bench.tick()
    before = ranges(bench)
    assert len(before) == 6
    bench.lose(next(f"w{i}" for i in range(MAX_EXACT + 2) if f"w{i}" not in before))
    bench.tick(1.0)
    assert ranges(bench) == before


@pytest.mark.parametrize("count", [3, MAX_EXACT + 1])
def test_what_would_be_made_is_what_is_done(make_bench: Callable[..., Bench], count: int) -> None:
    """A newcomer that would gain less than the margin: the plan stays, and that is the answer."""
    bench = make_bench(ruled(margin=5.0))
    for index in range(count - 1):
        join(bench, f"w{index}", 0.001)
    bench.tick()
    before = ranges(bench)
    join(bench, "late", 0.0005)
    bench.tick(1.0)
    assert ranges(bench) == before
    answer = bench.ask(Query(what="plan", suppose=PlanWhatIf()))
    assert answer.body["state"] == "would stay as it is"
    assert answer.body["step_s"] == answer.body["now_step_s"]


@pytest.mark.parametrize("count", [MAX_EXACT, MAX_EXACT + 1, 3 * MAX_EXACT])
def test_one_more_is_told_among_many(make_bench: Callable[..., Bench], count: int) -> None:
    """With many workers too it is said what one more would change: here it takes a layer from each of some."""
    bench = make_bench(ruled())
    for index in range(count):
        worker = bench.add(f"w{index}", manifest=fake_manifest(num_layers=2 * count))
        bench.tell(f"w{index}", worker.hello(costs=costs(0.1 if index else 0.2)))
    bench.tick()
    found = plan_of(bench)["forecast"]
    assert isinstance(found, dict)
    assert found["one_more"]["like"] != "w0"
    assert found["one_more"]["step_s"] == pytest.approx(0.2, rel=0.01)


def test_one_more_never_makes_it_slower(make_bench: Callable[..., Bench]) -> None:
    """Where stages take turns on one machine, another one may be of no use: then nothing is promised."""
    bench = make_bench(ruled())
    together(bench, 24, [f"w{i}" for i in range(MAX_EXACT + 1)])
    bench.tick()
    found = plan_of(bench)["forecast"]
    assert isinstance(found, dict)
    assert found["one_more"]["step_s"] <= found["step_s"]


def test_a_newcomer_is_not_promised_what_only_more_sequences_would_get(make_bench: Callable[..., Bench]) -> None:
    """Three workers of one machine, layers that take little: most of a step is on its way. With another machine there
    are several steps in flight, so more sequences, each step of which has its way, too; and the machine's cores are no
    more than before. Compared is the same number of sequences."""
    bench = make_bench(ruled())
    for name in ("w0", "w1", "w2"):
        worker = bench.add(name, manifest=fake_manifest(num_layers=8), host="here")
        bench.tell(name, worker.hello(costs=costs(0.0004, alone_s=0.0002)))
    bench.tick()
    found = plan_of(bench)["forecast"]
    assert isinstance(found, dict)
    more = found["one_more"]
    assert more["sequences"] > 1
    assert more["now_step_s"] < found["step_s"]
    assert more["step_s"] >= (STEP_S + 0.0016 + HOP_S) / 4
    assert more["now_step_s"] / more["step_s"] < 2
    (told,) = [
        text for text in why_of(bench) if text.startswith("one more worker like w0, on a machine of its own, would")
    ]
    assert f"faster for {more['sequences']} sequences at a time, which take" in told


def test_a_way_over_machines_is_looked_at_though_one_machine_s_stages_are_as_quick(
    make_bench: Callable[..., Bench],
) -> None:
    """Three of one machine have two layers each, as with a fourth one elsewhere; but they would take turns, and slowly.
    Nobody is left out of a quicker plan."""
    bench = make_bench(ruled())
    for name in ("w0", "w1", "w2"):
        join(bench, name, 0.020, alone_s=0.018, host="here")
    bench.tick()
    join(bench, "far", 0.020, alone_s=0.018, host="there")
    bench.tick(1.0)
    forecast = bench.state.plans.current.forecast  # type: ignore[union-attr]
    assert forecast is not None
    assert not forecast.takes_turns
    assert "far" in ranges(bench)
    assert forecast.step_s < 6 * 0.018
