"""Who copies keys and values to whom, what is repeated, and when it ends."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec.structs import replace

from swarm.broker.actions import Action, Outbox
from swarm.broker.planner.standby import StandbyPolicy
from swarm.broker.planning.rules import PlanRules
from swarm.broker.recovery.kv_copies import PAUSE_S, STANDS_STILL_S, CopyOrder, order_copies
from swarm.broker.recovery.rebuild import trust_copied
from swarm.broker.recovery.reconfiguration import ReconfigurationSettings
from swarm.broker.state.kv_copies import CopyRoute, HeldCopies
from swarm.testing import fake_manifest
from swarm.wire.digests import prefix_digests
from swarm.wire.messages import (
    BLOCK,
    Activate,
    Activated,
    HeldSequence,
    KvHeld,
    LayerCost,
    LayerRange,
    LinkCost,
    Query,
    RangePosition,
    ReceiveKv,
    SendKv,
    SequencePosition,
    layers_of,
)
from tests.unit.broker.bench import MIB, Bench, orders, ranges, settings, submit

PINS = {"w0": LayerRange(0, 3), "w1": LayerRange(3, 6)}
Routes = dict[tuple[str, str], list[LayerRange]]


def copying(num_workers: int = 3, policy: StandbyPolicy = "neighbours", **fields: object) -> Bench:
    """Workers that take copies serve; ``log`` has all that was ordered so far."""
    rules = PlanRules(standby_kv=policy, pins=PINS if num_workers == 2 else {})
    bench = Bench(settings(plan=ReconfigurationSettings(settle_s=0.0, rules=rules)))
    for index in range(num_workers):
        add(bench, f"w{index}", **fields)
    bench.tick()
    bench.tick()
    bench.tick()
    assert bench.state.plans.is_serving
    return bench


def add(bench: Bench, name: str, **fields: object) -> list[Action]:
    return bench.join(name, **({"bits": "alike", "kv_endpoint": f"tcp://{name}-kv"} | fields))


def sent(actions: Sequence[Action]) -> Routes:
    """(source, holder) -> layers, of the last orders to every sender."""
    last = dict(orders(actions, SendKv))
    routes: Routes = {}
    for source, order in last.items():
        assert isinstance(order, SendKv)
        for target in order.targets:
            assert target.to.endpoint == f"tcp://{target.to.to.split('.')[0]}-kv"
            routes.setdefault((source, target.to.to), []).append(target.layers)
    return routes


def accepted(actions: Sequence[Action]) -> Routes:
    last = dict(orders(actions, ReceiveKv))
    routes: Routes = {}
    for holder, order in last.items():
        assert isinstance(order, ReceiveKv)
        for source in order.sources:
            routes.setdefault((source.incarnation, holder), []).append(source.layers)
    return routes


def report(bench: Bench, name: str, positions: dict[int, int], layers: LayerRange, **fields: object) -> list[Action]:
    held = tuple(HeldSequence(s, (RangePosition(layers, position),)) for s, position in positions.items())
    values: dict[str, object] = {"epoch": bench.epoch, "incarnation": f"{name}.1", "held": held, "free_bytes": 1 << 30}
    return bench.tell(name, KvHeld(**(values | fields)))  # type: ignore[arg-type]


def run(bench: Bench, num_prompt: int, request_id: str = "r") -> int:
    """A request whose prompt is computed, and some tokens; returns its sequence."""
    bench.say(submit(request_id, num_prompt=num_prompt, max_tokens=100))
    while bench.sequence(request_id).kv < num_prompt:
        bench.finish()
    return bench.sequence(request_id).id


def test_every_layer_has_one_holder_that_keeps_it_warm() -> None:
    """The holder is told before the sender, and of the same layers."""
    bench = copying()
    routes = sent(bench.log)
    assert routes == accepted(bench.log)
    plan = bench.state.plans.current
    assert plan is not None
    for stage in plan.stages:
        copied = [layer for (source, _), named in routes.items() if source == stage.incarnation for layer in named]
        assert sorted(layer for each in copied for layer in range(each.first, each.stop)) == sorted(
            layers_of((stage.layers,))
        )
    for (_, holder), named in routes.items():
        assert layers_of(named) <= layers_of(bench.state.workers[holder].warm_layers)
    kinds = [type(order) for _, order in orders(bench.log) if isinstance(order, SendKv | ReceiveKv)]
    assert kinds == [ReceiveKv] * 3 + [SendKv] * 3


def test_nothing_is_ordered_twice() -> None:
    bench = copying()
    bench.take()
    run(bench, 40)
    bench.tick(10 * STANDS_STILL_S)
    assert not orders(bench.take(), SendKv)


def test_all_that_keep_a_layer_warm_hold_copies() -> None:
    """A spare and a neighbour, of the same layers."""
    bench = copying(2, "all")
    bench.take()
    add(bench, "w9")
    bench.tick(1.0)
    routes = sent(bench.take())
    assert routes == {
        (source, holder): [layers]
        for source, layers in (("w0.1", LayerRange(0, 3)), ("w1.1", LayerRange(3, 6)))
        for holder in ("w0.1", "w1.1", "w9.1")
        if holder != source
    }


def test_the_holder_is_chosen_by_memory_and_load() -> None:
    """A spare computes nothing, so it holds what a neighbour could; one with little memory does not."""
    for memory_bytes, holder in ((200 * MIB, "w9.1"), (80 * MIB, "w1.1")):
        bench = copying(2)
        bench.lose("w1")
        add(bench, "w9", memory_bytes=memory_bytes)
        add(bench, "w1")
        bench.tick(1.0)
        assert all(
            LayerRange(0, 3) in worker.kept or worker.kept == (LayerRange(0, 6),)
            for worker in (bench.workers["w1"], bench.workers["w9"])
        )
        assert {held for source, held in sent(bench.log) if source == "w0.1"} == {holder}


def test_a_holder_stays_while_it_can() -> None:
    """A copy that moved would have to be sent once more."""
    bench = copying(2)
    bench.take()
    add(bench, "w9")
    bench.tick(1.0)
    assert not orders(bench.take(), SendKv)
    bench.lose("w9")
    bench.tick(1.0)
    assert not orders(bench.take(), SendKv)


@pytest.mark.parametrize(
    "fields",
    [{"kv_endpoint": ""}, {"bits": ""}],
    ids=["it has no listener", "its kernels compute other bits"],
)
def test_to_whom_nothing_is_copied(fields: dict[str, object]) -> None:
    bench = copying(2)
    bench.take()
    bench = copying(2, **fields)
    assert sent(bench.log) == accepted(bench.log) == {}


@pytest.mark.parametrize(("bits", "is_copied"), [("alike", True), ("others", False)])
def test_a_spare_holds_copies_only_of_workers_with_its_bits(bits: str, is_copied: bool) -> None:
    """It reports them with its warm layers, or with its Hello if it kept them already."""
    for kept in ((), (LayerRange(0, 6),)):
        bench = copying(2, "all")
        bench.take()
        add(bench, "w9", bits=bits, kept=kept)
        bench.tick(1.0)
        bench.tick(1.0)
        assert {holder for _, holder in sent(bench.log)} == ({"w9.1", "w0.1", "w1.1"} if is_copied else set())


@pytest.mark.parametrize("bits", ["alike", "others"])
def test_a_holder_that_computes_other_bits_with_the_lost_layers_drops_its_copies(bits: str) -> None:
    """Before the plan that would have it take them over."""
    bench = copying(3)
    sequence = run(bench, 100)
    first, middle, last = (name for name, _ in sorted(ranges(bench).items(), key=lambda each: each[1].first))
    for name in (first, last):
        bench.workers[name].bits = bits
        report(bench, name, {sequence: 96}, LayerRange(0, 6))
    bench.take()
    bench.lose(middle)
    for name in (first, last):
        told = [order for peer, order in orders(bench.log) if peer == f"{name}.1"]
        before = told[: next(place for place, order in enumerate(told) if isinstance(order, Activate))]
        assert [order.sources for order in before if isinstance(order, ReceiveKv)] == ([] if bits == "alike" else [()])


@pytest.mark.parametrize(("bytes_per_s", "is_copied"), [(1e9, True), (1e3, False)])
def test_copies_take_a_small_part_of_a_connection_between_hosts(bytes_per_s: float, is_copied: bool) -> None:
    costs = (LayerCost("decode", 1, 32, 0.001, False), LayerCost("decode", 1, 32, 0.001, True))
    bench = copying(2, costs=costs, link=LinkCost(0.001, bytes_per_s))
    assert bench.state.plans.current is not None
    assert bench.state.plans.current.forecast is not None
    assert bench.state.plans.current.forecast.step_s
    assert bool(sent(bench.log)) is is_copied


def test_without_copies_by_the_settings() -> None:
    assert not orders(copying(3, "none").log, SendKv)


@pytest.mark.parametrize("is_wrong", [True, False])
def test_what_a_worker_with_wrong_results_sent_is_dropped_before_anybody_takes_it_over(is_wrong: bool) -> None:
    bench = copying(2)
    report(bench, "w1", {}, PINS["w0"])
    assert ("w0.1", "w1.1") in accepted(bench.log)
    before = len(bench.log)
    w0 = bench.state.workers["w0.1"]
    w0.num_corrupt_results = int(is_wrong)
    actions = bench.lose("w0")
    last = [order for holder, order in orders(actions, ReceiveKv) if holder == "w1.1"]
    assert [order.sources for order in last] == ([()] if is_wrong else [])
    assert bench.state.counters.get("kv_copies_distrusted", 0) == int(is_wrong)
    assert len(bench.log) > before


def test_changed_settings_end_the_copies() -> None:
    """Senders and holders get empty orders; the holders drop what they have."""
    bench = copying(2)
    bench.take()
    bench.core._reconfiguration.target.set_rules(PlanRules(standby_kv="none"))
    bench.tick()
    actions = bench.take()
    assert len(orders(actions, SendKv)) == len(orders(actions, ReceiveKv)) == 2
    assert sent(actions) == accepted(actions) == {}


def test_a_route_that_stands_still_is_ordered_again_from_what_is_held() -> None:
    """Only if it is behind, and not at once; if that does not help, from the beginning."""
    bench = copying(2)
    sequence = run(bench, 200)
    (source, holder), (layers, *_) = next(iter(sent(bench.log).items()))
    name = holder.split(".")[0]
    report(bench, name, {sequence: 64}, layers)
    for other in set(bench.workers) - {name}:  # the other direction is complete
        report(bench, other, {sequence: 1000}, LayerRange(0, 6))
    bench.tick(1.0)
    bench.take()
    bench.tick(STANDS_STILL_S - 1.0)
    assert not orders(bench.take(), SendKv)
    bench.tick(1.5)
    actions = bench.take()
    ((_, order),) = [each for each in orders(actions, SendKv) if each[0] == source]
    assert isinstance(order, SendKv)
    assert order.targets[0].held == (SequencePosition(sequence, 64),)
    assert [peer for peer, _ in orders(actions, ReceiveKv)] == [holder]
    bench.tick(2 * STANDS_STILL_S + 1.0)
    ((_, order),) = [each for each in orders(bench.take(), SendKv) if each[0] == source]
    assert isinstance(order, SendKv)
    assert order.targets[0].held == ()


def test_a_route_with_progress_is_left_alone() -> None:
    bench = copying(2)
    sequence = run(bench, 400)
    (_, holder), _ = next(iter(sent(bench.log).items()))
    bench.take()
    for block in range(8):
        for name in bench.workers:
            report(bench, name, {sequence: block * BLOCK}, LayerRange(0, 6))
        bench.tick(STANDS_STILL_S - 1.0)
    assert not orders(bench.take(), SendKv)
    assert bench.state.kv_copies.position(holder, sequence, LayerRange(0, 6)) == 7 * BLOCK


def test_a_holder_without_memory_gets_nothing_for_a_while() -> None:
    bench = copying(2)
    sequence = run(bench, 200)
    for name in bench.workers:
        report(bench, name, {sequence: 64}, LayerRange(0, 6), free_bytes=1)
    bench.take()
    bench.tick(STANDS_STILL_S + 1.5)
    actions = bench.take()
    assert len(orders(actions, SendKv)) == 2
    assert sent(actions) == accepted(actions) == {}
    bench.tick(PAUSE_S + 1.0)
    assert len(sent(bench.take())) == 2


def test_reports_of_an_earlier_plan_do_not_count() -> None:
    bench = copying(2)
    report(bench, "w0", {1: 64}, LayerRange(0, 6), epoch=bench.epoch - 1)
    assert bench.state.kv_copies.position("w0.1", 1, LayerRange(0, 6)) == 0
    assert bench.state.counters["stale_control"] == 1
    report(bench, "w0", {1: 64}, LayerRange(0, 4))
    assert bench.state.kv_copies.position("w0.1", 1, LayerRange(0, 4)) == 64
    assert bench.state.kv_copies.position("w0.1", 1, LayerRange(3, 5)) == 0


def test_a_worker_that_joins_again_is_ordered_again() -> None:
    """It may have lost its order, and what it held."""
    bench = copying(2)
    add(bench, "w9")
    bench.core._reconfiguration.target.set_rules(PlanRules(standby_kv="all", pins=PINS))
    bench.tick(1.0)
    sequence = run(bench, 100)
    report(bench, "w9", {sequence: 96}, LayerRange(0, 6))
    bench.take()
    bench.now += 0.1
    bench.tell("w9", bench.workers["w9"].hello())
    bench.tick(0.1)
    actions = bench.take()
    assert "w9.1" in dict(orders(actions, ReceiveKv))
    assert {source for source, holder in sent(actions) if holder == "w9.1"} == {"w0.1", "w1.1"}
    assert not any(t.held for _, order in orders(actions, SendKv) for t in order.targets if t.to.to == "w9.1")  # type: ignore[union-attr]
    bench.tick(1.0)
    assert not orders(bench.take(), SendKv)


def test_copies_go_on_while_layers_are_rebuilt() -> None:
    """The next death may come before that is done."""
    bench = copying(2)
    run(bench, 100)
    sequence = bench.sequence("r")
    bench.workers["w1"].held = {sequence.id: 0}
    bench.workers["w0"].logged = {sequence.id: sequence.kv}
    bench.take()
    bench.core._reconfiguration.on_data_path_broken(bench.now, blame=False)
    bench.tick()
    assert not bench.state.rebuilding.is_idle
    assert set(sent(bench.take())) == {("w0.1", "w1.1"), ("w1.1", "w0.1")}


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        ([(0, 6, 64)], 64),
        ([(0, 3, 64), (3, 6, 32)], 32),
        ([(0, 3, 32), (3, 6, 64)], 32),
        ([(0, 1, 8), (1, 3, 96), (3, 4, 64), (4, 5, 96), (5, 6, 8)], 64),
        ([(0, 3, 64), (4, 6, 64)], 0),
        ([(0, 4, 64)], 0),
        ([(2, 6, 64)], 0),
        ([(3, 6, 64), (0, 3, 64)], 0),  # in a wrong order, which no worker sends
        ([], 0),
    ],
)
def test_all_layers_of_a_route_must_be_held(parts: list[tuple[int, int, int]], expected: int) -> None:
    held = HeldSequence(1, tuple(RangePosition(LayerRange(first, stop), position) for first, stop, position in parts))
    copies = HeldCopies.from_report((held,))
    assert copies.position(1, LayerRange(1, 5)) == expected
    assert copies.position(2, LayerRange(1, 5)) == 0


def test_after_a_change_of_plan_copies_are_ordered_for_it() -> None:
    """With what the stages of the new plan have reported with their activation."""
    bench = copying(3)
    sequence = run(bench, 100)
    epoch = bench.epoch
    for worker in bench.workers.values():
        worker.copies = (HeldSequence(sequence, (RangePosition(LayerRange(0, 6), 96),)),)
    lost = next(iter(bench.workers))
    bench.take()
    bench.lose(lost)
    bench.tick()
    bench.tick()
    told = orders(bench.log, SendKv)
    assert {order.epoch for _, order in told} == {bench.epoch} != {epoch}
    assert all(
        target.held == (SequencePosition(sequence, 96),)
        for _, order in told
        if isinstance(order, SendKv)
        for target in order.targets
    )
    assert f"{lost}.1" not in {peer for route in sent(bench.log) for peer in route}


def test_what_copies_saved_is_recorded_for_the_recovery() -> None:
    bench = copying(3)
    run(bench, 100)
    lost = sorted(ranges(bench).items(), key=lambda each: each[1].first)[1][0]
    bench.lose(lost)  # the bench's workers hold all that they are told to keep, also in new layers
    recovery = bench.state.recoveries.current or bench.state.recoveries.past[-1]
    assert recovery.copied_layer_positions == 2 * bench.sequence("r").kv
    assert bench.state.counters["kv_copies_used_positions"] == recovery.copied_layer_positions


def test_a_report_in_another_lineage_counts_for_nothing() -> None:
    bench = copying(2)
    message = KvHeld(epoch=bench.epoch, incarnation="w0.1", held=())
    lineage = replace(bench.state.lineage, generation=bench.state.lineage.generation + 1)
    bench.tell("w0", replace(message, lineage=lineage))
    assert bench.state.counters["stale_control"] == 1
    assert "kv_copies_reports" not in bench.state.counters


def test_after_a_loss_the_holder_of_copies_takes_the_layers() -> None:
    """And the forecast is for what its copies lack."""
    forecasts = {}
    for position in (0, 384):
        bench = copying(3)
        sequence = run(bench, 400)
        first, middle, last = (name for name, _ in sorted(ranges(bench).items(), key=lambda each: each[1].first))
        everything = (LayerRange(0, 6),)
        for name in (first, last):
            bench.state.workers[f"{name}.1"].record_warm(everything, 0)
        report(bench, last, {sequence: position}, LayerRange(2, 4))
        bench.lose(middle)
        recovery = bench.state.recoveries.current or bench.state.recoveries.past[-1]
        assert recovery.predicted is not None
        forecasts[position] = recovery.predicted.replay_s
        held = ranges(bench)[last]
        assert held == (LayerRange(2, 6) if position else LayerRange(3, 6))
    assert forecasts[384] < forecasts[0] / 2


def test_what_a_stage_took_over_from_copies_counts_as_far_as_its_tokens_are_right() -> None:
    """It has them from another worker. Sequences that it opened itself have no digests."""
    bench = copying()
    sequence = run(bench, 70)
    tokens = bench.sequence("r").tokens[:64]
    layers = (LayerRange(0, 2), LayerRange(2, 3))

    def counted(digests: tuple[int, ...], limit: int = bench.sequence("r").limit) -> list[int]:
        kv = (RangePosition(layers[0], 64), RangePosition(layers[1], 32))
        report = Activated(incarnation="w1.1", held=(HeldSequence(sequence, kv, digests, limit),), logs=())
        return [part.position for part in trust_copied(report, bench.state).held[0].kv]

    assert counted(()) == [64, 32]
    assert counted(prefix_digests(tokens, 64)) == [64, 32]
    assert counted(prefix_digests([*tokens[:-1], 5], 64)) == [63, 32]
    assert counted(prefix_digests([5] * 64, 64)) == [0, 0]
    assert counted(prefix_digests(tokens, 64), 71) == [0, 0]  # of another sequence of this number, or reservation


def test_a_copy_with_states_counts_up_to_one_of_them() -> None:
    """Where its tokens differ, no layer holds a state."""
    bench = copying(manifest=fake_manifest(6, state_stride=32))
    sequence = run(bench, 90)
    tokens = bench.sequence("r").tokens[:70]
    kv = (RangePosition(LayerRange(0, 2), 70), RangePosition(LayerRange(2, 3), 64))
    counted = []
    for digests in (prefix_digests(tokens, 70), prefix_digests([*tokens[:-2], 5, 5], 70)):
        held = HeldSequence(sequence, kv, digests, bench.sequence("r").limit)
        report = trust_copied(Activated(incarnation="w1.1", held=(held,), logs=()), bench.state)
        counted.append([part.position for part in report.held[0].kv])
    assert counted == [[70, 64], [64, 64]]


def test_copies_of_ended_sequences_are_dropped() -> None:
    """A holder without a part in the plan sees no release. The order is repeated until its report has them no more, and
    keeps everything else as it was (simulated seed 52)."""
    bench = copying(2)
    sequence = run(bench, 100)
    report(bench, "w0", {sequence: 96, 999: 64}, LayerRange(3, 6))
    for _ in range(2):
        bench.take()
        bench.tick(0.5)
        told = orders(bench.log, ReceiveKv)
        assert [(peer, order.ended) for peer, order in told if isinstance(order, ReceiveKv)] == [("w0.1", (999,))]
        assert accepted(bench.log) == {("w1.1", "w0.1"): [LayerRange(3, 6)]}
    report(bench, "w0", {sequence: 96}, LayerRange(3, 6))
    bench.take()
    bench.tick(0.5)
    assert orders(bench.take(), ReceiveKv) == []


# --- reports ----------------------------------------------------------------------------------------------------------


def test_the_plan_shows_who_copies_what_and_its_price() -> None:
    bench = copying(2)
    body = bench.ask(Query(what="plan")).body
    per_position = 3 * bench.workers["w0"].manifest.kv_bytes_per_token[0]
    assert body["copies"] == [
        {
            "source": source,
            "holder": holder,
            "layers": [layers.first, layers.stop],
            "positions": 0,
            "behind": 0,
            "bytes_per_position": per_position,
            "full_bytes": per_position * 4096,
            "bytes_per_s": 0,
        }
        for source, holder, layers in (("w0", "w1", PINS["w0"]), ("w1", "w0", PINS["w1"]))
    ]
    (line, _) = [line for line in body["why"] if "holds copies" in line]
    assert line.startswith("w1 holds copies of w0's keys and values in layers 0–2: ")
    assert "(plan.standby_kv)" in line
    assert "predicted" in line
    run(bench, 100)
    bench.tick(1.0)
    rate = bench.state.kv_copies.positions_per_s
    assert rate > 0
    body = bench.ask(Query(what="plan")).body
    assert [row["bytes_per_s"] for row in body["copies"]] == [round(per_position * rate)] * 2
    assert any(f"at the measured {rate:.0f} positions/s" in line for line in body["why"])


def test_reports_show_how_far_copies_are() -> None:
    bench = copying(2)
    sequence = run(bench, 100)
    report(bench, "w1", {sequence: 64}, PINS["w0"], num_bytes=1234, free_bytes=5678)
    (w0, w1) = bench.ask(Query(what="nodes")).body["workers"]
    assert w1["copies"] == {
        "routes": [{"source": "w0", "layers": [0, 3], "positions": 64, "behind": 32}],
        "num_bytes": 1234,
        "free_bytes": 5678,
    }
    assert w0["copies"]["routes"][0]["behind"] == 96
    assert bench.ask(Query(what="stats")).body["kv_copies"] == {"routes": 2, "bytes": 1234, "behind": 96}
    bench = copying(2, "none")
    assert [row["copies"] for row in bench.ask(Query(what="nodes")).body["workers"]] == [None, None]
    assert "copies" not in bench.ask(Query(what="plan")).body


def test_a_route_of_a_worker_that_is_gone_is_not_ordered() -> None:
    """A change of plan orders replicas besides its own copies, as they were chosen last (simulated seed 101566)."""
    bench = copying(2)
    layers = LayerRange(0, 3)
    routes = [CopyRoute("w0.1", "w9.9", layers), CopyRoute("w9.9", "w1.1", layers), CopyRoute("w0.1", "w1.1", layers)]
    bench.state.kv_copies.forget_orders()
    out = Outbox()
    order_copies(bench.state, out, map(CopyOrder, routes))
    assert sent(out) == accepted(out) == {("w0.1", "w1.1"): [layers]}
