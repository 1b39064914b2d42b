"""Which of our own kernels computes, and whose bits are told."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from swarm.errors import ConfigError
from swarm.stage import native
from swarm.stage.engine import kernel_report, portability
from swarm.stage.matmul import proofs
from swarm.stage.model.build import ModelSkeleton
from swarm.stage.native import variant_choice
from tests.model.models import llama_config

CPU = torch.device("cpu")

needs_library = pytest.mark.skipif(native.library() is None, reason=f"no native kernels: {native.unavailable_reason()}")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Choices are the process's: other tests shall not see these."""
    before = native.variant()
    monkeypatch.setattr(native, "_refusals", [])
    yield
    monkeypatch.undo()
    opened = native.library()
    if before and opened is not None:
        native.use_variant(opened, before)


def here() -> list[str]:
    opened = native.library()
    assert opened is not None
    return native.variants(opened)


@needs_library
def test_the_quickest_is_chosen() -> None:
    """Of all, or of those with portable bits; or the one that is named."""
    for bits in ("auto", "fast"):
        variant_choice.select_kernels("auto", bits)
        assert native.variant() == here()[0]
    variant_choice.select_kernels("auto", "portable")
    assert native.variant() == next(name for name in here() if name in variant_choice.PORTABLE)
    for name in here():
        variant_choice.select_kernels(name, "auto")
        assert native.variant() == name


@needs_library
def test_what_the_processor_lacks_is_an_error() -> None:
    """It names what the processor has."""
    absent = next(name for name in ("neon", "avx2") if name not in here())
    with pytest.raises(ConfigError) as caught:
        variant_choice.select_kernels(absent, "auto")
    assert f"worker.kernels = {absent!r} can't run on this processor" in str(caught.value)
    assert all(name in str(caught.value) for name in here())


@needs_library
def test_one_that_fails_its_proof_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """The quickest of the others computes, for whoever leaves the choice; whoever asked for it by name is told why it
    can't be had."""
    if len(here()) < 3:
        pytest.skip("this processor runs one variant beside plain C; the next test has that case")
    first, honest = here()[0], native._prove_variant
    monkeypatch.setattr(native, "_rejected", [])
    monkeypatch.setattr(
        native, "_prove_variant", lambda opened, name: "it is wrong" if name == first else honest(opened, name)
    )
    for bits in ("auto", "fast", "portable"):
        variant_choice.select_kernels("auto", bits)
        assert native.variant() == next(
            name for name in here()[1:] if bits != "portable" or name in variant_choice.PORTABLE
        )
    variant_choice.select_kernels("auto", "auto")
    assert native.rejected_variants() == f"{first}: it is wrong"
    with pytest.raises(ConfigError, match="it is wrong"):
        variant_choice.select_kernels(first, "auto")


@needs_library
@pytest.mark.parametrize("wrong", ["", "it is wrong"])
def test_portable_c_is_for_who_asks_for_it(monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    """On a processor that runs nothing else, or where all others fail, torch's kernels are the quicker ones."""
    found = ["avx2", "portable"] if wrong else ["portable"]
    monkeypatch.setattr(native, "variants", lambda opened: found)
    monkeypatch.setattr(native, "_prove_variant", lambda opened, name: wrong if name != "portable" else "")
    monkeypatch.setattr(native, "_rejected", [])
    variant_choice.select_kernels("auto", "auto")
    assert native.library() is None
    assert "portable C kernels work here, and torch's are faster" in native.unavailable_reason()
    assert ("avx2: it is wrong" in native.unavailable_reason()) is bool(wrong)
    for named, bits in (("portable", "auto"), ("auto", "portable")):
        monkeypatch.setattr(native, "_refusals", [])
        variant_choice.select_kernels(named, bits)
        assert native.variant() == "portable"


@needs_library
def test_bits_that_a_kernel_does_not_have_are_an_error() -> None:
    """However the two settings came together."""
    for name in here():
        if name not in variant_choice.PORTABLE:
            with pytest.raises(ConfigError, match="has bits of its own"):
                variant_choice.select_kernels(name, "portable")


def test_without_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves the choice gets torch's kernels; who asks for ours or for portable bits is told why there are none."""
    monkeypatch.setattr(native, "_refusals", ["nothing was built"])
    variant_choice.select_kernels("auto", "auto")
    for named, bits, asked in (("avx2", "auto", "worker.kernels = 'avx2'"), ("auto", "portable", "worker.bits")):
        with pytest.raises(ConfigError, match=rf"{asked}.* nothing was built"):
            variant_choice.select_kernels(named, bits)
    with pytest.raises(ConfigError, match=r"is not possible for this model.* nothing was built"):
        variant_choice.require_portable(own=False)
    variant_choice.require_portable(own=True)


def test_torch_is_taken_at_its_word() -> None:
    """Then there are no kernels of our own in this process."""
    variant_choice.select_kernels("torch", "auto")
    assert native.library() is None
    assert native.unavailable_reason() == "worker.kernels is torch"


def told(dtype: torch.dtype, *left: str) -> tuple[str, str]:
    skeleton = ModelSkeleton(llama_config(), CPU, dtype)
    text = kernel_report.describe_kernels(skeleton, (), left)
    return text, kernel_report.describe_bits(skeleton, left)


@needs_library
def test_whose_bits_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels of the portable family have equal bits, whichever it is; a dtype, other kernels and what is left to torch
    make others, the last on every make of machine. In float32, all of ours have those of the family."""
    for name in here():
        variant_choice.select_kernels(name, "auto")
        text, bits = told(torch.float32)
        assert f"linears native {name};" in text
        assert ("portable bits;" in text, bits) == (True, "portable bits, torch.float32")
        text, bits = told(torch.bfloat16)
        assert (bits == "portable bits, torch.bfloat16") is (name in variant_choice.PORTABLE)
        assert ("portable bits;" if name in variant_choice.PORTABLE else f"; bits of {name};") in text
    variant_choice.select_kernels("portable", "auto")
    text, bits = told(torch.float32, "bmm", "softmax")
    assert "portable bits but for torch's bmm, softmax;" in text
    assert bits.endswith(f", on machines of make {proofs.machine_id()}")
    assert bits == told(torch.float32, "bmm")[1], "another stage, which leaves less to torch, computes alike"
    variant_choice.select_kernels("torch", "auto")
    text, bits = told(torch.float32)
    assert "; bits of torch;" in text
    monkeypatch.setattr(proofs, "machine", lambda: ("another",))
    assert told(torch.float32)[0] == text
    assert told(torch.float32)[1] != bits


Operation = Any


@pytest.mark.parametrize(
    ("operation", "found"),
    [
        (lambda x: (x * 2.0 + x) / (x - 0.5), set()),
        (lambda x: torch.cat((-x[..., 1:], x[..., :1]), dim=-1).to(torch.bfloat16), set()),
        (lambda x: (x > 0).cumsum(-1), set()),
        (lambda x: torch.topk(x, 2), set()),
        (lambda x: x.softmax(-1), {"softmax"}),
        (lambda x: torch.nn.functional.linear(x, x), {"linear"}),
        (lambda x: torch.rsqrt(x.pow(2).mean(-1)), {"pow", "mean", "rsqrt"}),
        (lambda x: torch.tanh(x).sum(), {"tanh", "sum"}),
    ],
    ids=["arithmetic", "moves", "whole numbers", "choices", "softmax", "product", "norm", "curve"],
)
def test_operations_with_the_processors_bits(operation: Operation, found: set[str]) -> None:
    """What every processor rounds alike is not named; what it sums or approximates in its own way is."""
    x = torch.randn(4, 4)
    with torch.inference_mode(), portability.watch_operations() as seen:
        operation(x)
    assert {name.lstrip("_") for name in seen} == found


@pytest.mark.parametrize("what", ["torch", "transformers", "swarm", "C"])
def test_the_code_has_another_name_after_an_upgrade(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    """What is on disk outlives it, and other code may have other bits under the same name of bits."""
    before = kernel_report.describe_code()
    if what == "C":
        other = types.SimpleNamespace(swarm_native_sources=lambda: b"other sources")
        monkeypatch.setattr(native, "open_library", lambda: (other, ""))
    elif what == "swarm":
        monkeypatch.setattr(kernel_report, "__version__", "99")
    else:
        monkeypatch.setattr(getattr(kernel_report, what), "__version__", "99")
    assert kernel_report.describe_code() != before
