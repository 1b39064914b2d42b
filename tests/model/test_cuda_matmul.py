"""Products by Triton's kernels: the right numbers, and a row's bits whatever other rows there are."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from swarm.stage.matmul import probe, proofs, triton_products
from swarm.stage.matmul.probe import HEIGHTS
from swarm.stage.matmul.triton_products import TritonLinear, TritonProduct
from swarm.stage.native.adapters import LowRank, RowAdapters, Site, using_adapters
from swarm.stage.quantization import gguf_formats
from swarm.stage.quantization.at_load import own_format
from swarm.stage.quantization.formats import WeightFormat, gpu_bytes
from tests.model.kernels_in_triton import DEVICE, HAS_CUDA, MARKS, matmul, quantized
from tests.model.quantized import all_formats, random_tensor, weight_of

pytestmark = MARKS
PlainMatrix, multiply, pack = matmul.PlainMatrix, matmul.multiply, quantized.pack
# Relative to the largest result.
TOLERANCES = {torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 5e-4}
KNOWN_FORMATS = [
    *gguf_formats.FORMATS.values(),
    own_format("int4", 32),
    own_format("int8", 64),
    own_format("int6", 128),
]


def randn(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.fixture(autouse=True)
def _few_probed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter is slow, and its products have one order of summation."""
    if not HAS_CUDA:
        monkeypatch.setattr(probe, "_MAX_ROWS", 1)
        monkeypatch.setattr(probe, "_NUM_COMPARED", 1)


@pytest.fixture
def empty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A cache of proofs of its own, with nothing in it."""
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    proofs.clear()
    yield
    proofs.clear()


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_those_of_float64(dtype: torch.dtype, has_bias: bool) -> None:
    """Of shapes that fill no tile and no block; also of a matrix that is stored with its inputs first."""
    rows, weight, bias = (
        randn(21, 650, dtype=dtype),
        randn(70, 650, dtype=dtype, seed=2),
        randn(70, dtype=dtype, seed=3),
    )
    expected = rows.double() @ weight.double().T + (bias.double() if has_bias else 0)
    for matrix in (PlainMatrix(weight), PlainMatrix(weight.T.contiguous().T)):
        result = multiply(rows, matrix, bias if has_bias else None, height=16)
        assert result.dtype == dtype
        assert (result.double() - expected).abs().max() <= TOLERANCES[dtype] * expected.abs().max()


def test_a_row_has_the_same_bits_in_any_crowd() -> None:
    """Alone and among up to 200 rows, at any place, in tiles of any height, in splits together or apart."""
    rows, matrix, bias = (
        randn(200, 600, dtype=torch.bfloat16),
        PlainMatrix(randn(48, 600, dtype=torch.bfloat16)),
        randn(48),
    )
    product = TritonProduct(matrix, bias, torch.bfloat16)
    assert product.proof.exact
    alone = torch.cat([multiply(row[None], matrix, bias, height=product.heights[0]) for row in rows[:9]])
    for height in product.heights:
        for by_split in (True, False):
            assert torch.equal(multiply(rows, matrix, bias, height=height, by_split=by_split)[:9], alone)
    for count in (1, 17, 65, 200):
        crowd = rows[:count].flip(0)  # so that the first rows are at other places
        assert torch.equal(product(crowd).flip(0)[:9], alone[:count]), count


def test_results_of_no_rows_and_of_rows_with_gaps() -> None:
    """Rows may be a part of wider ones, and there may be none."""
    wide, matrix = randn(5, 96), PlainMatrix(randn(33, 64))
    assert multiply(wide[:0, :64], matrix, height=16).shape == (0, 33)
    assert torch.equal(
        multiply(wide[:, :64], matrix, height=16), multiply(wide[:, :64].contiguous(), matrix, height=16)
    )
    with pytest.raises(ValueError, match="rows of 96 for a matrix of 64 inputs"):
        multiply(wide, matrix, height=16)


def decode(form: WeightFormat, dtype: torch.dtype, *, ordered: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights that a product reads, from rows with a single 1, and those of the CPU's decoding."""
    tensor = random_tensor(form, 19, 300, ordered=ordered)
    packed = pack(weight_of(tensor), DEVICE)
    identity = torch.eye(300, dtype=dtype, device=DEVICE)
    return multiply(identity, packed, height=128).T.cpu(), tensor.dequantize(dtype)


@pytest.mark.parametrize("form", all_formats(), ids=lambda form: f"{form.name} {bool(form.table)}")
def test_all_formats_decode_as_on_a_cpu(form: WeightFormat) -> None:
    """To the same numbers: each weight is rounded once."""
    found, expected = decode(form, torch.bfloat16)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", KNOWN_FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_known_formats_decode_in_other_dtypes(form: WeightFormat, dtype: torch.dtype) -> None:
    """Also with inputs in an order of their own, as GPTQ stores them."""
    found, expected = decode(form, dtype, ordered=True)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("form", KNOWN_FORMATS, ids=lambda form: form.name)
def test_a_packed_matrix_has_the_size_that_is_counted(form: WeightFormat) -> None:
    """As plans count a GPU's memory."""
    for inputs in (128, 300, 2048):
        packed = pack(weight_of(random_tensor(form, 7, inputs)), DEVICE)
        arrays = (packed.numbers, packed.scales, packed.minima, packed.group_scales, packed.group_minima)
        assert sum(array.nbytes for array in arrays if array is not None) == gpu_bytes(form, 7, inputs)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_K"])
def test_quantized_products_are_exact(name: str, empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same probe as plain ones; their numbers are those of the decoded matrix."""
    if not HAS_CUDA:
        monkeypatch.setattr(triton_products, "HEIGHTS", (16, 64))
    tensor = random_tensor(gguf_formats.FORMATS[name], 40, 560)
    product = TritonProduct(pack(weight_of(tensor), DEVICE), None, torch.bfloat16)
    assert product.proof.exact
    rows = randn(70, 560, dtype=torch.bfloat16)
    assert torch.equal(product(rows)[3:4], product(rows[3:4]))
    expected = rows.double() @ tensor.dequantize(torch.bfloat16).to(DEVICE).double().T
    assert (product(rows).double() - expected).abs().max() <= TOLERANCES[torch.bfloat16] * expected.abs().max()


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_CUDA, reason="no CUDA device here")
@pytest.mark.parametrize("shape", [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336), (128256, 4096)], ids=str)
@pytest.mark.parametrize("kind", ["plain", "Q4_K", "Q8_0"])
def test_matrices_of_large_models_are_exact_on_a_gpu(shape: tuple[int, int], kind: str, empty: None) -> None:
    """The probe finds heights that agree, for few rows and for many."""
    outputs, inputs = shape
    if kind == "plain":
        matrix: Any = PlainMatrix(torch.randn(outputs, inputs, dtype=torch.bfloat16, device=DEVICE))
    else:
        matrix = pack(weight_of(random_tensor(gguf_formats.FORMATS[kind], outputs, inputs)), DEVICE)
    product, rows = TritonProduct(matrix, None, torch.bfloat16), randn(300, inputs, dtype=torch.bfloat16)
    assert product.proof.exact
    assert product.heights[-1] == HEIGHTS[-1], product.heights
    for count in (1, 64, 300):
        assert torch.equal(product(rows[:count])[0], product(rows[:1])[0])


@pytest.mark.parametrize(
    ("wrong", "sizes"), [({"height": 16}, (64, 128)), ({"height": 128}, (16, 64)), ({"by_split": True}, ())]
)
def test_the_probe_keeps_what_agrees(
    wrong: dict[str, Any], sizes: tuple[int, ...], empty: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heights with other bits are not used; without agreement, the product is used and called inexact."""

    def otherwise(rows: torch.Tensor, *args: Any, **how: Any) -> torch.Tensor:
        result = multiply(rows, *args, **how)
        return result * 1.01 if wrong.items() <= how.items() else result

    if not HAS_CUDA:
        monkeypatch.setattr(matmul, "multiply", otherwise)
        product = TritonProduct(PlainMatrix(randn(40, 64)), None, torch.float32)
        assert product.proof.sizes == sizes
        assert product.heights == (sizes or HEIGHTS)


def test_a_matrix_without_content_is_probed_with_another(empty: None) -> None:
    """Equal numbers would hide another order of summation."""
    for matrix in (
        PlainMatrix(torch.zeros(24, 64, device=DEVICE)),
        pack(weight_of(random_tensor(gguf_formats.FORMATS["Q4_0"], 24, 64)), DEVICE).with_numbers(
            torch.zeros(24, 64, dtype=torch.uint8, device=DEVICE)
        ),
    ):
        product = TritonProduct(matrix, None, torch.float32)
        trial = product._trial()
        assert isinstance(trial, (PlainMatrix, quantized.PackedMatrix))
        assert len(trial.numbers.unique()) > 16
        assert product.proof.exact


def test_another_compiler_needs_another_proof(empty: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may choose other instructions."""
    probed = []
    monkeypatch.setattr(triton_products, "prove", lambda *_, **how: probed.append(how) or probe.Proof((16,), (1,)))
    for version, num_probed in (("3.9.0", 1), ("3.9.0", 1), ("3.10.0", 2)):
        monkeypatch.setattr("triton.__version__", version)
        assert TritonProduct(PlainMatrix(randn(24, 64)), None, torch.float32).proof.exact
        assert len(probed) == num_probed


def adapted_linear(weight: torch.Tensor) -> tuple[TritonLinear, dict[str, torch.Tensor]]:
    """Return a product of two modules with two adapters, and the merged matrices by adapter."""
    linear, outputs = TritonLinear(weight, None), len(weight) // 2
    linear.sites = ((Site("first", 0, outputs), Site("second", 0, outputs)),)
    merged = {"": weight.double()}
    for seed, (name, modules) in enumerate({"both": ("first", "second"), "one": ("second",)}.items()):
        parts = {
            module: LowRank(
                randn(5, weight.shape[1], dtype=weight.dtype, seed=seed + at).cpu(),
                randn(outputs, 5, dtype=weight.dtype, seed=seed + 5 + at).cpu(),
                0.5,
            )
            for at, module in enumerate(modules)
        }
        assert linear.add_adapter(name, {**parts, "elsewhere": parts[modules[0]]}) == set(modules)
        whole = weight.double().clone()
        for module, part in parts.items():
            first = 0 if module == "first" else outputs
            whole[first : first + outputs] += 0.5 * (part.up.double() @ part.down.double()).to(DEVICE)
        merged[name] = whole
    return linear, merged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_add_what_merged_weights_give(dtype: torch.dtype) -> None:
    """Each row has the bits that it has alone, and a row without an adapter those of the plain product."""
    linear, merged = adapted_linear(randn(40, 64, dtype=dtype))
    rows, names = randn(6, 64, dtype=dtype, seed=9), ("both", "", "one", "both", "", "one")
    with using_adapters(RowAdapters.of(names, [1] * 6)):
        results = linear(rows)
    for row, name, result in zip(rows, names, results, strict=True):
        expected = merged[name] @ row.double()
        assert (result.double() - expected).abs().max() < TOLERANCES[dtype] * expected.abs().max()
        with using_adapters(RowAdapters.of([name], [1])):
            assert torch.equal(linear(row[None])[0], result)
    assert torch.equal(results[1], linear(rows)[1])
    with using_adapters(RowAdapters.of(names, [1] * 6)), pytest.raises(ValueError, match="a product of 5 rows"):
        linear(rows[:5])
    linear.keep_adapters({"one"})
    assert set(linear.adapters) == {"one"}


class _Kernels:
    """Kernels that were called, in the place of one function's: what each was compiled for."""

    def __init__(self, function: Any) -> None:
        self._function, self.called = function, set[tuple[Any, ...]]()

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def call(*args: Any, **constants: Any) -> None:
            dtypes = tuple(each.dtype for each in args if isinstance(each, torch.Tensor))
            self.called.add((dtypes, args[-10:-8], *constants.items()))
            self._function[grid](*args, **constants)

        return call


def test_an_adapter_brings_its_kernels_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step waits until they are compiled, whatever its number of rows."""
    if not HAS_CUDA:
        monkeypatch.setattr(triton_products, "HEIGHTS", (16, 64))
    kernels = _Kernels(matmul._multiply)
    monkeypatch.setattr(matmul, "_multiply", kernels)
    linear, _ = adapted_linear(randn(40, 640, dtype=torch.bfloat16))
    prepared = set(kernels.called)
    ways = [(dict(kernel[2:]), kernel[0][1]) for kernel in prepared if kernel[1] == (40, 640)]
    compiled = {(how["ROWS"], how["BY_SPLIT"]) for how, dtype in ways if dtype == torch.float32}
    assert compiled == set(itertools.product(linear._product.heights, (False, True)))
    for count in (1, 40):
        with using_adapters(RowAdapters.of(["both", "one", ""], [count, 1, 1])):
            linear(randn(count + 2, 640, dtype=torch.bfloat16))
    assert kernels.called == prepared


def test_rows_of_adapters_are_copied_once_for_a_step() -> None:
    rows = RowAdapters.of(["b", "", "a", "b"], [2, 1, 3, 1])
    assert rows is not None
    assert [rows.rows(index, DEVICE).tolist() for index in range(2)] == [[0, 1, 6], [3, 4, 5]]
    first, second = (rows.rows(index, DEVICE).untyped_storage().data_ptr() for index in range(2))
    assert first == second
