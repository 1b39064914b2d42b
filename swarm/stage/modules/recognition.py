"""Recognition of a module's computation by its code, not by its name.

transformers' models share most of their code. A module that is not recognised stays as it is.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from swarm.stage.matmul.elementwise import AlignedActivation

# Functions that are called by a name in the module's own file: equal code that calls another function of that name
# computes something else.
_CALLED = ("apply_rotary_pos_emb", "_apply_rotary_emb", "rotate_half")

Function = tuple[str, str]  # name and algorithm, as in oneDNN where it has the function

_ACTIVATIONS: dict[str, Function] = {
    "SiLU": ("swish", ""),
    "SiLUActivation": ("swish", ""),
    "GELUTanh": ("gelu", "tanh"),
    "NewGELUActivation": ("gelu", "tanh"),
    "FastGELUActivation": ("gelu", "tanh"),
    "GELUActivation": ("gelu", "none"),
    "QuickGELUActivation": ("quick_gelu", ""),
    "ReLU": ("relu", ""),
    "ReLUSquaredActivation": ("relu2", ""),
    "Sigmoid": ("sigmoid", ""),
    "Tanh": ("tanh", ""),
}


def same_code(module: nn.Module, known: type[nn.Module]) -> bool:
    """Whether the module's forward does the same as a known class's."""
    return same_function(type(module).forward, known.forward)


def function_of(part: Any, name: str) -> Callable[..., Any]:
    """Return a function of the file that defines the module's class."""
    function: Callable[..., Any] = type(part).forward.__globals__[name]
    return function


def same_function(mine: Any, theirs: Any) -> bool:
    mine, theirs = inspect.unwrap(mine), inspect.unwrap(theirs)
    if not inspect.isfunction(mine) or not inspect.isfunction(theirs):
        return False
    if _comparable_code(mine.__code__) != _comparable_code(theirs.__code__):
        return False
    names = [name for name in _CALLED if name in mine.__code__.co_names]
    return all(same_function(mine.__globals__.get(name), theirs.__globals__.get(name)) for name in names)


def _comparable_code(code: Any) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts[1:]  # the first constant is the docstring


def unwrap_activation(function: nn.Module) -> nn.Module:
    """Return the activation itself, without a wrapper that a stage has put around it."""
    return function.function if isinstance(function, AlignedActivation) else function


def find_activation(module: nn.Module) -> Function | None:
    """Return the elementwise function that this module applies; None if it is another kind of module, or unknown."""
    module = unwrap_activation(module)
    if type(module).__module__ not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    if isinstance(module, nn.GELU):
        return ("gelu", module.approximate)
    return _ACTIVATIONS.get(type(module).__name__)
