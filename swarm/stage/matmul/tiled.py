"""Calls of a library's matrix product with the numbers of rows and threads that a probe has shown to be safe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from swarm.stage.matmul import proofs
from swarm.stage.matmul.probe import Product, Proof, multiply_in_tiles, prove
from swarm.stage.native import cores

_CPU = torch.device("cpu")


class TiledMatmul:
    """A library's product of rows with one matrix, called in tiles.

    ``kernel``, shape and dtype are the key of the proof. ``trial`` returns the product that the probe tries: this one,
    or one with a random matrix of the same shape if this matrix has too few distinct values to reveal another order of
    summation.
    """

    def __init__(
        self,
        kernel: str,
        product: Product,
        shape: tuple[int, int],
        dtype: torch.dtype,
        *,
        extra_widths: tuple[int, ...] = (),
        device: torch.device = _CPU,
        trial: Callable[[], Product] | None = None,
    ) -> None:
        self._kernel, self._product, self._trial = kernel, product, trial
        self._outputs, self._inputs = shape
        # Widths of further inputs, such as a tensor that the result is multiplied by.
        self._extra_widths, self._dtype, self._device = extra_widths, dtype, device
        self._proof: Proof | None = None  # made at first use

    @property
    def proof(self) -> Proof:
        """The proof, computed on the device that multiplies at first use if it is not cached."""
        if self._proof is None:
            self._proof = self._prove()
        return self._proof

    @property
    def tiling(self) -> str:
        """The rows of a tile in words, and the number of threads if the bits depend on it."""
        proof = self.proof
        bound = proof.exact and len(proof.threads) < len(cores.thread_numbers(self._outputs * self._inputs))
        return "/".join(map(str, proof.sizes)) + (f" by {proof.threads[-1]} threads" if bound else "")

    def _prove(self) -> Proof:
        work = self._outputs * self._inputs
        numbers = cores.thread_numbers(work)
        name = (self._kernel, str(self._dtype), self._outputs, self._inputs, *self._extra_widths, numbers)
        name = (*name, *proofs.device_key(self._device))
        widths = (self._inputs, *self._extra_widths)

        def run_probe() -> Proof:
            product = self._product if self._trial is None else self._trial()
            return prove(
                product, widths, self._outputs, dtype=self._dtype, work=work, numbers=numbers, device=self._device
            )

        return proofs.get_proof(name, run_probe)

    def __call__(self, *rows: torch.Tensor) -> torch.Tensor:
        proof, shape = self.proof, rows[0].shape[:-1]
        flat = tuple(tensor.reshape(-1, tensor.shape[-1]) for tensor in rows)
        before = cores.use_threads(len(flat[0]) * self._outputs * self._inputs, proof.threads)
        try:
            result = multiply_in_tiles(self._product, flat, proof.sizes) if proof.exact else self._product(*flat)
        finally:
            cores.restore_threads(before)
        return result.view(*shape, -1)


def torch_matmul(weight: torch.Tensor, bias: torch.Tensor | None) -> TiledMatmul:
    """Return torch's own product with this weight. Cheap to construct: proofs are cached by shape."""

    def trial() -> Product:
        other = None if bias is None else sample_matrix((1, len(bias)), bias.dtype)[0].to(bias.device)
        return _torch_product(_discriminating_like(weight), other)

    layout = "" if weight.is_contiguous() else ", inputs first"
    return TiledMatmul(
        f"torch{layout}" if bias is None else f"torch{layout} with bias",
        _torch_product(weight, bias),
        (weight.shape[0], weight.shape[1]),
        weight.dtype,
        device=weight.device,
        trial=trial,
    )


def _torch_product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: functional.linear(rows, weight, bias)


def is_discriminating(matrix: torch.Tensor) -> bool:
    """Whether the matrix has enough distinct values for another order of summation to change a result."""
    return len(torch.unique(matrix[:8, :64])) > 16


def sample_matrix(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of random numbers. It repeats a few random rows, which is quick."""
    outputs, inputs = shape
    few = torch.randn(min(outputs, 61), inputs, generator=torch.Generator().manual_seed(12)).to(dtype)
    return few.repeat(-(-outputs // len(few)), 1)[:outputs].clone()


def _discriminating_like(matrix: torch.Tensor) -> torch.Tensor:
    """Return this matrix, or a random one with the same memory layout if its values are too much alike."""
    if is_discriminating(matrix):
        return matrix
    outputs, inputs = matrix.shape
    other = sample_matrix((outputs, inputs), matrix.dtype).to(matrix.device)
    return other if matrix.is_contiguous() else other.T.contiguous().T
