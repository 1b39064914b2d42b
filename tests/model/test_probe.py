"""What the probe says of kernels: of made-up ones whose faults are known, and that everything goes by what it says."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.engine import kernel_report
from swarm.stage.engine.selfcheck import MemorySource
from swarm.stage.matmul import linears, proofs, raw_matmul, tiled
from swarm.stage.matmul.linears import PackedLinear, PlainLinear
from swarm.stage.matmul.probe import SIZES, Proof, multiply_in_tiles, prove, split_rows
from swarm.stage.matmul.raw_matmul import RawMatrix
from swarm.stage.matmul.tiled import TiledMatmul, is_discriminating, sample_matrix, torch_matmul
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.native import cores
from swarm.wire.messages import LayerRange
from tests.model.models import named_config, random_model

WIDTH = 8
ALL = Proof(SIZES, (1, 2))
NOTHING = Proof()

Fake = Callable[[torch.Tensor], torch.Tensor]


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Whatever numbers of threads a test before this one in the same process said it would compute with."""
    monkeypatch.setattr(cores, "_expected", set())
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A cache of its own, with nothing in it."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    proofs.clear()
    yield tmp_path / "proofs"
    proofs.clear()


def right(rows: torch.Tensor) -> torch.Tensor:
    """A kernel without faults: every operation on one number, rounded as the standard says."""
    return rows * 3 + 1


def tried(fake: Fake, numbers: tuple[int, ...] = (1, 2)) -> Proof:
    return prove(fake, (WIDTH,), WIDTH, dtype=torch.float32, work=WIDTH, numbers=numbers)


def by_rows(rows: torch.Tensor) -> torch.Tensor:
    return right(rows) * (1 + len(rows) * 1e-6)


def few_otherwise(rows: torch.Tensor) -> torch.Tensor:
    return right(rows) * (1 + 1e-6 * (len(rows) < 64))


def last_otherwise(rows: torch.Tensor) -> torch.Tensor:
    result = right(rows)
    result[-1] *= 1 + 1e-6
    return result


def odd_otherwise(rows: torch.Tensor) -> torch.Tensor:
    result = right(rows)
    result[1::2] *= 1 + 1e-6
    return result


def small_otherwise(rows: torch.Tensor) -> torch.Tensor:
    return odd_otherwise(rows) if len(rows) == 4 else right(rows)


def by_company(rows: torch.Tensor) -> torch.Tensor:
    scale = rows.abs().max()
    return right((rows / scale * 127).round() * scale / 127)


def by_threads(rows: torch.Tensor) -> torch.Tensor:
    return right(rows) * (1 + torch.get_num_threads() * 1e-6)


def large_by_threads(rows: torch.Tensor) -> torch.Tensor:
    return by_threads(rows) if len(rows) >= 64 else right(rows)


def rarely(rows: torch.Tensor) -> torch.Tensor:
    """One value in thousands shows the other order, as where 16 bits are kept."""
    result = right(rows)
    moved = (rows * 5003).long() % 5003 == 0
    return torch.where(moved & (torch.arange(len(rows)) % 4 == 0)[:, None], result * (1 + 1e-6), result)


@pytest.mark.parametrize(
    ("fake", "expected"),
    [
        (right, ALL),
        (by_rows, Proof((16,), (1, 2))),  # of single sizes, the largest that is good for few rows
        (few_otherwise, Proof((4, 16), (1, 2))),
        (small_otherwise, Proof(SIZES[1:], (1, 2))),
        (last_otherwise, NOTHING),
        (odd_otherwise, NOTHING),
        (by_company, NOTHING),
        (by_threads, Proof(SIZES, (2,))),
        (large_by_threads, Proof((4, 16), (1, 2))),  # rather smaller tiles than bits that depend on the threads
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_is_found_out(fake: Fake, expected: Proof) -> None:
    """Rows by number go into tiles; what depends on the place in a tile or on others in it is refused; a number of
    threads that matters is held fast."""
    before = torch.get_num_threads()
    assert tried(fake) == expected
    assert torch.get_num_threads() == before


def test_what_shows_rarely_is_found_out() -> None:
    """Where 16 bits are kept, one value in thousands shows another order of summing: so many are compared."""
    assert prove(rarely, (512,), 512, dtype=torch.float32, work=512, numbers=(1,)) == NOTHING
    assert prove(right, (512,), 512, dtype=torch.float32, work=512, numbers=(1,)).exact


def test_large_matrices_get_smaller_tiles() -> None:
    """What a probe costs is bounded: with so many multiplications for a row, few rows are tried, and used."""
    proof = prove(right, (WIDTH,), WIDTH, dtype=torch.float32, work=1 << 27, numbers=(1,))
    assert proof.sizes == (4, 16)


@pytest.mark.parametrize("sizes", [SIZES, (16,), (4, 16), (64, 256), (256,)], ids=str)
def test_any_number_of_rows_goes_into_tiles(sizes: tuple[int, ...]) -> None:
    """A kernel that needs fixed numbers of rows gets only those, and every row its own result; a tile is never filled
    with more than it holds, nor with many rows that there are not if a smaller one would do."""
    rows, seen = torch.randn(700, WIDTH), set()

    def fake(tile: torch.Tensor) -> torch.Tensor:
        seen.add(len(tile))
        return right(tile)

    for count in (0, 1, 2, 3, 4, 5, 15, 16, 17, 20, 33, 48, 49, 63, 64, 65, 100, 193, 255, 256, 257, 300, 519, 700):
        assert torch.equal(multiply_in_tiles(fake, (rows[:count],), sizes), right(rows[:count]))
        pieces = split_rows(count, sizes)
        assert sum(cut.count for cut in pieces) == count
        assert all(0 < cut.count <= cut.size for cut in pieces)
        assert all(cut.count > cut.size // 2 or cut.size in (4, 16, sizes[0]) for cut in pieces)
    assert seen <= set(sizes)


def test_tiles_begin_where_tensors_do() -> None:
    """Some kernels look at addresses: a tile from the middle of other rows is moved."""
    rows, seen = torch.randn(50, 7), []

    def watched(tile: torch.Tensor) -> torch.Tensor:
        seen.append(tile.data_ptr() % 64)
        return right(tile)

    multiply_in_tiles(watched, (rows[1:],), (4, 16))
    assert len(seen) > 2
    assert set(seen) == {0}


def test_it_is_called_as_the_proof_says(empty: Path) -> None:
    """In tiles, by the number of threads that was shown, whatever number computes around it; one that nothing was shown
    of is called once with all rows."""
    seen: list[tuple[int, int]] = []

    def watched(tile: torch.Tensor) -> torch.Tensor:
        seen.append((len(tile), torch.get_num_threads()))
        return by_threads(tile)

    shape = (WIDTH, WIDTH)
    torch.set_num_threads(2)
    product = TiledMatmul("fake", watched, shape, torch.float32)
    with_two = product(torch.ones(1, 3, WIDTH))
    seen.clear()
    with cores.computing(1, 300):
        assert torch.equal(product(torch.ones(1, 3, WIDTH)), with_two)
        product(torch.ones(20, WIDTH))
        assert torch.get_num_threads() == 1
    assert seen == [(4, 2), (16, 2), (4, 2)]
    assert product.tiling == "4/16/64/256 by 2 threads"

    seen.clear()
    hopeless = TiledMatmul("another", lambda tile: odd_otherwise(watched(tile)), shape, torch.float32)
    assert not hopeless.proof.exact
    seen.clear()
    hopeless(torch.ones(2, 37, WIDTH))
    assert seen == [(74, 2)]


# --- what was shown is kept -------------------------------------------------------------------------------------------


class Maker:
    """Makes a proof, and counts how often."""

    def __init__(self) -> None:
        self.made = 0

    def __call__(self) -> Proof:
        self.made += 1
        return ALL


def recalled(maker: Maker, name: tuple[object, ...] = ("fake", 8)) -> int:
    """How often it has been made after another request."""
    assert proofs.get_proof(name, maker) == ALL
    return maker.made


def test_a_proof_is_made_once(empty: Path) -> None:
    """In a process, and for the next one; another kernel has its own."""
    maker = Maker()
    assert [recalled(maker), recalled(maker)] == [1, 1]
    proofs.clear()
    assert recalled(maker) == 1
    assert recalled(maker, ("fake", 9)) == 2


@pytest.mark.parametrize(
    "changed",
    [
        lambda patch: patch.setattr(proofs, "_processor", lambda: ("model name: another",)),
        lambda patch: patch.setattr(proofs, "_cache_sizes", lambda: ("64K",)),
        lambda patch: patch.setattr(torch, "__version__", "9.9"),
        lambda patch: patch.setattr(proofs, "_VERSION", proofs._VERSION + 1),
        lambda patch: patch.setenv("ONEDNN_MAX_CPU_ISA", "SSE41"),
        lambda patch: patch.setenv("ATEN_CPU_CAPABILITY", "whatever"),
    ],
    ids=["processor", "caches", "torch", "probe", "oneDNN", "ATen"],
)
def test_another_machine_makes_its_own(changed: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder may be on several machines, and torch may be another one tomorrow."""
    maker = Maker()
    recalled(maker)
    changed(monkeypatch)
    proofs.clear()
    assert recalled(maker) == 2


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", "null", '{"of": "something else"}', "\x00", "[" * 5000, '"sizes"'],
)
def test_a_damaged_file_is_made_again(content: str, empty: Path) -> None:
    """It is no error, and the next process finds a whole one."""
    maker = Maker()
    recalled(maker)
    (path,) = empty.iterdir()
    whole = path.read_text()
    for damaged in (content, whole[:-3], whole.replace("16", "17"), whole.replace("[1, 2]", '["x"]')):
        path.write_text(damaged)
        proofs.clear()
        before = maker.made
        assert recalled(maker) == before + 1
        assert path.read_text() == whole
    assert [path] == list(empty.iterdir())


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Then the proof holds for this process."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path / "file"))
    proofs.clear()
    maker = Maker()
    assert [recalled(maker), recalled(maker)] == [1, 1]
    proofs.clear()
    assert recalled(maker) == 2


def test_where_proofs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """As everything that Swarm keeps for the user: SWARM_CACHE first, then XDG_CACHE_HOME, then ~/.cache."""
    monkeypatch.setenv("SWARM_CACHE", "/a")
    monkeypatch.setenv("XDG_CACHE_HOME", "/b")
    assert proofs.folder() == Path("/a/proofs")
    monkeypatch.delenv("SWARM_CACHE")
    assert proofs.folder() == Path("/b/swarm/proofs")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert proofs.folder() == Path.home() / ".cache/swarm/proofs"


# --- what multiplies --------------------------------------------------------------------------------------------------


def test_numbers_that_are_alike_show_nothing(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A matrix of zeros has the same product in any order: another one of its shape is tried in its place."""
    assert is_discriminating(torch.randn(96, 64))
    assert is_discriminating(sample_matrix((1000, 64), torch.bfloat16))
    assert not is_discriminating(torch.zeros(96, 64))
    monkeypatch.setattr(functional, "linear", lambda rows, weight, bias: odd_otherwise(rows @ weight.T))
    assert not torch_matmul(torch.zeros(96, 64), None).proof.exact
    assert not torch_matmul(torch.zeros(64, 96).T, torch.zeros(96)).proof.exact


@pytest.mark.parametrize("kernel", [PackedLinear, PlainLinear])
def test_a_kernel_that_cannot_be_shown_exact_says_so(kernel: Any, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And multiplies all the same."""
    if not kernel.supports(torch.device("cpu"), torch.float32):
        pytest.skip("torch has no oneDNN on this machine")
    monkeypatch.setattr(tiled, "prove", lambda *_, **__: NOTHING)
    weight, rows = torch.randn(96, 64), torch.randn(5, 64)
    module = kernel(weight, None)
    assert not module.exact
    assert torch.allclose(module(rows), rows @ weight.T, atol=1e-4)


def test_matrices_that_modules_multiply_by_themselves(empty: Path) -> None:
    """Every way to multiply rows by them computes the same in tiles, also after the module gave it another form."""
    weight, bias, rows = torch.randn(24, 32), torch.randn(24), torch.randn(2, 9, 32)
    matrix = RawMatrix.wrap(weight)
    expected = rows @ weight.T
    flat, inputs_first = rows.view(-1, 32), RawMatrix.wrap(weight.T.contiguous())
    with torch.inference_mode():
        ways = [
            functional.linear(rows, matrix),
            functional.linear(rows, weight=matrix, bias=bias) - bias,
            functional.linear(rows, matrix, bias) - bias,
            rows @ matrix.T,
            torch.matmul(rows, matrix.t()),
            torch.mm(flat, matrix.float().transpose(0, 1)).view_as(expected),
            torch.addmm(bias, flat, matrix.T).view_as(expected) - bias,
            torch.addmm(bias, flat, inputs_first).view_as(expected) - bias,
            rows @ inputs_first,
        ]
    for result in ways:
        assert type(result) is torch.Tensor
        assert torch.allclose(result, expected, atol=1e-5)
    assert not matrix.doubts
    assert matrix.shape == weight.shape
    assert copy.deepcopy(matrix) is matrix
    assert (
        len(list(empty.iterdir())) == 4
    )  # with the inputs first and last, with a bias and without: so they went through a probe


def test_what_else_is_computed_with_such_a_matrix_is_doubted() -> None:
    """Nothing shows that its bits don't depend on the number of rows."""
    matrix = RawMatrix.wrap(torch.randn(24, 32))
    result = torch.einsum("oi,ni->no", matrix, torch.randn(3, 32))
    assert type(result) is torch.Tensor
    assert matrix.doubts == {"einsum"}
    assert (matrix.double() * torch.ones(32)).shape == (24, 32)
    assert matrix.doubts == {"einsum", "mul"}


def test_a_bare_product_that_cannot_be_shown_exact_is_doubted(empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As any other kernel's."""
    monkeypatch.setattr(tiled, "prove", lambda *_, **__: NOTHING)
    matrix = RawMatrix.wrap(torch.randn(24, 32))
    functional.linear(torch.randn(3, 32), matrix)
    assert matrix.doubts == {"product"}


# --- what a worker says -----------------------------------------------------------------------------------------------


def stage_of(kind: str) -> tuple[ModelSkeleton, Stage]:
    config = named_config(kind)
    skeleton = ModelSkeleton(config, torch.device("cpu"), torch.float32)
    weights = WeightLoader(skeleton, MemorySource(random_model(config).state_dict()), lambda _: None)
    return skeleton, Stage(skeleton, LayerRange(0, 2), {}, weights)


def said(kind: str) -> str:
    skeleton, stage = stage_of(kind)
    return kernel_report.describe_kernels(skeleton, stage.modules.values())


@pytest.fixture
def without_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_refusals", ["to see torch's"])


def test_a_worker_names_its_tiles(without_own: None, empty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And says exact where all that it multiplies was shown to be."""
    monkeypatch.setattr(tiled, "prove", lambda *_, **__: Proof((16, 64), (1, 2)))
    monkeypatch.setattr(attention, "prove", lambda *_, **__: Proof((16,), (1, 2)))
    assert "in tiles of 16/64; attention torch" in said("llama")
    assert said("llama").partition(" (")[0].endswith("float32, exact")


@pytest.mark.parametrize(
    ("kind", "spoilt"),
    [
        ("llama", lambda name: "with bias" not in name and "attention" not in name),
        ("llama", lambda name: name.startswith("attention")),
        ("qwen2", lambda name: "with bias" in name),
        ("mixtral", lambda name: name == "torch"),
    ],
    ids=["products", "attention", "products with a bias", "experts"],
)
def test_a_worker_says_what_is_not_exact(
    kind: str, spoilt: Callable[[str], bool], without_own: None, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One kernel that no probe could show to be exact, and the worker doesn't say exact."""
    monkeypatch.setattr(
        proofs, "get_proof", lambda name, make: NOTHING if spoilt(str(name[0])) else Proof((16,), (1, 2))
    )
    assert "inexact" in said(kind)


def test_a_worker_says_what_is_doubted(without_own: None, empty: Path) -> None:
    """A router that computes something else with its matrix."""
    skeleton, stage = stage_of("mixtral")
    modules = list(stage.modules.values())
    routers = [matrix for root in modules for module in root.modules() for matrix in raw_matmul.raw_matrices(module)]
    assert len(routers) == 2
    before = kernel_report.describe_kernels(skeleton, modules)
    routers[0].doubts.add("einsum")
    assert "inexact" in kernel_report.describe_kernels(skeleton, modules)
    routers[0].doubts.clear()
    assert kernel_report.describe_kernels(skeleton, modules) == before


def test_fused_products_are_taken_where_they_are_as_exact(
    without_own: None, empty: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where only the plain product can be shown to be exact, function and product stay outside of the kernel."""
    if not PackedLinear.supports(torch.device("cpu"), torch.float32):
        pytest.skip("torch has no oneDNN on this machine")
    for spoilt, fused in (("nothing", True), ("swish", False), ("times", False), ("oneDNN", False)):
        monkeypatch.setattr(
            proofs,
            "get_proof",
            lambda name, make, what=spoilt: NOTHING if what in str(name[0]) else Proof((16,), (1, 2)),
        )
        _, stage = stage_of("llama")
        kinds = {type(module).__name__ for root in stage.modules.values() for module in root.modules()}
        assert ("GatedMlp" in kinds) == fused, spoilt
        assert kernel_report.describe_kernels(*said_of(stage)).partition(" (")[0].endswith("exact")
        assert "inexact" not in kernel_report.describe_kernels(*said_of(stage))


def said_of(stage: Stage) -> tuple[ModelSkeleton, Any]:
    return ModelSkeleton(named_config("llama"), torch.device("cpu"), torch.float32), stage.modules.values()


def test_sequences_share_a_product_only_where_that_was_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each attends by itself; where that can't be shown to be exact either, they share it, and the worker says
    so."""
    parts = torch.randn(3, 4, 16), torch.randn(3, 2, 16), torch.randn(3, 2, 16)
    for spoilt, exact, together in (("nothing", True, True), ("of 3", True, False), ("attention", False, False)):
        monkeypatch.setattr(
            proofs,
            "get_proof",
            lambda name, make, what=spoilt: NOTHING if what in str(name[0]) else Proof((16,), (1, 2)),
        )
        proof, shared = attention.prove_attention(*parts)
        assert (proof.exact, shared) == (exact, together)


def test_the_kernels_of_this_machine_are_tried(empty: Path) -> None:
    """With nothing known, loading a stage makes proofs; with what it left, the next one makes none."""
    for kind in ("llama", "mixtral", "gpt_oss"):
        with native.disabled("to try torch's"):
            said(kind)
    kept = {path.name for path in empty.iterdir()}
    assert len(kept) >= 8
    proofs.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "prove", lambda *_, **__: pytest.fail("was made again"))
        patch.setattr(attention, "prove", lambda *_, **__: pytest.fail("was made again"))
        for kind in ("llama", "mixtral", "gpt_oss"):
            with native.disabled("to try torch's"):
                said(kind)
    assert {path.name for path in empty.iterdir()} == kept


def test_float16_is_multiplied_in_tiles(without_own: None) -> None:
    """What no kernel of ours serves goes the same way."""
    module = linears.build_linear(
        linears.choose_kernel(torch.device("cpu"), torch.float16), torch.randn(64, 32).half(), None
    )
    assert isinstance(module, PlainLinear)
    assert module.exact == any(module.tiling)
