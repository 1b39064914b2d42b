"""Fake device for tests: torch's type ``fake`` computes on the CPU, but is another device for torch and for Swarm.

Its tensors wrap tensors of the CPU. As on a GPU, an operation on tensors of both devices is an error, except for a copy
between them, indices, and numbers; and the memory that tensors take is limited and counted.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

TYPE = "fake"
# Operations that take tensors of two devices, as with CUDA.
_MIXED = frozenset({"copy_", "_to_copy", "to", "index", "index_put_", "_index_put_impl_", "set_"})


class Memory:
    """Memory of the fake device. Raises ``torch.OutOfMemoryError`` beyond its limit."""

    def __init__(self) -> None:
        self.limit: int | None = None
        self.used = 0

    def take(self, inner: torch.Tensor) -> None:
        """Count the storage of a tensor until it is freed."""
        storage = inner.untyped_storage()
        size = storage.nbytes()
        key = storage._cdata
        if key in _held:
            return
        if self.limit is not None and self.used + size > self.limit:
            raise torch.OutOfMemoryError(
                f"out of memory: the fake device has {self.limit - self.used} bytes left, not {size}"
            )
        _held.add(key)
        self.used += size
        weakref.finalize(storage, self._give_back, key, size)

    def _give_back(self, key: int, size: int) -> None:
        _held.discard(key)
        self.used -= size


break_operation = ""  # whose results are wrong
has_float64 = True  # mps has no float64
before_copies: Callable[[], object] | None = None  # called before each copy to the host, which waits for the device
_held: set[int] = set()
memory = Memory()


class FakeTensor(torch.Tensor):
    """Tensor on the fake device."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> FakeTensor:
        made = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            inner.size(),
            strides=inner.stride(),
            storage_offset=inner.storage_offset(),
            dtype=inner.dtype,
            layout=inner.layout,
            device=torch.device(TYPE, 0),
            requires_grad=False,
        )
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:
        return f"Fake({self.inner!r})"

    def tolist(self) -> Any:
        return self.inner.tolist()

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError("can't convert fake:0 device type tensor to numpy; copy the tensor to the host first")
        return self.inner.numpy()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # noqa: PLR0911
        name = func._schema.name.partition("::")[2]
        if name == "_has_compatible_shallow_copy_type":  # no tensor of a subclass is moved in place
            return False
        args, kwargs, target = _on_host(func, args, kwargs or {})
        _refuse_mixed(name, args, kwargs)
        if before_copies is not None and name == "_to_copy" and target is not None and target.type == "cpu":
            before_copies()
        done = func(*tree_map(_unwrap, args), **tree_map(_unwrap, kwargs))
        if name == break_operation:
            done = done * 1.01
        if name == "copy_" and not isinstance(args[0], FakeTensor):
            return args[0]
        if target is not None and target.type == "cpu":
            return done
        is_operator = name.startswith("__") and not name.startswith("__i")  # such as __lshift__, not __ilshift__
        if name.endswith("_") and not is_operator and isinstance(args[0], FakeTensor):
            return args[0]
        out = kwargs.get("out")
        if out is not None:
            return out
        if func.is_view and not args[0].is_inference():  # a view of a normal tensor is one, too
            with torch.inference_mode(False):
                return tree_map(_wrap, done)
        return tree_map(_wrap, done)


def _on_host(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[list[Any], dict[str, Any], torch.device | None]:
    """Return the arguments for a call on the CPU, and the device that was asked for, if any."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    target = given.get("device")
    if target is None:
        return list(args), kwargs, None
    target = torch.device(target)
    args = ["cpu" if name == "device" else part for name, part in zip(names, args, strict=False)]
    return args, {name: "cpu" if name == "device" else part for name, part in kwargs.items()}, target


def _unwrap(part: Any) -> Any:
    return part.inner if isinstance(part, FakeTensor) else part


def _wrap(part: Any) -> Any:
    if not isinstance(part, torch.Tensor) or isinstance(part, FakeTensor):
        return part
    if part.dtype == torch.float64 and not has_float64:
        raise TypeError("the fake device does not support float64")
    memory.take(part)
    return FakeTensor(part)


def _refuse_mixed(name: str, args: Any, kwargs: Any) -> None:
    flat = [*torch.utils._pytree.tree_leaves(args), *torch.utils._pytree.tree_leaves(kwargs)]
    tensors = [part for part in flat if isinstance(part, torch.Tensor) and part.dim()]
    others = [part for part in tensors if not isinstance(part, FakeTensor)]
    if others and name not in _MIXED:
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, but found fake:0 and cpu")


def _empty(size: Any, **kwargs: Any) -> FakeTensor:
    return _wrap(torch.empty(size, dtype=kwargs.get("dtype"), device="cpu"))  # type: ignore[no-any-return]


def _empty_strided(size: Any, stride: Any, **kwargs: Any) -> FakeTensor:
    return _wrap(torch.empty_strided(size, stride, dtype=kwargs.get("dtype"), device="cpu"))  # type: ignore[no-any-return]


def _copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    _unwrap(target).copy_(_unwrap(source))
    return target


_library: list[Any] = []


def install() -> torch.device:
    """Register the fake device with torch, once per process; return it."""
    if not _library:
        _setup_privateuseone_for_python_backend(TYPE)
        library = torch.library.Library("aten", "IMPL")
        library.impl("empty.memory_format", _empty, "PrivateUse1")
        library.impl("empty_strided", _empty_strided, "PrivateUse1")
        library.impl("_copy_from", _copy_from, "PrivateUse1")
        _library.append(library)
    return torch.device(TYPE, 0)


@contextmanager
def limited(more: int) -> Iterator[None]:
    """Let only this many bytes more be allocated, for a while."""
    gc.collect()
    memory.limit, before = memory.used + more, memory.limit
    try:
        yield
    finally:
        memory.limit = before
