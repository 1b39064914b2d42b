"""Elementwise functions whose bits do not depend on the number of rows.

torch computes most of an elementwise function with vector instructions, and the remainder at the end of a chunk with
scalar ones, which round differently. It also makes one chunk per thread. A row's place in the batch would therefore
decide its last bits. Here every chunk is padded to a whole number of vectors.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache, wraps
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# Elements that torch processes in one iteration of a vector loop, for the widest vectors and the smallest elements.
ALIGN = 64
_GRAIN = 32768  # torch gives a thread at least this many elements
# The functions whose remainders torch rounds differently; its tanh, exponential and logarithm have equal bits.
_FUNCTIONS = frozenset({"sigmoid", "silu", "gelu", "softplus", "logsigmoid"})


class AlignedActivation(torch.nn.Module):
    """Wrapper that applies an elementwise module in aligned chunks."""

    def __init__(self, function: torch.nn.Module) -> None:
        super().__init__()
        self.function = function

    def forward(self, tensor: torch.Tensor) -> torch.Tensor:
        return apply_aligned(self.function, tensor)


class _AlignedCalls(TorchFunctionMode):
    """Function mode in which this thread's calls of elementwise functions are aligned."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__name__", "") not in _FUNCTIONS or not args or kwargs.get("inplace"):
            return func(*args, **kwargs)
        return apply_aligned(lambda tensor: func(tensor, *args[1:], **kwargs), args[0])


def align_calls(module: torch.nn.Module) -> None:
    """Align the elementwise functions that the module's own code calls, such as a router's sigmoid."""
    kind: type = type(module)
    if _calls_elementwise(kind):
        module.forward = _align(module.forward)


def _align(forward: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(forward)
    def aligned(*args: Any, **kwargs: Any) -> Any:
        with _AlignedCalls():
            return forward(*args, **kwargs)

    return aligned


@cache
def _calls_elementwise(kind: type) -> bool:
    """Whether a method of a model's module class calls an elementwise function."""
    bases = (base for base in kind.__mro__ if base.__module__.startswith("transformers.models."))
    methods = (inspect.unwrap(each) for base in bases for each in vars(base).values() if inspect.isfunction(each))
    return any(not _FUNCTIONS.isdisjoint(method.__code__.co_names) for method in methods if inspect.isfunction(method))


def apply_aligned(function: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Apply ``function`` to every element in aligned chunks."""
    length = tensor.numel()
    padded = aligned_length(length, torch.get_num_threads())
    if padded == length and tensor.is_contiguous():
        return function(tensor)
    flat = torch.nn.functional.pad(tensor.reshape(-1), (0, padded - length))
    return function(flat)[:length].view(tensor.shape)


def aligned_length(length: int, num_threads: int) -> int:
    """Return the smallest number of elements, at least ``length``, that torch splits into aligned chunks."""
    pieces = max(1, min(num_threads, -(-length // _GRAIN)))
    return pieces * ALIGN * -(-length // (pieces * ALIGN))


def is_activation(module: torch.nn.Module) -> bool:
    """Whether this is one of the elementwise modules that models use between two matrices."""
    home = type(module).__module__
    return home in ("transformers.activations", "torch.nn.modules.activation") and not any(
        True for _ in module.parameters()
    )
