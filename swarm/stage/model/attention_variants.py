"""Forwards of layers whose attention is not one softmax over plain keys and values.

DiffLlama subtracts the results of two heads, Doge adds a number to each key's score, which is computed from its value,
and LongCat-Flash attends twice in a layer. All of them attend by our function, with keys and values of other sizes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from swarm.errors import ModelError
from swarm.stage.attention.function import attend_rows
from swarm.stage.attention.options import AttentionOptions
from swarm.stage.matmul.elementwise import apply_aligned
from swarm.stage.matmul.experts import describe_experts
from swarm.stage.modules.latents import PLACE
from swarm.stage.modules.recognition import function_of

# --- DiffLlama ---


def prepare_difference(self: Any, _: Any) -> None:
    self.rotate = function_of(self, "apply_rotary_pos_emb")


def attend_difference(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: object) -> Any:
    """Attend once, where the model attends twice: each key has the values of a head in either half of the heads."""
    query, key, value = _heads(self, hidden_states)
    query, key = self.rotate(query, key, *position_embeddings, unsqueeze_dim=2)
    both = torch.cat([half.repeat(1, 1, 2, 1) for half in value.chunk(2, dim=2)], -1)
    mixed = attend_rows(self.layer_idx, query[0], key[0], both[0], AttentionOptions(self.scaling, None, None, None))
    first, second = mixed.chunk(2, dim=1)
    difference = first - (_weight(self, 1) - _weight(self, 2) + self.lambda_init).to(first.dtype) * second
    normed = (1 - self.lambda_init) * self.groupnorm(difference)
    return self.o_proj(normed.flatten(1).unsqueeze(0)), None


def _heads(self: Any, hidden_states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return queries, keys and values ``[1, tokens, heads, size]``."""
    parts = self.q_proj(hidden_states), self.k_proj(hidden_states), self.v_proj(hidden_states)
    return tuple(part.view(1, -1, part.shape[-1] // self.head_dim, self.head_dim) for part in parts)


def _weight(self: Any, number: int) -> torch.Tensor:
    query, key = (getattr(self, f"lambda_{side}{number}") for side in "qk")
    return torch.exp(torch.sum(query * key, dim=-1, dtype=torch.float32)).to(query.dtype)


# --- Doge ---


def prepare_doge(self: Any, config: Any) -> None:
    if config.keep_window_size < config.max_position_embeddings:
        raise ModelError(
            f"keep_window_size {config.keep_window_size} is less than max_position_embeddings "
            f"{config.max_position_embeddings}: a mask that leaves out single positions is not supported"
        )
    self.rotate, self.window = function_of(self, "apply_rotary_pos_emb"), config.sliding_window


def attend_doge(self: Any, hidden_states: torch.Tensor, position_embeddings: Any, **_: object) -> Any:
    """Attend with keys that have one number more, which is added to their scores: queries have there what the scale
    takes back."""
    query, key, value = _heads(self, hidden_states)
    query, key = self.q_norm(query), self.k_norm(key)
    query, key = self.rotate(query, key, *position_embeddings, unsqueeze_dim=2)
    added = torch.exp(self.A * apply_aligned(functional.softplus, self.dt_proj(value.flatten(2))))
    query = functional.pad(query, (0, 1), value=1 / self.scaling)
    key = torch.cat([key, added.unsqueeze(-1)], -1)
    options = AttentionOptions(self.scaling, self.window, None, None)
    return self.o_proj(attend_rows(self.layer_idx, query[0], key[0], value[0], options).flatten(1).unsqueeze(0)), None


def prepare_mixture(_: Any, __: Any) -> None:
    raise ModelError("Doge's experts are chosen by other tokens' scores, too, so they can't be served")


# --- LongCat-Flash ---


class RawRouter(nn.Module):
    """Weights of a router that the model multiplies by itself, in float32."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight, self.bias = linear.weight, linear.bias


def prepare_longcat(self: Any, _: Any) -> None:
    """Give the two attentions of a layer places in its cache: transformers counts them as layers."""
    for head, attention in enumerate(self.self_attn):
        attention.layer_idx = self.layer_idx
        setattr(attention, PLACE, (head, len(self.self_attn)))


def prepare_router(self: Any, _: Any) -> None:
    self.classifier = RawRouter(self.classifier)


def prepare_zero_experts(self: Any, _: Any) -> None:
    describe_experts(self, is_transposed=False)
    _drop_matrices(self)


def drop_zero_experts(model: nn.Module) -> None:
    """Drop the matrices of experts that give back their input, which transformers makes, but does not use."""
    for experts in model.modules():
        if type(experts).__name__ == "LongcatFlashExperts":
            _drop_matrices(experts)


def _drop_matrices(experts: Any) -> None:
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj[: experts.num_routed_experts], requires_grad=False)


def mix_with_zero_experts(self: Any, hidden_states: torch.Tensor) -> torch.Tensor:
    """Mix the chosen experts, and add the row itself by the weights of the chosen zero experts."""
    rows = hidden_states.view(-1, hidden_states.shape[-1])
    _, weights, chosen = self.router(hidden_states)
    chosen, order = chosen.sort(dim=1)
    weights = weights.gather(1, order)
    is_zero = chosen >= self.config.n_routed_experts
    kept = (weights * is_zero).sum(1, keepdim=True)
    mixed: torch.Tensor = self.experts(rows, torch.where(is_zero, -1, chosen), weights) + (rows * kept).to(rows.dtype)
    return mixed.view(hidden_states.shape)
