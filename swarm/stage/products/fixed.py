"""Calls of a library's matrix product with the numbers of rows and threads that a probe has shown to be safe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from swarm.stage.native import cores
from swarm.stage.products import proofs
from swarm.stage.products.probe import Product, Proof, in_tiles, prove


class Fixed:
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
        beside: tuple[int, ...] = (),
        device: str = "cpu",
        trial: Callable[[], Product] | None = None,
    ) -> None:
        self._kernel, self._product, self._trial = kernel, product, trial
        self._outputs, self._inputs = shape
        # Widths of further inputs, such as a tensor that the result is multiplied by.
        self._beside, self._dtype, self._device = beside, dtype, device
        self._proof: Proof | None = None  # made at first use

    @property
    def proof(self) -> Proof:
        """The proof, computed at first use if it is not cached. Other devices than CPUs get none: we do not test their
        bits."""
        if self._proof is None:
            self._proof = self._prove() if self._device == "cpu" else Proof()
        return self._proof

    @property
    def how(self) -> str:
        """The rows of a tile in words, and the number of threads if the bits depend on it."""
        proof = self.proof
        bound = proof.exact and len(proof.threads) < len(cores.numbers(self._outputs * self._inputs))
        return "/".join(map(str, proof.sizes)) + (f" by {proof.threads[-1]} threads" if bound else "")

    def _prove(self) -> Proof:
        work = self._outputs * self._inputs
        numbers = cores.numbers(work)
        name = (self._kernel, str(self._dtype), self._outputs, self._inputs, *self._beside, numbers)
        widths = (self._inputs, *self._beside)

        def make() -> Proof:
            product = self._product if self._trial is None else self._trial()
            return prove(product, widths, self._outputs, dtype=self._dtype, work=work, numbers=numbers)

        return proofs.recall(name, make)

    def __call__(self, *rows: torch.Tensor) -> torch.Tensor:
        proof, shape = self.proof, rows[0].shape[:-1]
        flat = tuple(each.reshape(-1, each.shape[-1]) for each in rows)
        before = cores.gather(len(flat[0]) * self._outputs * self._inputs, proof.threads)
        try:
            result = in_tiles(self._product, flat, proof.sizes) if proof.exact else self._product(*flat)
        finally:
            cores.dismiss(before)
        return result.view(*shape, -1)


def by_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> Fixed:
    """Return torch's own product with this weight. Cheap to construct: proofs are cached by shape."""

    def trial() -> Product:
        other = None if bias is None else telling((1, len(bias)), bias.dtype)[0]
        return _product(_telling_like(weight), other)

    lies = "" if weight.is_contiguous() else ", inputs first"
    return Fixed(
        f"torch{lies}" if bias is None else f"torch{lies} with bias",
        _product(weight, bias),
        (weight.shape[0], weight.shape[1]),
        weight.dtype,
        device=weight.device.type,
        trial=trial,
    )


def _product(weight: torch.Tensor, bias: torch.Tensor | None) -> Product:
    return lambda rows: functional.linear(rows, weight, bias)


def tells(matrix: torch.Tensor) -> bool:
    """Whether the matrix has enough distinct values for another order of summation to change a result."""
    return len(torch.unique(matrix[:8, :64])) > 16


def telling(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """Return a matrix of random numbers. It repeats a few random rows, which is quick."""
    outputs, inputs = shape
    few = torch.randn(min(outputs, 61), inputs, generator=torch.Generator().manual_seed(12)).to(dtype)
    return few.repeat(-(-outputs // len(few)), 1)[:outputs].clone()


def _telling_like(matrix: torch.Tensor) -> torch.Tensor:
    """Return this matrix, or a random one with the same memory layout if its values are too much alike."""
    if tells(matrix):
        return matrix
    outputs, inputs = matrix.shape
    other = telling((outputs, inputs), matrix.dtype)
    return other if matrix.is_contiguous() else other.T.contiguous().T
