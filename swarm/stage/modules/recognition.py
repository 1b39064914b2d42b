"""What a module of a model computes, recognised by its code and not by its name.

transformers' models share most of theirs. What is not recognised stays as it is.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from swarm.stage.products.steady import Steady

# What functions call by their module's own names: equal code around another function of that name is something else.
_CALLED = ("apply_rotary_pos_emb", "_apply_rotary_emb", "rotate_half")

Function = tuple[str, str]  # name and algorithm, as oneDNN calls them where it knows them

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
    """Does its forward do what a known class's does?"""
    return same_function(type(module).forward, known.forward)


def same_function(mine: Any, theirs: Any) -> bool:
    mine, theirs = inspect.unwrap(mine), inspect.unwrap(theirs)
    if not inspect.isfunction(mine) or not inspect.isfunction(theirs):
        return False
    if _essence(mine.__code__) != _essence(theirs.__code__):
        return False
    names = [name for name in _CALLED if name in mine.__code__.co_names]
    return all(same_function(mine.__globals__.get(name), theirs.__globals__.get(name)) for name in names)


def _essence(code: Any) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts[1:]  # the first is what it says of itself


def bare(function: nn.Module) -> nn.Module:
    """The activation itself, where a stage has put something around it."""
    return function.function if isinstance(function, Steady) else function


def activation(module: nn.Module) -> Function | None:
    """Which elementwise function this module applies; None if it is another kind of module, or not known."""
    module = bare(module)
    if type(module).__module__ not in ("transformers.activations", "torch.nn.modules.activation"):
        return None
    if isinstance(module, nn.GELU):
        return ("gelu", module.approximate)
    return _ACTIVATIONS.get(type(module).__name__)
