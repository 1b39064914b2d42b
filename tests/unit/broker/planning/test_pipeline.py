"""What a stage weighs, and the refusals of what is not a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec
import pytest

from swarm.broker.planning.proposals import check_pipeline, propose
from swarm.errors import StageSetError
from swarm.testing import fake_manifest
from swarm.wire.messages import LayerRange
from tests.unit.broker.bench import Bench, ranges
from tests.unit.broker.planning.test_plan_wanted import join, ruled

MIB = 1 << 20


def test_weight_counts_embedding_and_head_where_they_are() -> None:
    """The first stage loads the embedding, the last the head."""
    manifest = msgspec.structs.replace(
        fake_manifest(num_layers=3), layer_bytes=(MIB, 2 * MIB, 4 * MIB), embed_bytes=8 * MIB, head_bytes=16 * MIB
    )

    ranges = ((0, 3), (0, 1), (1, 2), (1, 3), (0, 2), (2, 3))
    assert [manifest.weight_bytes(LayerRange(*r)) // MIB for r in ranges] == [31, 9, 2, 22, 11, 20]


# --- the refusals ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "stages"),
    [
        ("gap", "should begin at 3", [(0, 3), (4, 6)]),
        ("gap", "should begin at 0", [(1, 6)]),
        ("overlap", "should begin at 3", [(0, 3), (2, 6)]),
        ("overlap", "should begin at 6", [(0, 3), (3, 6), (0, 3)]),
        ("wrong_total", "end at layer 5, the model has 6", [(0, 3), (3, 5)]),
        ("wrong_total", "end at layer 7, the model has 6", [(0, 3), (3, 7)]),
        ("wrong_total", "end at layer 0, the model has 6", []),
        ("empty_stage", "[3, 3) is empty", [(0, 3), (3, 3), (3, 6)]),
        ("empty_stage", "[5, 3) is empty", [(0, 3), (5, 3)]),
    ],
)
def test_refusals_by_name(kind: str, text: str, stages: list[tuple[int, int]]) -> None:
    """Each rule that a set of stages can break has a name, and a sentence that says where."""
    with pytest.raises(StageSetError) as caught:
        check_pipeline([LayerRange(*each) for each in stages], 6)
    assert caught.value.kind == kind
    assert text in str(caught.value)


def test_good_sets_pass() -> None:
    """What is a pipeline is not refused."""
    check_pipeline([LayerRange(0, 6)], 6)
    check_pipeline([LayerRange(0, 2), LayerRange(2, 6)], 6)


PINNED_TO_ALL = {"w0": LayerRange(0, 6)}


@pytest.mark.parametrize(
    ("pins", "mode", "waits_for"),
    [
        (
            {"w0": LayerRange(0, 4), "w1": LayerRange(2, 6)},
            "auto",
            "other pins: w0 and w1 are pinned to layers 0–3 and 2–5, which overlap",
        ),
        (
            {"w0": LayerRange(0, 2), "w1": LayerRange(4, 6)},
            "auto",
            "other pins or caps, or another worker: no worker is left for layers 2–3: all workers hold others by their "
            "pins",
        ),
        (
            {"w0": LayerRange(0, 7)},
            "auto",
            "another pin for w0: it is pinned to layers 0–6, and the model has 0–5",
        ),
        (
            PINNED_TO_ALL,
            "overlapped",
            "another pin for w0, or another broker.mode: all layers are pinned to it, and mode overlapped needs two "
            "stages",
        ),
        (PINNED_TO_ALL, "auto", ""),
        (PINNED_TO_ALL, "batch", ""),
    ],
)
def test_pins_that_make_no_pipeline(
    make_bench: Callable[..., Bench], pins: dict[str, LayerRange], mode: str, waits_for: str
) -> None:
    """Nobody loads anything: the swarm waits, and says what for. Else it serves."""
    bench = make_bench(ruled(pins=pins, mode=mode))
    for name in ("w0", "w1"):
        join(bench, name, 0.001)
    bench.tick()
    if waits_for:
        assert bench.state.plans.waits_for == waits_for
        assert bench.state.plans.epoch == 0
    else:
        assert ranges(bench) == {"w0": LayerRange(0, 6)}


def test_the_planner_checks_every_plan(serving: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut with a hole, were there ever one, is refused by its name before anybody hears of it."""

    def with_a_hole(*arguments: object) -> object:
        good = propose(*arguments)  # type: ignore[arg-type]
        (first, _), (second, _), _ = good.shares
        return replace(good, shares=((first, LayerRange(0, 3)), (second, LayerRange(4, 6))))

    serving.join("w2")
    serving.take()
    monkeypatch.setattr("swarm.broker.planning.proposals.propose", with_a_hole)
    with pytest.raises(StageSetError, match="gap"):
        serving.tick()
    assert serving.take() == []
