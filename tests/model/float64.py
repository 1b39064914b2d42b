"""What a model computes in float64, and how far from that float32 may be.

Two computations in float32 differ by their orders of summation, which libraries choose by processor. How far apart
they are says little: where both happen to sum in one order, they share their roundings. So each is compared with
float64, and with what float32 makes of this very model:

* one rounding of each module's result, carried on to the logits by the model's own layers, is measured: models with
  norms after their blocks, large embeddings or soft caps carry it ten times further than others;
* a sum of k products in one chain rounds k times instead, by partial sums that grow to the result: together at most
  about √k of such roundings, root mean square. Every other order gives less.

Both are properties of the model, the same on every processor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from transformers import AutoModelForCausalLM

from swarm.stage.model.rope import is_rotary


@dataclass(frozen=True, slots=True)
class Truth:
    """Logits in float64, and the most that float32 can be off, as a root mean square over their own."""

    logits: torch.Tensor
    bound: float

    def off(self, logits: torch.Tensor) -> float:
        """How far these logits are from the truth: the worst row, so that no wrong one hides among right ones."""
        return distance(logits, self.logits)


def distance(logits: torch.Tensor, truth: torch.Tensor) -> float:
    rows = (logits.double() - truth).square().mean(1).sqrt()
    return float(rows.max() / truth.square().mean().sqrt())


def truth_of(folder: Path, tokens: Sequence[int], kind: Any = AutoModelForCausalLM) -> Truth:
    """transformers' whole model in float64, with rotary tables as in float32: these belong to the model."""
    model = kind.from_pretrained(
        folder, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    ).eval()
    widest = max(module.in_features for module in model.modules() if isinstance(module, torch.nn.Linear))
    with torch.inference_mode():
        logits = _logits(model, tokens)
        for module in model.modules():
            module.register_forward_hook(_rounded)
        one_rounding = distance(_logits(model, tokens), logits)
    return Truth(logits, math.sqrt(max(widest, len(tokens))) * one_rounding)


def _logits(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    mode = _InFloat64()
    hooks = [hook for module in model.modules() if is_rotary(module) for hook in mode.spare(module)]
    with mode:
        logits: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    assert logits.dtype == torch.float64
    return logits


class _InFloat64(TorchFunctionMode):
    """Norms and softmax compute in float32 whatever the model's dtype: here they get float64 instead."""

    def __init__(self) -> None:
        super().__init__()
        self._is_spared = False

    def __torch_function__(
        self, func: Callable[..., Any], types: object, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if self._is_spared:
            return func(*args, **(kwargs or {}))
        wanted = {name: _widened(value) for name, value in (kwargs or {}).items()}
        if func is torch.full:
            wanted.setdefault("dtype", torch.float64)
        return (torch.Tensor.double if func is torch.Tensor.float else func)(*map(_widened, args), **wanted)

    def spare(self, module: torch.nn.Module) -> tuple[Any, Any]:
        """Let this module compute in float32, as it asks to; returns the hooks."""

        def before(*_: object) -> None:
            self._is_spared = True

        def after(*_: object) -> None:
            self._is_spared = False

        return module.register_forward_pre_hook(before), module.register_forward_hook(after)


def _widened(value: Any) -> Any:
    return torch.float64 if value is torch.float32 else value


def _rounded(_module: object, _inputs: object, output: Any) -> Any:
    """A module's result as float32 would hold it. By numpy: torch's own ways to float32 are turned into others here."""
    if isinstance(output, torch.Tensor) and output.dtype == torch.float64:
        return torch.from_numpy(output.numpy().astype("float32").astype("float64"))
    return output
