"""Indexes of positions (DeepSeek's sparse attention): queries, keys and weights of a model's indexer.

Our own attention computes scores and selections of them (``attention.selection``).
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.models.deepseek_v32 import modeling_deepseek_v32 as deepseek
from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm
from transformers.models.hy_v4 import modeling_hy_v4 as hunyuan

from swarm.stage.attention.selection import PositionIndex
from swarm.stage.modules.recognition import same_code


def is_known(indexer: Any) -> bool:
    """Whether this indexer is computed as one of those below."""
    return any(same_code(indexer, known) for known in _FORWARDS)


def replace_forward(indexer: Any) -> None:
    """Make a known indexer return what selects positions, instead of positions."""
    forward = next(forward for known, forward in _FORWARDS.items() if same_code(indexer, known))
    indexer.forward = MethodType(forward, indexer)


def _rotate_first(rotate: Callable[..., Any]) -> Callable[..., PositionIndex]:
    """Return a forward that rotates the first elements of queries and keys."""

    def forward(
        self: Any, hidden: torch.Tensor, q_resid: torch.Tensor, tables: Any, *_: object, **__: object
    ) -> PositionIndex:
        queries = self.wq_b(q_resid).unflatten(2, (self.n_heads, self.head_dim))
        keys = self.k_norm(self.wk(hidden)).unsqueeze(2)
        sizes = [self.qk_rope_head_dim, self.head_dim - self.qk_rope_head_dim]
        (q_turned, q_rest), (k_turned, k_rest) = queries.split(sizes, -1), keys.split(sizes, -1)
        q_turned, k_turned = rotate(q_turned, k_turned, *tables, unsqueeze_dim=2)
        return _make_index(
            self, torch.cat((q_turned, q_rest), -1), torch.cat((k_turned, k_rest), -1), hidden, self.softmax_scale
        )

    return forward


def _forward_hy(
    self: Any, hidden: torch.Tensor, q_resid: torch.Tensor, tables: Any, *_: object, **__: object
) -> PositionIndex:
    """Rotate the last elements of queries and keys."""
    queries = self.wq_b(q_resid).unflatten(2, (self.n_heads, self.head_dim))
    keys = self.k_norm(self.wk(hidden)).unsqueeze(2)
    sizes = [self.head_dim - self.qk_rope_head_dim, self.qk_rope_head_dim]
    (q_rest, q_turned), (k_rest, k_turned) = queries.split(sizes, -1), keys.split(sizes, -1)
    q_turned, k_turned = hunyuan.apply_rotary_pos_emb(q_turned, k_turned, *tables, unsqueeze_dim=2)
    index = _make_index(self, torch.cat((q_rest, q_turned), -1), torch.cat((k_rest, k_turned), -1), hidden, 1.0)
    index.weights *= self.softmax_scale
    return index


def _make_index(
    self: Any, queries: torch.Tensor, keys: torch.Tensor, hidden: torch.Tensor, scale: float
) -> PositionIndex:
    weights = self.weights_proj(hidden).float() * self.n_heads**-0.5
    keys = keys[0, :, 0].to(hidden.dtype)
    return PositionIndex(self.index_topk, None, queries[0].float(), keys, weights[0], scale)


_FORWARDS: dict[type[nn.Module], Callable[..., PositionIndex]] = {
    deepseek.DeepseekV32Indexer: _rotate_first(deepseek.apply_rotary_pos_emb),
    glm.GlmMoeDsaIndexer: _rotate_first(glm.apply_rotary_pos_emb_interleave),
    hunyuan.HYV4Indexer: _forward_hy,
}
