"""Which layers are rebuilt from whose log after a change of plan, and when their sequences go on."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from msgspec.structs import replace

from swarm.broker.events import Tick
from swarm.broker.planner.pauses import step_pause_s
from swarm.broker.recovery import rebuild
from swarm.broker.recovery.rebuild import RebuildSettings
from swarm.broker.recovery.rebuild_runs import MIN_SPLIT, find_rebuild_runs
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state import Plan, Rebuild, Request, Sequence, StagePlan
from swarm.wire.messages import (
    Activated,
    Cancel,
    HeldSequence,
    LayerRange,
    LogRange,
    RangePosition,
    Replay,
    ReplayDone,
    ReplayMissing,
    SequencePosition,
    SequenceRange,
)
from tests.unit.broker.bench import CLIENT, TICK_S, Bench, orders, row, settings, steps, submit

SEQUENCE = 5
TARGET = 100
STEP_S = 2 * TICK_S

Held = tuple[tuple[int, int, int], ...]  # (first, stop, position)
Logs = tuple[tuple[int, int], ...]  # (boundary, stop)


def plan_of(*stages: tuple[str, int, int]) -> Plan:
    plans = tuple(StagePlan(name, name, LayerRange(first, stop), "", 0, host=name) for name, first, stop in stages)
    return Plan(3, plans, "throughput")


def said(held: Mapping[str, Held], logs: Mapping[str, Logs] | None = None) -> dict[str, Activated]:
    """What the stages say of the one sequence."""
    found = {}
    for name, ranges in held.items():
        kv = tuple(RangePosition(LayerRange(first, stop), position) for first, stop, position in ranges)
        entries = tuple(LogRange(SEQUENCE, boundary, 0, stop) for boundary, stop in (logs or {}).get(name, ()))
        found[name] = Activated(
            epoch=3, incarnation=name, held=(HeldSequence(SEQUENCE, kv),) if kv else (), logs=entries
        )
    return found


def runs(plan: Plan, stages: dict[str, Activated]) -> list[tuple[str | None, int, int, int]] | int:
    """(source, first layer, layer behind the last, first position); or whence it is computed again as a whole."""
    request = Request(submit("r"), CLIENT, 0.0, None)
    sequence = Sequence(id=SEQUENCE, request=request, index=0, seed=1, tokens=list(range(TARGET)), limit=200)
    sequence.kv = TARGET
    found = find_rebuild_runs(sequence, plan, stages)
    return found if isinstance(found, int) else [_short(run) for run in found]


def _short(run: Rebuild) -> tuple[str | None, int, int, int]:
    assert run.stop == TARGET
    assert run.done == run.start
    return run.source, run.through.first, run.through.stop, run.start


THREE = plan_of(("a", 0, 4), ("b", 4, 8), ("c", 8, 12))
A, B, C = ((0, 4, 100),), ((4, 8, 100),), ((8, 12, 100),)

CASES = {
    "all level": (THREE, {"a": A, "b": B, "c": C}, {}, []),
    "a spare for the middle": (THREE, {"a": A, "b": (), "c": C}, {"a": ((4, 100),)}, [("a", 4, 8, 0)]),
    "a spare for the last": (THREE, {"a": A, "b": B, "c": ()}, {"a": ((4, 100),), "b": ((8, 100),)}, [("b", 8, 12, 0)]),
    "a spare for the first": (THREE, {"a": (), "b": B, "c": C}, {"b": ((8, 100),)}, [(None, 0, 4, 0)]),
    "the neighbour before takes it": (
        plan_of(("a", 0, 8), ("c", 8, 12)),
        {"a": ((0, 4, 100), (4, 8, 0)), "c": C},
        {"a": ((4, 100),)},
        [("a", 4, 8, 0)],
    ),
    "the neighbour behind takes it": (
        plan_of(("a", 0, 4), ("c", 4, 12)),
        {"a": A, "c": ((4, 8, 0), (8, 12, 100))},
        {"a": ((4, 100),)},
        [("a", 4, 8, 0)],
    ),
    "both neighbours share it": (
        plan_of(("a", 0, 6), ("c", 6, 12)),
        {"a": ((0, 4, 100), (4, 6, 0)), "c": ((6, 8, 0), (8, 12, 100))},
        {"a": ((4, 100),)},
        [("a", 4, 8, 0)],
    ),
    "two neighbours lost": (THREE, {"a": A, "b": (), "c": ()}, {"a": ((4, 100),)}, [("a", 4, 12, 0)]),
    "two lost apart": (
        plan_of(("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)),
        {"a": (), "b": ((2, 4, 100),), "c": (), "d": ((6, 8, 100),)},
        {"b": ((4, 100),)},
        [(None, 0, 2, 0), ("b", 4, 6, 0)],
    ),
    "the log was evicted": (THREE, {"a": A, "b": (), "c": C}, {}, [(None, 0, 8, 0)]),
    "the log is too short": (THREE, {"a": A, "b": (), "c": C}, {"a": ((4, 99),)}, [(None, 0, 8, 0)]),
    "only a log further up": (
        THREE,
        {"a": A, "b": B, "c": ()},
        {"a": ((4, 100),)},
        [("a", 4, 12, 0)],
    ),
    "the nearer of two logs": (THREE, {"a": A, "b": B, "c": ()}, {"b": ((8, 100), (6, 100))}, [("b", 8, 12, 0)]),
    "a log that can't be sent there": (THREE, {"a": A, "b": (), "c": C}, {"c": ((4, 100),)}, [(None, 0, 8, 0)]),
    "a replay that was cut short": (THREE, {"a": A, "b": ((4, 8, 40),), "c": C}, {"a": ((4, 100),)}, [("a", 4, 8, 40)]),
    "the second replay would go through the first": (
        plan_of(("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)),
        {"a": (), "b": ((2, 4, 100),), "c": (), "d": ((6, 8, 100),)},
        {},
        [(None, 0, 6, 0)],
    ),
    "the same, and the second one lacks less": (
        plan_of(("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)),
        {"a": (), "b": ((2, 4, 100),), "c": ((4, 6, 40),), "d": ((6, 8, 100),)},
        {},
        [(None, 0, 6, 0)],
    ),
    "the same, and the first one lacks less": (
        plan_of(("a", 0, 2), ("b", 2, 4), ("c", 4, 6), ("d", 6, 8)),
        {"a": ((0, 2, 40),), "b": ((2, 4, 100),), "c": ((4, 6, 30),), "d": ((6, 8, 100),)},
        {},
        [(None, 0, 6, 30)],
    ),
    "copies of the lost layers, one of them further": (
        plan_of(("a", 0, 6), ("c", 6, 12)),
        {"a": ((0, 4, 100), (4, 6, 64)), "c": ((6, 8, 96), (8, 12, 100))},
        {"a": ((4, 100),)},
        [("a", 4, 8, 64)],
    ),
    "copies of the lost layers, and the log was evicted": (
        plan_of(("a", 0, 8), ("c", 8, 12)),
        {"a": ((0, 4, 100), (4, 8, 96)), "c": C},
        {},
        [(None, 0, 8, 96)],
    ),
    "copies that are complete": (
        plan_of(("a", 0, 8), ("c", 8, 12)),
        {"a": ((0, 4, 100), (4, 8, 100)), "c": C},
        {},
        [],
    ),
    "copies that are ahead of what counts": (
        plan_of(("a", 0, 6), ("c", 6, 12)),
        {"a": ((0, 4, 101), (4, 6, 128)), "c": ((6, 8, 96), (8, 12, 101))},
        {"a": ((4, 101),)},
        [("a", 4, 8, 96)],
    ),
    "copies of the first stage": (
        plan_of(("b", 0, 8), ("c", 8, 12)),
        {"b": ((0, 4, 96), (4, 8, 100)), "c": C},
        {"b": ((8, 100),)},
        [(None, 0, 4, 96)],
    ),
    "everything lost": (THREE, {"a": (), "b": (), "c": ()}, {}, 0),
    "all cut short": (THREE, {"a": ((0, 4, 30),), "b": ((4, 8, 20),), "c": ((8, 12, 25),)}, {}, 20),
}


@pytest.mark.parametrize("name", CASES)
def test_lost_layers_are_rebuilt_from_the_nearest_log(name: str) -> None:
    """Through the lost layers only, where a log lies before them; else through those between it and them, too."""
    plan, held, logs, expected = CASES[name]
    assert runs(plan, said(held, logs)) == expected


def test_a_log_without_its_beginning_serves_what_copies_lack() -> None:
    """Its first positions are needed by nobody."""
    plan = plan_of(("a", 0, 8), ("c", 8, 12))
    stages = said({"a": ((0, 4, 100), (4, 8, 64)), "c": C})
    for start, expected in ((64, [("a", 4, 8, 64)]), (65, [(None, 0, 8, 64)])):
        stages["a"] = replace(stages["a"], logs=(LogRange(SEQUENCE, 4, start, 100),))
        assert runs(plan, stages) == expected


def long_sequence() -> Sequence:
    request = Request(submit("r"), CLIENT, 0.0, None)
    sequence = Sequence(id=SEQUENCE, request=request, index=0, seed=1, tokens=list(range(1000)), limit=2000)
    sequence.kv = 1000
    return sequence


def long_runs(held: Mapping[str, Held], logs: Mapping[str, Logs], plan: Plan) -> list[tuple[int, int, int, int, int]]:
    """(first layer, layer behind the last, first position, position behind the last, lost layers) at 1000 positions."""
    found = find_rebuild_runs(long_sequence(), plan, said(held, logs))
    assert isinstance(found, list)
    return [(run.through.first, run.through.stop, run.start, run.stop, run.num_lost) for run in found]


BETWEEN = plan_of(("a", 0, 6), ("c", 6, 12))


@pytest.mark.parametrize(
    ("before", "behind", "expected"),
    [
        (0, 960, [(4, 6, 0, 960, 2), (4, 8, 960, 1000, 4)]),  # what lies behind is computed once only
        (960, 0, [(4, 8, 0, 1000, 4)]),  # it needs what comes out of the layers before it, from 0 on
        (960 - MIN_SPLIT + 1, 960, [(4, 8, 960 - MIN_SPLIT + 1, 1000, 4)]),  # not worth another step
        (960 - MIN_SPLIT, 960, [(4, 6, 960 - MIN_SPLIT, 960, 2), (4, 8, 960, 1000, 4)]),
    ],
)
def test_layers_that_lag_differently(before: int, behind: int, expected: list[tuple[int, int, int, int, int]]) -> None:
    """Of layers 4 to 8, two workers have copies up to different positions, or one of them has none."""
    held = {"a": ((0, 4, 1000), (4, 6, before)), "c": ((6, 8, behind), (8, 12, 1000))}
    assert long_runs(held, {"a": ((4, 1000),)}, BETWEEN) == expected


def test_layers_with_states_begin_where_states_are_kept() -> None:
    """Both have passed position 512, whose state they keep."""
    held = {"a": ((0, 4, 1000), (4, 6, 900)), "c": ((6, 8, 700), (8, 12, 1000))}
    found = find_rebuild_runs(long_sequence(), BETWEEN, said(held, {"a": ((4, 1000),)}), stride=512)
    assert isinstance(found, list)
    assert [run_range(run) for run in found] == [(4, 8, 512, 1000)]


@pytest.mark.parametrize(
    ("held", "expected"),
    [
        # all copies end at the same position, and the log is just before them
        ({"a": ((0, 4, 1000), (4, 6, 900)), "c": ((6, 8, 900), (8, 12, 1000))}, [(4, 8, 900, 1000)]),
        # the way from the log to the copies goes through layers that have passed that position
        ({"a": ((0, 5, 1000), (5, 6, 900)), "c": ((6, 8, 900), (8, 12, 1000))}, [(4, 8, 512, 1000)]),
        # the last layers can begin where the first positions have ended
        ({"a": ((0, 4, 1000), (4, 6, 300)), "c": ((6, 8, 700), (8, 12, 1000))}, [(4, 6, 300, 700), (4, 8, 700, 1000)]),
        # a layer without copies is computed from the begin
        ({"a": ((0, 4, 1000), (4, 6, 900)), "c": ((6, 8, 0), (8, 12, 1000))}, [(4, 8, 0, 1000)]),
    ],
)
def test_layers_with_states_may_begin_where_their_copies_end(
    held: Mapping[str, Held], expected: list[tuple[int, int, int, int]]
) -> None:
    found = find_rebuild_runs(long_sequence(), BETWEEN, said(held, {"a": ((4, 1000),)}), stride=512)
    assert isinstance(found, list)
    assert [run_range(run) for run in found] == expected


@pytest.mark.parametrize(("last", "expected"), [(900, 900), (800, 512)])
def test_a_sequence_with_states_is_computed_again_from_where_all_layers_hold_them(last: int, expected: int) -> None:
    held = {"a": ((0, 6, 900),), "c": ((6, 12, last),)}
    assert find_rebuild_runs(long_sequence(), BETWEEN, said(held), stride=512) == expected


def test_a_short_end_through_all_layers_is_replayed_too() -> None:
    """Only if most of the work goes through all of them, the sequence is computed again like a prompt."""
    plan = plan_of(("b", 0, 12))
    assert long_runs({"b": ((0, 4, 0), (4, 12, 960))}, {}, plan) == [(0, 4, 0, 960, 4), (0, 12, 960, 1000, 12)]


AFTER_COPIES = plan_of(("a", 0, 12))  # layers 4 to 6 were taken over from copies; then layers 6 to 12 were lost


@pytest.mark.parametrize(
    ("logs", "expected"),
    [
        # the log before the copies ends where they were taken over; the one behind them begins there
        (((4, 0, 960), (6, 930, 1000)), [("a", 4, 12, 0, 960, 6), (None, 0, 12, 960, 1000, 6)]),
        (((3, 0, 1000), (4, 0, 960), (6, 930, 1000)), [("a", 4, 12, 0, 960, 6), ("a", 3, 12, 960, 1000, 6)]),
        (((2, 500, 1000), (4, 0, 600)), [("a", 4, 12, 0, 600, 6), ("a", 2, 12, 600, 1000, 6)]),
        (
            ((4, 0, MIN_SPLIT), (3, 0, 900)),
            [("a", 4, 12, 0, 256, 6), ("a", 3, 12, 256, 900, 6), (None, 0, 12, 900, 1000, 6)],
        ),
        (((4, 0, MIN_SPLIT - 1), (3, 0, 1000)), [("a", 3, 12, 0, 1000, 6)]),  # not worth another step
        (((4, 1, 960), (3, 0, 1000)), [("a", 3, 12, 0, 1000, 6)]),  # a log with a gap at its beginning
    ],
)
def test_a_log_that_ends_early_serves_the_first_positions(
    logs: tuple[tuple[int, int, int], ...], expected: list[tuple[str | None, int, int, int, int, int]]
) -> None:
    """Layers that are gone through again, though they hold all, are level with the others in the end: the rest comes
    through at least the same layers."""
    stages = said({"a": ((0, 6, 1000), (6, 12, 0))})
    entries = tuple(LogRange(SEQUENCE, boundary, start, stop) for boundary, start, stop in logs)
    stages["a"] = replace(stages["a"], logs=entries)
    found = find_rebuild_runs(long_sequence(), AFTER_COPIES, stages)
    assert isinstance(found, list)
    assert [
        (run.source, run.through.first, run.through.stop, run.start, run.stop, run.num_lost) for run in found
    ] == expected


def test_what_lags_less_joins_where_the_other_log_begins() -> None:
    """Layer 10 has copies up to 900: the first positions end before it, and the rest goes through it, too."""
    stages = said({"a": ((0, 6, 1000), (6, 10, 0), (10, 12, 900))})
    stages["a"] = replace(stages["a"], logs=(LogRange(SEQUENCE, 4, 0, 800),))
    found = find_rebuild_runs(long_sequence(), AFTER_COPIES, stages)
    assert isinstance(found, list)
    assert [(run.source, *run_range(run)) for run in found] == [("a", 4, 10, 0, 800), (None, 0, 12, 800, 1000)]


def run_range(run: Rebuild) -> tuple[int, int, int, int]:
    return run.through.first, run.through.stop, run.start, run.stop


# --- with a broker ----------------------------------------------------------------------------------------------------


def lose_one(
    chunk: int = 256,
    *,
    logged: bool = True,
    count: int = 1,
    lost: int = 1,
    before: Callable[[Bench], None] = lambda bench: None,
) -> Bench:
    """Three workers and running sequences; the second worker dies. What the last one of the others holds then is new to
    it, and the first one has the log of what it sent. If the first worker dies, the other way round."""
    plan = ReconfigurationSettings(settle_s=0.0, rebuild=RebuildSettings(chunk=chunk))
    bench = Bench(settings(plan=plan)).serve(3)
    for index in range(count):
        bench.say(submit(f"r{index}", num_prompt=10 * (count - index), max_tokens=8))
    for _ in range(3):
        for _ in range(len(bench.pipe)):
            bench.finish()
    first, last = (bench.workers[name] for index, name in enumerate(ordered(bench)) if index != lost)
    for sequence in bench.state.running:
        (last if lost else first).held[sequence.id] = 0
        if logged:
            first.logged[sequence.id] = sequence.kv
    before(bench)
    bench.take()
    bench.lose(ordered(bench)[lost])
    assert bench.state.plans.is_serving
    return bench


def ordered(bench: Bench) -> list[str]:
    assert bench.state.plans.current is not None
    return [stage.name for stage in bench.state.plans.current.stages]


def replays(bench: Bench) -> list[Replay]:
    """What was ordered since the last time; of sequences that share a step, an order for each."""
    return [
        replace(order, sequence=part.sequence, start=part.start, stop=part.stop, more=())
        for order in replay_steps(bench)
        for part in (SequenceRange(order.sequence, order.start, order.stop), *order.more)
    ]


def replay_steps(bench: Bench) -> list[Replay]:
    return [order for _, order in orders(bench.take(), Replay) if isinstance(order, Replay)]


def done(bench: Bench, order: Replay) -> None:
    """The chunk went through."""
    name = ordered(bench)[-1]
    message = ReplayDone(
        epoch=order.epoch,
        incarnation=bench.workers[name].incarnation,
        sequence=order.sequence,
        layers=order.through,
        kv=order.stop,
    )
    bench.tell(name, message)


def test_a_sequence_waits_for_its_layers_and_goes_on() -> None:
    """It is not in any step until they are level; then it goes on where it was, and nothing is computed again."""
    bench = lose_one()
    sequence = bench.sequence("r0")
    (order,) = replays(bench)
    assert (order.sequence, order.start, order.stop) == (sequence.id, 0, sequence.kv)
    assert order.through.stop == 6
    assert not bench.pipe
    before = sequence.kv
    done(bench, order)
    (step,) = bench.pipe
    assert row(step) == [(sequence.id, before, 1)]
    bench.run_dry()
    assert sequence.reason == "length"
    assert sequence.num_recomputed


def test_one_chunk_after_the_other() -> None:
    """The next one is ordered when the one before is done, and they leave nothing out."""
    bench = lose_one(chunk=4)
    target, at = bench.sequence("r0").kv, 0
    while at < target:
        (order,) = replays(bench)
        assert (order.start, order.stop) == (at, min(target, at + 4))
        at = order.stop
        done(bench, order)
    assert not replays(bench)
    assert bench.pipe


def test_the_cheapest_first_and_no_barrier() -> None:
    """Sequences with little to rebuild go on while others are still waiting."""
    bench = lose_one(count=3)
    found = []
    while (waiting := replays(bench)) or found == []:
        for order in waiting:
            found.append(order.sequence)
            done(bench, order)
            assert any(order.sequence == r.sequence for step in bench.pipe for r in step.rows) or len(bench.pipe) >= 2
    costs = {s.id: s.kv for s in bench.state.running}
    assert found == sorted(costs, key=lambda each: costs[each])


def pause_of(bench: Bench) -> float:
    """Let time pass until the next step."""
    began = bench.now
    for _ in range(100):
        bench.tick()
        if bench.pipe:
            return bench.now - began
    raise AssertionError("no step came")


def test_steps_pause_while_the_layers_of_others_are_rebuilt() -> None:
    """A complete sequence has a token at once, and the next one after a pause. Without sequences that wait there is
    none."""
    bench = lose_one(count=2)
    orders = replays(bench)
    done(bench, orders.pop(0))
    orders += replays(bench)
    assert len(bench.pipe) == 1
    bench.tick()
    bench.finish()
    assert not bench.pipe
    paused_s = 0.0
    while not bench.pipe and paused_s < 10.0:
        bench.tick()
        paused_s += TICK_S
        wait_s = bench.state.rebuilding.expected_wait_s(bench.now)
        pause_s = step_pause_s(bench.state.costs.usual_step_s, 1, 1, wait_s)
        assert bool(bench.pipe) == (paused_s + 1e-9 >= pause_s)
    assert paused_s > 2 * TICK_S
    bench.finish()
    assert not bench.pipe
    for order in orders:
        done(bench, order)
    assert len(bench.pipe) == 1


@pytest.mark.parametrize(("num_complete", "longer"), [(1, True), (5, False)])
def test_steps_pause_longer_the_more_sequences_wait(num_complete: int, longer: bool) -> None:
    """Where one of many waits, the others lose little."""
    bench = lose_one(count=6)
    waiting = replays(bench)
    for _ in range(num_complete):
        bench.tick()
        done(bench, waiting.pop(0))
        waiting += replays(bench)
    bench.tick(STEP_S)
    while bench.pipe:
        bench.finish()
    pause_s = pause_of(bench)
    assert bench.state.rebuilding.num_waiting == 6 - num_complete
    assert (pause_s > 3 * bench.state.costs.usual_step_s) is longer


def test_steps_pause_less_while_replays_make_no_progress() -> None:
    """A replay that a worker can't answer must not slow down everybody else; it still gets half of the time."""
    bench = lose_one(count=4)
    done(bench, replays(bench)[0])
    pauses = []
    for _ in range(4):
        bench.tick()
        while bench.pipe:
            bench.finish()
        pauses.append(pause_of(bench))
    step_s = bench.state.costs.usual_step_s
    assert pauses[0] > 4 * step_s
    assert pauses[-1] == pytest.approx(step_s, abs=TICK_S)


def test_a_log_that_has_gone_meanwhile_is_replaced_by_the_tokens() -> None:
    """Through all layers up to the end of the run, from the broker itself."""
    bench = lose_one()
    (order,) = replays(bench)
    name = ordered(bench)[0]
    message = ReplayMissing(
        epoch=order.epoch,
        incarnation=bench.workers[name].incarnation,
        sequence=order.sequence,
        boundary=order.boundary,
        has_from=order.stop,
    )
    bench.tell(name, message)
    (step,) = [step for step in steps(bench.take()) if step.replay]
    assert step.through == LayerRange(0, 6)
    assert row(step) == [(order.sequence, 0, order.stop)]
    assert step.open[0].sequence == order.sequence
    assert len(step.tokens) == order.stop
    assert bench.state.counters["replays_missing"] == 1


def test_later_runs_through_layers_of_a_missing_log_come_from_the_tokens_too() -> None:
    """The tokens go through the layers before the log again, which must be level in the end, whatever other log the
    later run was to come from. A run through deeper layers is not concerned."""
    bench = lose_one()
    (order,) = replays(bench)
    first, sequence = order.boundary, bench.sequence("r0")
    later = Rebuild("w9.1", LayerRange(first - 1, 6), 1, order.stop, order.stop, order.stop)
    deeper = Rebuild("w9.1", LayerRange(first + 1, 6), 1, order.stop, 0, 0)
    sequence.rebuilds += [later, deeper]
    name = ordered(bench)[0]
    message = ReplayMissing(
        epoch=order.epoch,
        incarnation=bench.workers[name].incarnation,
        sequence=order.sequence,
        boundary=first,
        has_from=order.stop,
    )
    bench.tell(name, message)
    assert (later.source, later.through) == (None, LayerRange(0, 6))
    assert (deeper.source, deeper.through) == ("w9.1", LayerRange(first + 1, 6))


def test_without_any_log_all_is_computed_again_in_steps() -> None:
    """Then nothing is cheaper than a prompt."""
    bench = lose_one(logged=False)
    assert not replays(bench)
    assert row(bench.pipe[0])[0][1] == 0
    bench.run_dry()
    assert bench.sequence("r0").reason == "length"


def test_an_end_during_a_replay() -> None:
    """What still comes of it is counted, and the next sequence is begun."""
    bench = lose_one(count=2)
    first = replays(bench)
    for order in first:
        sequence = next(s for s in bench.state.running if s.id == order.sequence)
        bench.say(Cancel(request_id=sequence.request.id))
    bench.tick()
    for order in first:
        done(bench, order)
    assert bench.state.counters["stale_replays"] == len(first)
    for order in replays(bench):
        done(bench, order)
    bench.run_dry()
    assert not bench.state.running


def test_a_death_during_a_replay_begins_it_anew() -> None:
    """With a higher epoch; answers of the old one count for nothing."""
    bench = lose_one(chunk=4)
    (order,) = replays(bench)
    bench.join("w9")
    bench.lose(ordered(bench)[-1])
    done_late = ReplayDone(
        epoch=order.epoch, incarnation="w9.1", sequence=order.sequence, layers=order.through, kv=order.stop
    )
    bench.tell("w9", done_late)
    assert bench.state.counters["stale_replays"] == 1
    assert bench.sequence("r0").kv == 0 or bench.sequence("r0").rebuilds or bench.pipe


def test_replays_that_a_second_loss_ends_count_as_far_as_they_came() -> None:
    """The next plan, of one worker, computes all layers again."""
    bench = lose_one(chunk=4)
    (order,) = replays(bench)
    [run] = bench.sequence("r0").rebuilds
    recovery = bench.state.recoveries.current
    assert recovery is not None
    assert recovery.layer_positions == run.stop * len(run.through)
    done(bench, order)
    bench.lose(ordered(bench)[0])
    expected = 4 * len(run.through) + run.stop * 6
    assert (recovery.layer_positions, recovery.least_layer_positions) == (expected, expected)


def test_replays_of_a_move_are_not_subtracted_from_the_recovery_after_it() -> None:
    bench = lose_one(chunk=4)
    [run] = bench.sequence("r0").rebuilds
    bench.state.recoveries.current = None  # as if the plan had been changed without a loss
    bench.lose(ordered(bench)[0])
    recovery = bench.state.recoveries.current
    assert recovery is not None
    expected = run.stop * 6
    assert (recovery.layer_positions, recovery.least_layer_positions) == (expected, expected)


def test_the_end_of_a_replay_counts_in_its_own_epoch_only() -> None:
    """The same replay, ordered anew: the answer to the first order says nothing of what the second one has reached."""
    bench = lose_one(chunk=4)
    (order,) = replays(bench)
    run = bench.sequence("r0").rebuilds[0]
    before = run.done
    done(bench, replace(order, epoch=order.epoch - 1))
    assert (run.done, bench.state.counters["stale_replays"]) == (before, 1)
    assert not replays(bench)
    done(bench, order)
    assert run.done == order.stop


def test_a_replay_that_nobody_answers_is_noticed() -> None:
    """All stages idle, nothing heard: the plan is made anew with the same workers."""
    bench = lose_one()
    (order,) = replays(bench)
    epoch = bench.epoch
    for _ in range(30):
        bench.now += 0.1
        for name in bench.workers:
            bench.beat(name, since_s=2.0)
        bench.feed(Tick())
    assert bench.epoch > epoch
    assert order.epoch == epoch


def test_who_is_present_at_deaths_during_replays_is_suspected() -> None:
    """A request whose replay kills whoever computes it must not go on for ever."""
    bench = lose_one()
    before = bench.sequence("r0").num_deaths
    bench.join("w9")
    bench.lose(ordered(bench)[-1])
    assert bench.sequence("r0").num_deaths == before + 1


# --- several sequences in one step ------------------------------------------------------------------------------------


def test_short_replays_of_several_sequences_share_a_step() -> None:
    """Each step reads all weights. All that are done with it go on in the same step, too."""
    bench = lose_one(count=3)
    kv = {s.id: s.kv for s in bench.state.running}
    (order,) = replay_steps(bench)
    parts = [(order.sequence, order.start, order.stop), *((p.sequence, p.start, p.stop) for p in order.more)]
    assert parts == [(s, 0, kv[s]) for s in sorted(kv, key=lambda s: kv[s])]
    more = tuple(SequencePosition(sequence, stop) for sequence, _, stop in parts[1:])
    message = ReplayDone(
        epoch=order.epoch, incarnation="w0.1", sequence=order.sequence, layers=order.through, kv=order.stop, more=more
    )
    bench.tell(ordered(bench)[-1], message)
    assert bench.state.rebuilding.is_idle
    (step,) = bench.pipe
    assert {r.sequence for r in step.rows} == set(kv)
    bench.run_dry()
    assert all(bench.sequence(f"r{i}").reason == "length" for i in range(3))


def test_a_step_takes_no_more_than_a_chunk() -> None:
    """Whole rests only: a sequence that does not fit goes into the next step."""
    bench = lose_one(chunk=40, count=3)
    steps_ordered = replay_steps(bench)
    for order in steps_ordered:
        parts = [(order.start, order.stop), *((p.start, p.stop) for p in order.more)]
        assert sum(stop - start for start, stop in parts) <= 40
    assert len(steps_ordered[0].more) == 1


def test_the_tokens_of_several_sequences_share_a_step() -> None:
    """The first stage is lost: the broker sends the step itself."""
    bench = lose_one(count=3, lost=0)
    (step,) = [step for step in steps(bench.take()) if step.replay]
    sequences = sorted(bench.state.running, key=lambda s: s.kv)
    assert row(step) == [(s.id, 0, s.kv) for s in sequences]
    assert step.tokens == tuple(token for s in sequences for token in s.tokens[: s.kv])
    assert [item.sequence for item in step.open] == [s.id for s in sequences]
    assert step.through == LayerRange(0, 4)


def test_a_suspect_is_replayed_alone() -> None:
    """If it kills the worker once more, nothing else was in the step."""
    bench = lose_one(count=3, before=lambda bench: bench.sequence("r1").count_deaths())
    suspect = bench.sequence("r1").id
    together = [{each.sequence, *(part.sequence for part in each.more)} for each in replay_steps(bench)]
    assert sorted(map(len, together)) == [1, 2]
    assert {suspect} in together


@pytest.mark.parametrize("lost", [0, 1])
def test_the_records_of_a_step_fit_into_its_header(lost: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sequence's first chunk carries its record; two of three records fit."""
    monkeypatch.setattr(rebuild, "MAX_OPEN_BYTES", 5 * (10 + 3 + 20 + 3))
    bench = lose_one(count=3, lost=lost)
    actions = bench.take()
    together = [1 + len(order.more) for _, order in orders(actions, Replay) if isinstance(order, Replay)]
    together += [len(step.open) for step in steps(actions) if step.replay]
    assert together == [2, 1]


def test_an_old_worker_gets_a_step_for_each_sequence() -> None:
    """It would not understand several."""

    def grow_old(bench: Bench) -> None:
        for worker in bench.state.workers.values():
            worker.hello = replace(worker.hello, wire_versions=(1, 2, 3))

    ordered_at_once = replay_steps(lose_one(count=3, before=grow_old))
    assert [order.more for order in ordered_at_once] == [(), ()]
