"""The kernels of a stage in words, for ``swarmctl nodes`` and ``plan``."""

from __future__ import annotations

import inspect

import torch

from swarm.stage import linears, native
from swarm.stage.model import Skeleton
from swarm.stage.native import attention
from swarm.stage.passes import CELL
from swarm.stage.steady import is_activation


def describe(skeleton: Skeleton) -> str:
    """What multiplies, in which dtype, exact or not.

    Exact: a sequence's bits depend on nothing but itself. The tests hold every exact kernel to that on a CPU; for other
    devices nothing is promised.
    """
    experts = linears.PlainLinear  # what multiplies routers and experts is torch's, as that kernel is
    parts = [f"linears {skeleton.kernel.name}", f"attention {_attention(skeleton)}"]
    if any(parameter.ndim == 3 for parameter in skeleton.model.parameters()):  # how a layer's experts are kept
        parts.insert(1, f"experts {experts.name}, one by one")
    exact = skeleton.kernel.exact and experts.exact and skeleton.device.type == "cpu"
    exact = exact and not any(_calls_a_curve(module) for module in skeleton.model.modules())
    dtype = str(skeleton.dtype).removeprefix("torch.")
    why = f" (not Swarm's own: {native.absence()})" if _could_be_native(skeleton) else ""
    return f"{'; '.join(parts)}; {dtype}, {'exact' if exact else 'inexact'}{why}"


# torch computes what is left over at the end of a tensor by other instructions than the rest. Activations that are
# modules are kept clear of that (``steady``); one that a module calls as a function is not.
_CURVES = frozenset({"sigmoid", "silu", "gelu", "softplus", "logsigmoid"})


def _calls_a_curve(module: torch.nn.Module) -> bool:
    """Does a module of the model apply an elementwise function by itself, to rows of any number?"""
    if is_activation(module):
        return False
    forward = inspect.unwrap(type(module).forward)
    return inspect.isfunction(forward) and not _CURVES.isdisjoint(forward.__code__.co_names)


def _could_be_native(skeleton: Skeleton) -> bool:
    return skeleton.device.type == "cpu" and skeleton.dtype == torch.bfloat16 and native.library() is None


def _attention(skeleton: Skeleton) -> str:
    config = skeleton.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = torch.empty(1, 1, size, dtype=skeleton.dtype, device=skeleton.device)
    return "native" if attention.serves(head, head) else f"torch on cells of {CELL}"
