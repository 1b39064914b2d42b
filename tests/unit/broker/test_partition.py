"""Layer ranges from memory, and the refusals of what is not a pipeline."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.broker.partition import (
    OVERHEAD_BYTES,
    Candidate,
    Share,
    Shortage,
    StageSpec,
    check_stages,
    partition,
    planned_stage,
    weight_bytes,
)
from swarm.errors import StageSetError
from swarm.testing import fake_manifest
from swarm.wire.messages import LayerRange, Manifest
from tests.unit.broker.bench import Bench

MIB = 1 << 20


def manifest_of(layers: tuple[int, ...], embed: int = 1, head: int = 1) -> Manifest:
    """Sizes in MiB."""
    return msgspec.structs.replace(
        fake_manifest(num_layers=len(layers)),
        layer_bytes=tuple(n * MIB for n in layers),
        embed_bytes=embed * MIB,
        head_bytes=head * MIB,
    )


def candidates_of(*mib: int) -> list[Candidate]:
    """Workers with so many MiB for weights."""
    return [Candidate(f"w{i}", OVERHEAD_BYTES + n * MIB) for i, n in enumerate(mib)]


def cut(manifest: Manifest, *mib: int) -> list[tuple[int, int, int]]:
    """(candidate, first, stop) of each share."""
    shares = partition(manifest, candidates_of(*mib))
    assert not isinstance(shares, Shortage), shares.text
    return [(s.candidate, s.layers.first, s.layers.stop) for s in shares]


# --- what a stage weighs ---------------------------------------------------------------------------------------------


def test_weight_counts_embedding_and_head_where_they_are() -> None:
    """The first stage loads the embedding, the last the head."""
    manifest = manifest_of((1, 2, 4), embed=8, head=16)

    ranges = ((0, 3), (0, 1), (1, 2), (1, 3), (0, 2), (2, 3))
    assert [weight_bytes(manifest, LayerRange(*r)) // MIB for r in ranges] == [31, 9, 2, 22, 11, 20]


# --- the cut ---------------------------------------------------------------------------------------------------------


def test_even_when_memory_allows() -> None:
    """Equal shares, the first ones one larger."""
    assert cut(manifest_of((1,) * 8), 99, 99, 99) == [(0, 0, 3), (1, 3, 6), (2, 6, 8)]


def test_no_more_stages_than_layers() -> None:
    """Workers beyond the number of layers stay out."""
    assert cut(manifest_of((1, 1)), 99, 99, 99) == [(0, 0, 1), (1, 1, 2)]


def test_a_small_worker_gets_what_it_can_hold() -> None:
    """Its layers go to the others, as evenly as they can take them."""
    assert cut(manifest_of((1,) * 6), 99, 1, 99) == [(0, 0, 3), (1, 3, 4), (2, 4, 6)]


def test_a_worker_without_room_for_one_layer_is_left_out() -> None:
    """It is no stage; the others are."""
    assert cut(manifest_of((4,) * 4), 99, 3, 99) == [(0, 0, 2), (2, 2, 4)]


def test_a_shortage_says_how_much_is_missing() -> None:
    """All memory together is too little: in words, with the numbers, and in bytes."""
    short = partition(manifest_of((10,) * 4), candidates_of(20, 10))
    assert short == Shortage(
        "12 MiB more memory: chain needs 170 MiB on 2 workers, joined are w0 84 MiB, w1 74 MiB", 12 * MIB
    )


def test_a_shortage_of_packing_is_told_apart() -> None:
    """There would be memory enough, were the layers not so large."""
    short = partition(manifest_of((10, 10, 10), embed=0, head=0), candidates_of(9, 9, 19))
    assert isinstance(short, Shortage)
    assert short.missing_bytes == 0
    assert short.text.startswith("workers with more memory each: the layers don't pack into w0 73 MiB")


def test_nobody_is_a_shortage() -> None:
    assert partition(manifest_of((1,)), []) == Shortage("a worker: none has joined yet", 0)


_MANIFESTS = st.builds(
    manifest_of,
    st.lists(st.integers(1, 9), min_size=1, max_size=12).map(tuple),
    st.integers(0, 9),
    st.integers(0, 9),
)
_MEMORIES = st.lists(st.integers(0, 60), min_size=1, max_size=6)


@given(_MANIFESTS, _MEMORIES)
def test_every_cut_is_a_pipeline_within_its_memory(manifest: Manifest, memories: list[int]) -> None:
    """Every layer once, in order; nobody over its memory; and what the checker says about it is nothing."""
    candidates = candidates_of(*memories)
    shares = partition(manifest, candidates)
    if isinstance(shares, Shortage):
        assert shares.text
        return
    covered = [layer for s in shares for layer in range(s.layers.first, s.layers.stop)]
    assert covered == list(range(manifest.num_layers))
    assert [s.candidate for s in shares] == sorted({s.candidate for s in shares})
    for share in shares:
        assert share.weight_bytes == weight_bytes(manifest, share.layers)
        assert share.weight_bytes + OVERHEAD_BYTES <= candidates[share.candidate].memory_bytes
    check_stages([planned_stage(manifest, s.layers, "cpu") for s in shares], manifest, "auto", len(shares))


@given(_MANIFESTS, _MEMORIES)
def test_a_model_that_one_worker_could_hold_is_never_short(manifest: Manifest, memories: list[int]) -> None:
    """However small the others are, if somebody could do it alone there is a plan."""
    whole = weight_bytes(manifest, LayerRange(0, manifest.num_layers))
    if any(n * MIB >= whole for n in memories):
        assert not isinstance(partition(manifest, candidates_of(*memories)), Shortage)


@given(_MANIFESTS, st.integers(1, 8))
def test_even_with_plenty(manifest: Manifest, num_workers: int) -> None:
    """With memory for everything everywhere, shares differ by one layer at most and nobody is left out needlessly."""
    shares = partition(manifest, candidates_of(*(1000,) * num_workers))
    assert isinstance(shares, list)
    sizes = [len(s.layers) for s in shares]
    assert len(sizes) == min(num_workers, manifest.num_layers)
    assert max(sizes) - min(sizes) <= 1


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
    hole = [Share(0, LayerRange(0, 3), 0), Share(1, LayerRange(4, 6), 0)]
    serving.join("w2")
    serving.take()
    monkeypatch.setattr("swarm.broker.wanted.partition", lambda *_: hole)
    with pytest.raises(StageSetError, match="gap"):
        serving.tick()
    assert serving.take() == []
