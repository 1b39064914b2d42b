"""Tiled products for weights that a module of the model multiplies in its own code, such as a router's.

The module keeps its code. Its weight becomes a tensor subclass that intercepts products and computes them in tiles of
fixed numbers of rows, as ``tiled`` does for linear layers. Any other operation on the weight is passed on to torch and
recorded by name, because no probe shows that its bits are independent of the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from swarm.stage.matmul.tiled import torch_matmul

_Function = Callable[..., Any]
# Operations that only change the matrix's shape or type: their result is wrapped again.
_RESHAPING = frozenset(
    {"t", "T", "mT", "transpose", "to", "type", "float", "double", "bfloat16", "half", "contiguous", "detach"}
)
# Products of rows with the matrix, which are computed in tiles.
_PRODUCTS = ("linear", "matmul", "__matmul__", "mm", "addmm")


class RawMatrix(torch.Tensor):
    """A two-dimensional weight whose products with rows are computed in tiles.

    ``doubts`` holds the names of operations computed with it that no probe has shown to be exact.
    """

    doubts: set[str]  # shared by all views of one weight

    @staticmethod
    def wrap(tensor: torch.Tensor, doubts: set[str] | None = None) -> RawMatrix:
        matrix = torch.Tensor._make_subclass(RawMatrix, tensor)
        matrix.doubts = set() if doubts is None else doubts
        return matrix

    def __deepcopy__(self, _: dict[int, object]) -> RawMatrix:
        return self

    @classmethod
    def __torch_function__(
        cls, func: _Function, types: Sequence[type], args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = getattr(func, "__name__", "")
        name = _getter_name(func) if name == "__get__" else name
        with torch._C.DisableTorchFunctionSubclass():  # Without this, the calls below would come back to this function.
            mine = _parse_product(name, args, kwargs or {})
            if mine is not None:
                matrix, inputs_first, rows, bias = mine
                return matrix._times(rows, bias, inputs_first)
            result = func(*args, **(kwargs or {}))
        return _wrap_result(name, result, [*args, *(kwargs or {}).values()])

    def _times(self, rows: torch.Tensor, bias: torch.Tensor | None, inputs_first: bool) -> torch.Tensor:
        matrix = self.as_subclass(torch.Tensor)
        product = torch_matmul(matrix.T if inputs_first else matrix, bias)
        if not product.proof.exact:
            self.doubts.add("product")
        return product(rows)


def _getter_name(func: Any) -> str:
    """Return the name of the attribute that this getter reads."""
    return str(getattr(func.__self__, "__name__", ""))


def _parse_product(
    name: str, args: Sequence[Any], named: dict[str, Any]
) -> tuple[RawMatrix, bool, torch.Tensor, torch.Tensor | None] | None:
    """Return the matrix, whether its inputs come first, the rows and a bias; None if this is no product of rows with
    it."""
    if name not in _PRODUCTS or set(named) - {"bias", "weight", "input"}:
        return None
    if name == "linear":
        given = dict(zip(("input", "weight", "bias"), args, strict=False)) | named
        rows, matrix, bias = given["input"], given["weight"], given.get("bias")
    elif name == "addmm":
        bias, rows, matrix = args
    else:
        (rows, matrix), bias = args, None
    if not isinstance(matrix, RawMatrix) or isinstance(rows, RawMatrix) or isinstance(bias, RawMatrix):
        return None
    return matrix, name != "linear", rows, bias


def _wrap_result(name: str, result: Any, values: Iterable[Any]) -> Any:
    """Wrap the result of an operation again if it is the reshaped matrix; record the operation if other tensors took
    part."""
    values = list(values)
    mine = [value for value in values if isinstance(value, RawMatrix)]
    if not isinstance(result, torch.Tensor) or not mine:
        return result
    plain = result.as_subclass(torch.Tensor)
    if name in _RESHAPING and result.ndim == 2:
        return RawMatrix.wrap(plain, mine[0].doubts)
    if any(isinstance(value, torch.Tensor) and not isinstance(value, RawMatrix) for value in values):
        for matrix in mine:
            matrix.doubts.add(name)
    return plain


def wrap_matrices(module: torch.nn.Module) -> None:
    """Replace the module's own two-dimensional parameters by ``RawMatrix``.

    Embeddings are left as they are, and so are experts with three-dimensional weights, which are tiled elsewhere.
    """
    own = dict(module.named_parameters(recurse=False))
    if isinstance(module, torch.nn.Embedding) or any(parameter.ndim > 2 for parameter in own.values()):
        return
    for leaf, parameter in own.items():
        if parameter.ndim == 2 and type(parameter.data) is torch.Tensor:  # a subclass has calls of its own
            module._parameters[leaf] = RawMatrix.wrap(parameter.data)  # type: ignore[assignment]


def has_other_matrices(module: torch.nn.Module) -> bool:
    """Whether the module has matrices of its own that were not wrapped, because a device's tensors can't be."""
    own: Iterable[Any] = module._parameters.values()
    return not isinstance(module, torch.nn.Embedding) and any(
        parameter is not None and parameter.ndim == 2 and not isinstance(parameter, RawMatrix)
        for parameter in own
        if parameter is not None and parameter.device.type not in ("cpu", "meta")
    )


def raw_matrices(module: torch.nn.Module) -> list[RawMatrix]:
    """Return the module's own ``RawMatrix`` parameters."""
    own: Iterable[Any] = module._parameters.values()
    return [parameter for parameter in own if isinstance(parameter, RawMatrix)]
