"""The operator at the helm: cordons, drains, plans by hand and anew; never so that no plan is left."""

from __future__ import annotations

import pytest

from swarm.auth.permissions import deny_reason
from swarm.broker.state import WorkerState
from swarm.broker.state.constraints import PlanConstraints
from swarm.wire.messages import Cap, LayerRange, Pin, PlanCommand, PlanOverrides, Query, StopWorker
from tests.unit.broker.bench import Bench, submit
from tests.unit.broker.planning.test_plan_wanted import join, ruled


def layers(bench: Bench) -> dict[str, LayerRange]:
    current = bench.state.plans.current
    assert current is not None
    return {stage.name: stage.layers for stage in current.stages}


def steer(bench: Bench, verb: str, worker: str = "", **fields: object) -> dict[str, object]:
    report = bench.ask(PlanCommand(verb=verb, worker=worker, **fields))  # type: ignore[arg-type]
    assert report.ok, report.body
    return report.body


def test_a_cordoned_worker_serves_what_it_has_and_gets_nothing_new(serving: Bench) -> None:
    """Not when another one dies, either; until it is uncordoned."""
    before = layers(serving)
    body = steer(serving, "cordon", "w0")
    assert (body["worker"], body["state"]) == ("w0", "cordoned")
    assert "until this broker restarts" in str(body["lasts"])
    serving.tick(1.0)
    assert layers(serving) == before
    serving.join("w2")
    serving.tick(1.0)
    assert layers(serving)["w0"] == before["w0"]
    serving.lose("w1")
    serving.tick(1.0)
    assert layers(serving) == {"w0": before["w0"], "w2": before["w1"]}
    steer(serving, "uncordon", "w0")
    serving.lose("w2")
    serving.tick(1.0)
    assert layers(serving) == {"w0": LayerRange(0, 6)}


def test_a_cordon_holds_for_the_name(serving: Bench) -> None:
    """A worker that comes again under it gets nothing; nor does a newcomer that was cordoned before its first part."""
    steer(serving, "cordon", "w1")
    serving.lose("w1")
    serving.tick(1.0)
    serving.join("w1")
    serving.tick(1.0)
    assert layers(serving) == {"w0": LayerRange(0, 6)}
    steer(serving, "uncordon", "w1")
    serving.tick(1.0)
    assert set(layers(serving)) == {"w0", "w1"}


def test_where_only_the_cordoned_are_left_it_is_said_what_to_do(serving: Bench) -> None:
    """The order stands, and who looks is told whose."""
    steer(serving, "cordon", "w0")
    serving.lose("w1")
    serving.tick(1.0)
    assert serving.state.plans.current is None
    assert "w0 is cordoned: swarmctl uncordon w0" in serving.state.plans.waits_for


def test_a_drained_worker_hands_over_and_stays(serving: Bench) -> None:
    """Requests go on with the others; its process is not sent away, and may have layers again."""
    serving.say(submit())
    steer(serving, "drain", "w1")
    serving.tick(1.0)
    assert layers(serving) == {"w0": LayerRange(0, 6)}
    serving.run_dry()
    assert serving.sequence().reason == "length"
    assert serving.state.workers["w1.1"].state is WorkerState.MEMBER
    nodes = serving.ask(Query(what="nodes")).body["workers"]
    assert [(row["name"], row["steered"]) for row in nodes] == [("w0", ""), ("w1", "drained")]  # type: ignore[attr-defined]
    steer(serving, "uncordon", "w1")
    serving.tick(1.0)
    assert set(layers(serving)) == {"w0", "w1"}


def test_who_stays_excluded_is_not_called_free(make_bench) -> None:
    """Nor is it in the list of nodes, where that was by hand; the answer says what takes it back."""
    bench = make_bench(ruled(exclude=frozenset({"w2"}))).serve(3)
    steer(bench, "plan", by_hand=PlanOverrides(exclude=("w1",)))
    steer(bench, "cordon", "w1")
    nodes = bench.ask(Query(what="nodes")).body["workers"]
    assert [row["steered"] for row in nodes] == ["", "cordoned", ""]  # type: ignore[attr-defined]
    by_hand, by_setting = steer(bench, "uncordon", "w1"), steer(bench, "uncordon", "w2")
    assert (by_hand["state"], by_setting["state"]) == ("excluded", "excluded")
    assert by_hand["note"] == (
        "it is not cordoned any more, but it is excluded by hand (swarmctl plan --apply restores the settings)"
    )
    assert "excluded by the settings (plan.exclude)" in str(by_setting["note"])
    nodes = bench.ask(Query(what="nodes")).body["workers"]
    assert [row["steered"] for row in nodes] == ["", "excluded", ""]  # type: ignore[attr-defined]
    steer(bench, "plan")
    assert steer(bench, "uncordon", "w1") == {"worker": "w1", "state": "free"}


def test_what_else_an_order_brings_about_is_told_with_it(make_bench) -> None:
    """A pin that rests, by hand or by the settings; nobody left to take a dead worker's layers."""
    bench = make_bench(ruled(pins={"w2": LayerRange(4, 6)})).serve(3)
    steer(bench, "plan", by_hand=PlanOverrides(pins=(Pin("w0", LayerRange(0, 2)),)))
    bench.tick(1.0)
    assert "note" not in steer(bench, "cordon", "w0")  # which keeps just that
    assert steer(bench, "drain", "w2")["note"] == "its pin to layers 4–5 is suspended until swarmctl uncordon w2"
    bench.tick(1.0)
    assert steer(bench, "cordon", "w1")["note"] == (
        "no worker is left that may get layers: if one dies, requests wait for swarmctl uncordon or a new worker"
    )


def test_who_is_needed_is_not_drained(make_bench) -> None:
    """The answer says what the swarm would wait for; nothing has changed."""
    bench = make_bench().serve(1)
    report = bench.ask(PlanCommand(verb="drain", worker="w0"))
    assert not report.ok
    assert "the swarm can't do without w0, it would wait for" in str(report.body["error"])
    assert not bench.state.constraints.drained
    assert bench.state.plans.is_serving


def test_a_refusal_tells_of_each_what_it_is(make_bench) -> None:
    """Drained or cordoned; whom the order is about is neither, nor does its refusal name an option that it lacks."""
    bench = make_bench().serve(3)
    steer(bench, "drain", "w0")
    steer(bench, "drain", "w1")
    held = "a worker besides w0, w1, which must not be used (w0, w1 are drained: swarmctl uncordon w0 or w1)"
    would_wait = f"the swarm can't do without w2, it would wait for {held}"
    assert bench.ask(PlanCommand(verb="drain", worker="w2")).body == {"error": would_wait}
    assert bench.ask(StopWorker(worker="w2")).body == {"error": f"{would_wait} (--force stops it anyway)"}
    again = bench.ask(StopWorker(worker="w2", again=True))
    assert again.body == {"error": f"{would_wait} (--force restarts it anyway)"}
    steer(bench, "uncordon", "w1")
    bench.tick(1.0)
    steer(bench, "cordon", "w1")
    bench.lose("w2")
    bench.lose("w1")
    bench.join("w1")
    bench.tick(1.0)
    assert bench.state.plans.waits_for.endswith("(w0 is drained, w1 is cordoned: swarmctl uncordon w0 or w1)")


def test_a_plan_by_hand_is_supposed_and_then_made(serving: Bench) -> None:
    """Supposed, it changes nothing; applied, it takes the place of what was applied before."""
    hand = PlanOverrides(pins=(Pin("w0", LayerRange(0, 1)),))
    body = steer(serving, "plan", by_hand=hand, dry_run=True)
    assert body["state"] == "would be made"
    serving.tick(1.0)
    before = layers(serving)
    assert before["w0"] != LayerRange(0, 1)
    assert steer(serving, "plan", by_hand=hand)["state"] == "is made now"
    serving.tick(1.0)
    assert layers(serving) == {"w0": LayerRange(0, 1), "w1": LayerRange(1, 6)}
    steer(serving, "plan", by_hand=PlanOverrides(caps=(Cap("w1", 2),)))
    serving.tick(1.0)
    assert len(layers(serving)["w1"]) == 2
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w1",)))
    serving.tick(1.0)
    assert layers(serving) == {"w0": LayerRange(0, 6)}
    steer(serving, "plan")
    serving.tick(1.0)
    assert set(layers(serving)) == {"w0", "w1"}


@pytest.mark.parametrize("dry_run", [True, False])
def test_a_plan_by_hand_is_told_with_the_words_just_given(serving: Bench, dry_run: bool) -> None:
    """Not with those that counted before; how long they last only where there are any."""

    def told(hand: PlanOverrides) -> tuple[list[str], bool]:
        body = steer(serving, "plan", by_hand=hand, dry_run=dry_run)
        serving.tick(1.0)
        return [text for text in body["why"] if text.startswith("by hand: ")], "lasts" in body  # type: ignore[attr-defined]

    back = "swarmctl plan --apply restores the settings"
    assert told(PlanOverrides(caps=(Cap("w1", 5),))) == ([f"by hand: w1 has at most 5 of them; {back}"], not dry_run)
    assert told(PlanOverrides(exclude=("w1",))) == ([f"by hand: w1 is excluded; {back}"], not dry_run)
    assert told(PlanOverrides()) == ([], False)
    assert "lasts" not in steer(serving, "rebalance")


def test_what_was_laid_down_is_told_with_the_plan(serving: Bench) -> None:
    """Each part as long as it counts, and nothing where all is by the settings."""

    def told() -> object:
        return serving.ask(Query(what="plan")).body.get("by_hand")

    assert told() is None
    steer(serving, "plan", by_hand=PlanOverrides(pins=(Pin("w0", LayerRange(0, 1)),), caps=(Cap("w1", 5),)))
    assert told() == {"pins": {"w0": [0, 1]}, "caps": {"w1": 5}}
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w1",), objective="latency"))
    assert told() == {"exclude": ["w1"], "objective": "latency"}
    steer(serving, "plan")
    assert told() is None


def test_what_was_laid_down_is_told_while_there_is_no_plan(serving: Bench) -> None:
    """It may be why there is none."""
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w1",)))
    steer(serving, "cordon", "w1")
    serving.lose("w0")
    serving.tick(1.0)
    body = serving.ask(Query(what="plan")).body
    assert (body["state"], body["stages"]) == ("waiting", [])
    assert body["why"] == [
        "by hand: w1 is excluded; swarmctl plan --apply restores the settings",
        "by hand: w1 is cordoned; swarmctl uncordon reverses it",
    ]


@pytest.mark.parametrize(
    ("hand", "words"),
    [
        (PlanOverrides(exclude=("w0", "w1")), "nothing was changed: the swarm would wait for a worker besides w0, w1"),
        (PlanOverrides(exclude=("w9",)), "no worker 'w9': the workers are w0, w1"),
        (PlanOverrides(pins=(Pin("w0", LayerRange(0, 3)), Pin("w1", LayerRange(2, 6)))), "which overlap"),
    ],
)
def test_what_leaves_no_plan_is_not_applied(serving: Bench, hand: PlanOverrides, words: str) -> None:
    before = serving.state.constraints
    report = serving.ask(PlanCommand(verb="plan", by_hand=hand))
    assert not report.ok
    assert words in str(report.body["error"])
    assert serving.state.constraints == before


def test_who_has_gone_may_be_excluded_again(serving: Bench) -> None:
    """Or a new plan by hand could not repeat that of one that has left; whoever never was here may not."""
    serving.join("w2")
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w2",)))
    serving.lose("w2")
    del serving.state.workers["w2.1"]  # so long ago that only the operator's word has its name
    serving.join("w3")
    serving.lose("w3")
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w2", "w3"), caps=(Cap("w1", 5),)))
    assert serving.state.constraints.exclude == {"w2", "w3"}
    report = serving.ask(PlanCommand(verb="plan", by_hand=PlanOverrides(caps=(Cap("w3", 5),))))
    assert str(report.body["error"]).startswith("w3 has been out for ")


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("verb", "hand", "words"),
    [
        (
            "drain",
            PlanOverrides(pins=(Pin("w1", LayerRange(3, 6)),)),
            "w1 is drained and gets no layers, whatever is pinned to it: first swarmctl uncordon w1",
        ),
        (
            "cordon",
            PlanOverrides(pins=(Pin("w1", LayerRange(0, 3)),)),
            "first swarmctl uncordon w1: it is cordoned, so it keeps layers 3–5, and no others",
        ),
        (
            "cordon",
            PlanOverrides(caps=(Cap("w1", 2),)),
            "first swarmctl uncordon w1: it is cordoned, so it keeps layers 3–5, more than 2",
        ),
        (
            "uncordon",
            PlanOverrides(pins=(Pin("w1", LayerRange(3, 6)),), exclude=("w1",)),
            "w1 can't be pinned and excluded at once",
        ),
    ],
)
def test_what_another_word_would_overrule_is_refused(
    serving: Bench, verb: str, hand: PlanOverrides, words: str, dry_run: bool
) -> None:
    """In one line that says what to do; neither made nor supposed. Once that is done, it is made."""
    steer(serving, verb, "w1")
    serving.tick(1.0)
    before = serving.state.constraints
    report = serving.ask(PlanCommand(verb="plan", by_hand=hand, dry_run=dry_run))
    assert not report.ok
    assert str(report.body["error"]).startswith(words)
    assert serving.state.constraints == before
    steer(serving, "uncordon", "w1")
    serving.tick(1.0)
    if not hand.exclude:
        steer(serving, "plan", by_hand=hand)
        serving.tick(1.0)
        assert [layers(serving)["w1"]] == [pin.layers for pin in hand.pins] or len(layers(serving)["w1"]) == 2


def test_a_pin_does_not_bring_back_who_must_not_be_used(make_bench) -> None:
    """Excluded by the settings, leaving or gone."""
    bench = make_bench(ruled(exclude=frozenset({"w1"}))).serve(2)
    hand = PlanOverrides(pins=(Pin("w1", LayerRange(0, 3)),))
    report = bench.ask(PlanCommand(verb="plan", by_hand=hand))
    assert report.body == {
        "error": "w1 is excluded by the settings and gets no layers: first take it out of plan.exclude"
    }
    bench.lose("w1")
    report = bench.ask(PlanCommand(verb="plan", by_hand=hand))
    assert str(report.body["error"]).startswith("w1 has been out for ")


def test_a_cordoned_worker_may_be_pinned_to_what_it_keeps(serving: Bench) -> None:
    steer(serving, "cordon", "w1")
    steer(serving, "plan", by_hand=PlanOverrides(pins=(Pin("w1", LayerRange(3, 6)),)))


def test_who_is_left_out_is_told_by_whose_word(serving: Bench) -> None:
    """And what takes it back."""

    def left_out() -> dict[str, str]:
        found = serving.ask(Query(what="plan")).body["forecast"]["left_out"]  # type: ignore[index]
        return {each["worker"]: each["why"] for each in found}

    steer(serving, "drain", "w1")
    serving.tick(1.0)
    assert left_out() == {"w1": "it is drained (swarmctl uncordon allows it to get layers again)"}
    steer(serving, "uncordon", "w1")
    steer(serving, "plan", by_hand=PlanOverrides(exclude=("w1",)))
    serving.tick(1.0)
    assert left_out() == {"w1": "it is excluded by hand (swarmctl plan --apply restores the settings)"}


def test_who_finds_all_layers_kept_is_told_by_whom(make_bench) -> None:
    bench = make_bench().serve(1)
    steer(bench, "cordon", "w0")
    bench.join("w1")
    bench.tick(1.0)
    found = bench.ask(Query(what="plan")).body["forecast"]["left_out"]  # type: ignore[index]
    why = "no layers are left for it: w0 keeps layers 0–5 (pinned or cordoned)"
    assert found == [{"worker": "w1", "why": why}]


def test_the_hint_names_every_setting_that_lasts(serving: Bench) -> None:
    lasts = str(steer(serving, "plan", by_hand=PlanOverrides(objective="latency"))["lasts"])
    assert all(f"plan.{name}" in lasts for name in ("pins", "caps", "exclude", "objective"))


def test_planning_anew_ends_with_the_plan(serving: Bench) -> None:
    """The best plan stays as it is, and later changes are worth it by the settings again."""
    epoch = serving.epoch
    assert steer(serving, "rebalance")["state"] == "stays as it is"
    assert serving.state.constraints.margin == 0.0
    serving.tick(1.0)
    assert serving.state.constraints.margin is None
    assert serving.epoch == epoch


def test_a_little_quicker_is_worth_it_when_asked(make_bench) -> None:
    """Which the margin of the settings would not allow by itself."""
    serving = make_bench(ruled(margin=5.0))
    join(serving, "w0", 0.01)
    join(serving, "w1", 0.01)
    serving.tick()
    steer(serving, "plan", by_hand=PlanOverrides(pins=(Pin("w0", LayerRange(0, 2)),)))
    serving.tick(1.0)
    assert layers(serving)["w0"] == LayerRange(0, 2)
    serving.state.set_constraints(PlanConstraints())  # no pin any more, and nobody asks for a change
    serving.tick(1.0)
    kept = layers(serving)
    steer(serving, "rebalance")
    serving.tick(1.0)
    assert kept["w0"] == LayerRange(0, 2)
    assert layers(serving)["w0"] == LayerRange(0, 3)


def test_only_an_admin_is_at_the_helm() -> None:
    """Where keys are in force."""
    for role in ("client", "gateway", "worker"):
        assert "may not change the placement of layers" in deny_reason(role, PlanCommand(verb="cordon", worker="w0"))
    assert deny_reason("admin", PlanCommand(verb="cordon", worker="w0")) == ""
