"""Activations whose bits don't depend on how many rows there are.

torch computes most of an elementwise function with vector instructions and what is left over at the end of a piece
with scalar ones, which round differently; and it makes one piece per thread. So the place of a row among the others
would decide about its last bits. Here every piece is a whole number of vectors long.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# Elements that torch takes in one turn of a vector loop, for the widest vectors and the smallest elements.
ALIGN = 64
_GRAIN = 32768  # torch gives a thread no less than this


class Steady(torch.nn.Module):
    """Applies an elementwise module."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return steadily(self.function, tensor)


def steadily(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """``function`` of every element, in aligned pieces."""
    length = tensor.numel()
    padded = aligned_length(length, torch.get_num_threads())
    if padded == length and tensor.is_contiguous():
        return function(tensor)
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, padded - length))
    return function(flat)[:length].view(tensor.shape)


def aligned_length(length: int, num_threads: int) -> int:
    """The least length from ``length`` on that torch cuts into aligned pieces."""
    pieces = max(1, min(num_threads, -(-length // _GRAIN)))
    return pieces * ALIGN * -(-length // (pieces * ALIGN))


def is_activation(module: torch.nn.Module) -> bool:
    """Is this one of the elementwise modules that models use between two matrices?"""
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation") and not any(
        True for _ in module.parameters()
    )
