"""What a stage weighs, and the refusals of what is not a pipeline."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest

from swarm.broker.drafts.pipeline import StageSpec, check_stages, planned_stage
from swarm.broker.drafts.proposals import propose
from swarm.errors import StageSetError
from swarm.testing import fake_manifest
from swarm.wire.messages import LayerRange
from tests.unit.broker.bench import Bench

MIB = 1 << 20


def test_weight_counts_embedding_and_head_where_they_are() -> None:
    """The first stage loads the embedding, the last the head."""
    manifest = msgspec.structs.replace(
        fake_manifest(num_layers=3), layer_bytes=(MIB, 2 * MIB, 4 * MIB), embed_bytes=8 * MIB, head_bytes=16 * MIB
    )

    ranges = ((0, 3), (0, 1), (1, 2), (1, 3), (0, 2), (2, 3))
    assert [manifest.weight_bytes(LayerRange(*r)) // MIB for r in ranges] == [31, 9, 2, 22, 11, 20]


# --- the refusals ----------------------------------------------------------------------------------------------------

MODEL = fake_manifest(num_layers=6)


def stages_of(*bounds: tuple[int, int]) -> list[StageSpec]:
    return [planned_stage(MODEL, LayerRange(*b), "cpu") for b in bounds]


def changed(index: int, **fields: object) -> list[StageSpec]:
    """A good set of two stages, with one thing wrong in one of them."""
    good = stages_of((0, 3), (3, 6))
    values = {name: getattr(good[index], name) for name in StageSpec.__slots__} | fields
    good[index] = StageSpec(**values)
    return good


@pytest.mark.parametrize(
    ("kind", "text", "stages", "mode", "num_expected"),
    [
        ("gap", "should begin at 3", stages_of((0, 3), (4, 6)), "auto", None),
        ("gap", "should begin at 0", stages_of((1, 6)), "auto", None),
        ("overlap", "should begin at 3", stages_of((0, 3), (2, 6)), "auto", None),
        ("overlap", "should begin at 6", stages_of((3, 6), (0, 3))[::-1] + stages_of((0, 3)), "auto", None),
        ("wrong_total", "end at layer 5, the model has 6", stages_of((0, 3), (3, 5)), "auto", None),
        ("wrong_total", "end at layer 7, the model has 6", stages_of((0, 3), (3, 7)), "auto", None),
        ("unlike_dimensions", "stage 1: hidden size 9, but the model has 2", changed(1, hidden_size=9), "auto", None),
        ("no_embedding", "first stage", changed(0, has_embedding=False), "auto", None),
        ("no_head", "last stage", changed(1, has_head=False), "auto", None),
        ("unsupported_device", "'tpu:0' is none of cpu, cuda, mps", changed(0, device="tpu:0"), "auto", None),
        ("stage_count", "needs 1 stages or more, not 0", [], "auto", None),
        ("stage_count", "overlapped needs 2 stages or more, not 1", stages_of((0, 6)), "overlapped", None),
        ("stage_count", "3 stages are expected, not 2", stages_of((0, 3), (3, 6)), "auto", 3),
        ("unknown_mode", "choose one of batch, overlapped, auto", stages_of((0, 6)), "turbo", None),
        ("empty_stage", "[3, 3) is empty", stages_of((0, 3), (3, 3), (3, 6)), "auto", None),
        ("empty_stage", "[5, 3) is empty", stages_of((0, 3), (5, 3)), "auto", None),
    ],
)
def test_refusals_by_name(kind: str, text: str, stages: list[StageSpec], mode: str, num_expected: int | None) -> None:
    """Each rule that a set of stages can break has a name, and a sentence that says where."""
    with pytest.raises(StageSetError) as caught:
        check_stages(stages, MODEL, mode, num_expected)
    assert caught.value.kind == kind
    assert text in str(caught.value)


@pytest.mark.parametrize("mode", ["batch", "overlapped", "auto"])
def test_good_sets_pass(mode: str) -> None:
    """What is a pipeline is not refused; a device may have a number."""
    check_stages(stages_of((0, 2), (2, 6)), MODEL, mode, 2)
    check_stages(changed(1, device="cuda:3"), MODEL, mode)


def test_the_planner_checks_every_plan(serving: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cut with a hole, were there ever one, is refused by its name before anybody hears of it."""

    def with_a_hole(*arguments: object) -> object:
        good = propose(*arguments)  # type: ignore[arg-type]
        (first, _), (second, _), _ = good.shares
        return replace(good, shares=((first, LayerRange(0, 3)), (second, LayerRange(4, 6))))

    serving.join("w2")
    serving.take()
    monkeypatch.setattr("swarm.broker.drafts.proposals.propose", with_a_hole)
    with pytest.raises(StageSetError, match="gap"):
        serving.tick()
    assert serving.take() == []
