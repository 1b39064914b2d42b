"""Mixtures of experts: every expert multiplies the rows that chose it, with bits independent of how many rows did.

transformers keeps the experts of a layer as one three-dimensional weight and calls a function by its registered name.
During decoding, an expert usually gets few rows, and kernels treat few rows differently. Products therefore take tiles
of fixed numbers of rows (``tiled``), and activations take whole vectors. A row's results are added in the order of the
experts' numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from swarm.stage.matmul.elementwise import ALIGN, aligned_length
from swarm.stage.matmul.tiled import TiledMatmul, torch_matmul

NAME = "swarm"  # under which transformers finds the function


def register() -> None:
    """Register the function with transformers. Idempotent."""
    ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)


def mix_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' weighted results. ``hidden_states`` is [rows, hidden]; the other two are [rows, choices]."""
    result = torch.zeros_like(hidden_states)
    # Ascending, so that a row's results are always added in the same order.
    for expert in torch.unique(top_k_index).tolist():
        rows, choice = torch.where(top_k_index == expert)
        answer = _run_expert(module, expert, _pad_for_activation(hidden_states[rows], module.down_proj.shape))[
            : len(rows)
        ]
        result.index_add_(0, rows, (answer * top_k_weights[rows, choice, None]).to(result.dtype))
    return result


def _run_expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        inner = module._apply_gate(_multiply(module, "gate_up_proj", expert, rows))
    else:
        inner = module.act_fn(_multiply(module, "up_proj", expert, rows))
    answer = _multiply(module, "down_proj", expert, inner)
    return module.post_expert_norm(answer) if module.has_post_expert_norm else answer


def _multiply(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    return _expert_matmul(module, name, expert)(rows)


def _expert_matmul(module: Any, name: str, expert: int) -> TiledMatmul:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch_matmul(weight.T if module.is_transposed else weight, bias)


def is_exact(module: Any) -> bool:
    """Whether the products of this layer's experts were shown to be exact."""
    names = ("gate_up_proj" if module.has_gate else "up_proj", "down_proj")
    return all(_expert_matmul(module, name, 0).proof.exact for name in names)


def _pad_for_activation(rows: torch.Tensor, down_shape: torch.Size) -> torch.Tensor:
    """Pad the rows so that their activations are cut into whole vectors, also when several threads share them."""
    multiple = ALIGN // math.gcd(ALIGN, *down_shape[1:])
    num_rows = -(-len(rows) // multiple) * multiple
    while any(aligned_length(num_rows * size, torch.get_num_threads()) != num_rows * size for size in down_shape[1:]):
        num_rows += multiple
    return functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
