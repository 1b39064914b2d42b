"""One way of quantizing weights and activations in a swarm: what becomes of a worker that comes with another."""

from __future__ import annotations

import msgspec
import pytest

from swarm.testing import fake_manifest
from swarm.wire.messages import Denied, Order, Query, Setting, Vision, Welcome
from tests.unit.broker.bench import Bench, orders

INT4 = "int4, head int6, groups of 32, quantizer 1"


def knock(bench: Bench, name: str, weights: str = "", activations: str = "", **fields: object) -> Order:
    """A worker says Hello; whether it is let in. Its sizes follow from how its weights are quantized."""
    size = (1 << 20) - len(weights)
    sizes = {"layer_bytes": (size,) * 6, "embed_bytes": size, "head_bytes": size}
    manifest = msgspec.structs.replace(
        fake_manifest(), weights=weights, activations=activations, **(sizes | {"dtype": "bfloat16"} | fields)
    )
    worker = bench.add(name, manifest=manifest)
    hello = worker.hello(dtype=manifest.dtype, settings=(Setting("worker.dtype", '"auto"', "the default"),))
    (answer,) = [order for _, order in orders(bench.tell(name, hello)) if isinstance(order, Welcome | Denied)]
    return answer


@pytest.mark.parametrize(("weights", "activations"), [("", ""), (INT4, ""), (INT4, "int8"), ("Q4_K, decoder 1", "")])
def test_workers_that_agree_are_let_in(bench: Bench, weights: str, activations: str) -> None:
    assert isinstance(knock(bench, "w0", weights, activations), Welcome)
    assert isinstance(knock(bench, "w1", weights, activations), Welcome)
    assert bench.state.manifest is not None
    assert (bench.state.manifest.weights, bench.state.manifest.activations) == (weights, activations)


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        (INT4, "", f"weights are {INT4}, and this worker's plain bfloat16: set worker.weights (--weights), "),
        ("", INT4, f"weights are plain bfloat16, and this worker's {INT4}: set worker.weights"),
        (INT4, INT4.replace("32", "128"), "and this worker's int4, head int6, groups of 128, quantizer 1: set"),
        (INT4, INT4.replace("quantizer 1", "quantizer 2"), "for all workers, and install the same version"),
        ("Q4_K, Q6_K", "dense", "weights are Q4_K, Q6_K, and this worker's dense: set worker.weights"),
        ("Q4_K, decoder 1", "Q4_K, decoder 2", "and this worker's Q4_K, decoder 2: set worker.weights (--weights)"),
    ],
)
def test_other_weights_are_refused_with_both_and_the_remedy(bench: Bench, first: str, second: str, words: str) -> None:
    knock(bench, "w0", first)
    denied = knock(bench, "w1", second)
    assert isinstance(denied, Denied)
    assert denied.reason.startswith("this swarm's weights are ")
    assert words in denied.reason
    assert denied.dtype == ""
    assert [each.name for each in bench.state.newcomers.refused.values()] == ["w1"]


def test_other_activations_are_refused(bench: Bench) -> None:
    knock(bench, "w0", INT4)
    assert knock(bench, "w1", INT4, "int8") == Denied(
        reason="this swarm multiplies activations as bfloat16, and this worker as int8: set worker.activations to the "
        "same value for all workers"
    )


def test_other_weights_in_another_dtype_are_other_weights(bench: Bench) -> None:
    """To come back in the swarm's dtype would not help."""
    knock(bench, "w0", INT4)
    denied = knock(bench, "w1", dtype="float32")
    assert isinstance(denied, Denied)
    assert denied.dtype == ""
    assert "this worker's plain float32" in denied.reason


def test_the_same_weights_in_another_dtype_are_another_dtype(bench: Bench) -> None:
    knock(bench, "w0", INT4)
    denied = knock(bench, "w1", INT4, dtype="float32")
    assert isinstance(denied, Denied)
    assert denied.dtype == "bfloat16"


def test_another_model_is_another_model_however_it_is_quantized(bench: Bench) -> None:
    knock(bench, "w0", INT4)
    denied = knock(bench, "w1", vocab_size=98)
    assert isinstance(denied, Denied)
    assert denied.reason.startswith("this swarm serves another model: vocab_size")


@pytest.mark.parametrize("sees", [False, True])
def test_a_worker_with_or_without_the_tower_alone_is_refused(bench: Bench, sees: bool) -> None:
    vision = Vision(7, 8, 9, 16, 2, 1 << 12, 1 << 20, (0.5,) * 3, (0.5,) * 3, 3, 24)
    knock(bench, "w0", vision=vision if sees else None)
    words = "images, and this worker text only" if sees else "text only, and this worker images"
    assert knock(bench, "w1", vision=None if sees else vision) == Denied(
        reason=f"this swarm reads {words}: set worker.images to the same value for all workers"
    )


def test_a_worker_that_is_too_old_for_images_is_to_be_upgraded(bench: Bench) -> None:
    vision = Vision(7, 8, 9, 16, 2, 1 << 12, 1 << 20, (0.5,) * 3, (0.5,) * 3, 3, 24)
    knock(bench, "w0", vision=vision)
    manifest = msgspec.structs.replace(fake_manifest(), dtype="bfloat16")
    hello = bench.add("w1", manifest=manifest).hello(wire_versions=(2, 3), schema="of another version")
    ((_, denied),) = orders(bench.tell("w1", hello), Denied)
    assert denied == Denied(reason="this swarm reads images, for which this worker is too old: upgrade it")


def test_operators_see_how_weights_are_quantized(bench: Bench) -> None:
    knock(bench, "w0", INT4, "int8")
    (row,) = bench.ask(Query(what="nodes")).body["workers"]  # type: ignore[misc]
    assert (row["weights"], row["activations"]) == (INT4, "int8")
