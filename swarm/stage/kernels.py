"""The kernels of a stage in words, for ``swarmctl nodes`` and ``plan``."""

from __future__ import annotations

import torch

from swarm.stage import linears, native
from swarm.stage.model import Skeleton
from swarm.stage.native import attention
from swarm.stage.passes import CELL


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
    dtype = str(skeleton.dtype).removeprefix("torch.")
    why = f" (not Swarm's own: {native.absence()})" if _could_be_native(skeleton) else ""
    return f"{'; '.join(parts)}; {dtype}, {'exact' if exact else 'inexact'}{why}"


def _could_be_native(skeleton: Skeleton) -> bool:
    return skeleton.device.type == "cpu" and skeleton.dtype == torch.bfloat16 and native.library() is None


def _attention(skeleton: Skeleton) -> str:
    config = skeleton.config.get_text_config()
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    head = torch.empty(1, 1, size, dtype=skeleton.dtype, device=skeleton.device)
    return "native" if attention.serves(head, head) else f"torch on cells of {CELL}"
