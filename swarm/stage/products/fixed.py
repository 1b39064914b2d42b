"""A library's product as a stage calls it: with the numbers of rows and threads that a probe has shown to be safe."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn import functional

from swarm.stage.native import cores
from swarm.stage.products import proofs
from swarm.stage.products.probe import Product, Proof, in_tiles, prove


class Fixed:
    """A product of rows with one matrix.

    ``kernel``, with shape and dtype, names the proof. ``trial`` gives the product that the probe tries: this one, or
    one of another matrix of the shape if this one's numbers are too much alike to show anything.
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
        self._beside, self._dtype, self._device = beside, dtype, device
        self._proof: Proof | None = None

    @property
    def proof(self) -> Proof:
        """Made at the first call if it is not known. No test of ours holds other devices to their bits."""
        if self._proof is None:
            self._proof = self._prove() if self._device == "cpu" else Proof()
        return self._proof

    @property
    def how(self) -> str:
        """Describe in words: rows of a tile, and the number of threads if the bits depend on it."""
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
    """torch's own product. Quickly made: what a probe found is known by the shape."""

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
    """Are its numbers so many that another order of summing them would show?"""
    return len(torch.unique(matrix[:8, :64])) > 16


def telling(shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """A matrix of random numbers; a few rows of them again and again, which is quick to make."""
    outputs, inputs = shape
    few = torch.randn(min(outputs, 61), inputs, generator=torch.Generator().manual_seed(12)).to(dtype)
    return few.repeat(-(-outputs // len(few)), 1)[:outputs].clone()


def _telling_like(matrix: torch.Tensor) -> torch.Tensor:
    """Return this matrix, or another that lies in memory as it does."""
    if tells(matrix):
        return matrix
    outputs, inputs = matrix.shape
    other = telling((outputs, inputs), matrix.dtype)
    return other if matrix.is_contiguous() else other.T.contiguous().T
