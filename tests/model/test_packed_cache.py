"""The cache of packed matrices: the second load packs nothing and gives the same bits."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from swarm.stage import native
from swarm.stage.native import packed_cache
from swarm.stage.native.quantized import QuantizedLinear
from swarm.stage.quantization.at_load import INT4, own_format
from swarm.stage.quantization.quantize import quantize
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight

pytestmark = pytest.mark.skipif(native.library() is None, reason="needs our kernels")

ROWS = torch.randn(3, 128, generator=torch.Generator().manual_seed(2))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("SWARM_CACHE", str(tmp_path))
    packed_cache.configure(1 << 30)
    yield tmp_path / "packed"
    packed_cache.configure(0)


class Source:
    """A matrix that counts how often it is read."""

    def __init__(self, key: str = "a key", seed: int = 1) -> None:
        self.num_reads = 0
        form = own_format(INT4, 32)
        weights = torch.randn(128, 128, generator=torch.Generator().manual_seed(seed))
        self._tensor = quantize(weights, form)
        self.weight = QuantizedWeight(form, self._tensor.shape, key, self._read)

    def _read(self) -> QuantizedTensor:
        self.num_reads += 1
        return self._tensor

    def product(self) -> torch.Tensor:
        result: torch.Tensor = QuantizedLinear(self.weight, None, torch.float32)(ROWS)
        gc.collect()  # matrices in use are shared, so that this one would not be loaded again
        return result


def test_a_matrix_is_packed_once(folder: Path) -> None:
    source = Source()
    first = source.product()
    assert len(list(folder.iterdir())) == 1
    assert torch.equal(source.product(), first)
    assert source.num_reads == 1


def test_another_key_or_another_library_is_another_matrix(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Source().product()
    other = Source("another key", seed=3)
    other.product()
    assert other.num_reads == 1
    monkeypatch.setattr(packed_cache, "_layout", lambda: "other sources")
    again = Source()
    again.product()
    assert again.num_reads == 1
    assert len(list(folder.iterdir())) == 3


def test_a_matrix_without_identity_is_not_cached(folder: Path) -> None:
    source = Source(key="")
    assert torch.equal(source.product(), source.product())
    assert source.num_reads == 2
    assert not folder.exists()


def test_damage_costs_packing_only(folder: Path) -> None:
    source = Source()
    first = source.product()
    (path,) = folder.iterdir()
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert torch.equal(source.product(), first)
    assert torch.equal(source.product(), first)
    assert source.num_reads == 2


def test_without_a_place_for_files_matrices_stay_in_memory(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As on a read-only disk: one line in the log, and everything works."""
    folder.touch()
    source = Source()
    assert torch.equal(source.product(), source.product())
    assert source.num_reads == 2


def test_a_cache_of_no_bytes_is_none(folder: Path) -> None:
    packed_cache.configure(0)
    Source().product()
    assert not folder.exists()
