"""Detection of torch operations whose bits depend on the processor.

Each processor's instructions compute sums of many numbers, exponentials and the like differently. Single sums,
products, quotients and roots are rounded the same way everywhere, and operations that only move numbers do not change
them. Our own kernels are no torch operations, so only what they leave to torch is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# Operations that give the same floating-point numbers on every processor, by name without leading and trailing
# underscores. Operations whose results are no floating-point numbers (comparisons, indices, integers) need not be
# listed.
_ROUNDED = "abs add clamp diff div maximum minimum mul neg reciprocal relu rsub sqrt square sub"
_MOVING = (
    "alias amax amin as_strided cat chunk clone constant_pad_nd contiguous copy detach diagonal embedding empty "
    "empty_like empty_strided expand expand_as fill flatten flip full full_like gather index index_copy index_put "
    "index_put_impl index_select lift lift_fresh masked_fill max min movedim narrow new_empty new_full new_ones "
    "new_zeros ones ones_like pad permute repeat repeat_interleave reshape reshape_alias resize resolve_conj "
    "resolve_neg roll scatter select set slice sort split split_with_sizes squeeze stack t take tensor_split tile "
    "to to_copy topk transpose type_as unbind unflatten unfold unsafe_view unsqueeze view view_as where zero "
    "zeros zeros_like"
)
_PORTABLE = frozenset(f"{_ROUNDED} {_MOVING}".split())


@contextmanager
def watch_operations() -> Iterator[set[str]]:
    """Collect the names of processor-dependent operations that run in this thread."""
    watch = _OperationWatch()
    with watch:
        yield watch.found


class _OperationWatch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records processor-dependent operations: torch passes every operation to it."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name not in _PORTABLE and any(_is_fractional(part) for part in tree_leaves(result)):
            self.found.add(name)
        return result


def _is_fractional(value: object) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
