"""Forward of models whose layers attend to positions that an earlier layer's index has selected: GLM-5 and Hy 4.

A stage passes the selection on beside the hidden states, in one wide row per position, so such a model can be cut
anywhere. Hy 4's layers have several hidden states of a position, too.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from swarm.errors import ModelError
from swarm.stage.attention.passes import current_pass
from swarm.stage.attention.selection import MAX_POSITIONS, SelectedPositions, Selection
from swarm.stage.model.layer_inputs import RowLayout

_KINDS = frozenset({"GlmMoeDsaModel", "HYV4Model"})


def is_shared(base: Any) -> bool:
    """Whether rows of this base model have more than a hidden state, for the layers here."""
    return type(base).__name__ in _KINDS and RowLayout.of_config(base.config).width > base.config.hidden_size


def replace_forward(base: Any) -> None:
    """Replace the forward of such a base model. Raises ``ModelError`` if positions are too many to be passed on."""
    if base.config.max_position_embeddings > MAX_POSITIONS:
        raise ModelError(
            f"{type(base).__name__}: layers that share an index of positions are served up to a context of "
            f"{MAX_POSITIONS}, and config.json has {base.config.max_position_embeddings}"
        )
    base.swarm_layout = RowLayout.of_config(base.config)
    base.forward = MethodType(_run, base)


def _run(
    self: Any, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: object
) -> Any:
    """Run the layers. A stage after the first gets rows of the layer before as ``inputs_embeds``."""
    this, layout = current_pass(), self.swarm_layout
    index: SelectedPositions | None = None
    if inputs_embeds is None:
        hidden = self.embed_tokens(input_ids)
        if layout.num_streams > 1:
            hidden = hidden.unsqueeze(2).expand(-1, -1, layout.num_streams, -1).contiguous()
    else:
        hidden, index = _unpack(layout, inputs_embeds, this.positions)
        this.hidden = hidden
    tables = self.rotary_emb(hidden, position_ids=this.positions)
    for layer in self.layers:
        hidden, selected = layer(
            hidden,
            attention_mask=None,
            position_embeddings=tables,
            position_ids=this.positions,
            prev_topk_indices=index,
        )
        index = index if selected is None else selected
    if this.keep_rows is None:
        assert this.output is not None, "the stage's last layer has run"
        this.output = _pack(layout, this.output, index)
        return BaseModelOutputWithPast(last_hidden_state=hidden)
    if layout.num_streams > 1:
        hidden = self.hc_head(hidden)
    output = BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))
    output.router_logits = None
    return output


def _pack(layout: RowLayout, hidden: torch.Tensor, index: SelectedPositions | None) -> torch.Tensor:
    """Return rows ``[1, tokens, width]`` of hidden states ``[1, tokens, (streams,) size]`` and a selection."""
    rows, selected = hidden.flatten(2), 2 * layout.num_selected
    if index is None or index.selection is None:
        return torch.nn.functional.pad(rows, (0, selected))
    return torch.cat((rows[0], index.selection.to_rows(rows.shape[1], layout.num_selected, rows.dtype)), -1)[None]


def _unpack(
    layout: RowLayout, rows: torch.Tensor, positions: torch.Tensor
) -> tuple[torch.Tensor, SelectedPositions | None]:
    """Return the hidden states, and the selection for later layers."""
    width = layout.num_streams * layout.hidden_size
    hidden = rows[..., :width].contiguous()
    if layout.num_streams > 1:
        hidden = hidden.view(*hidden.shape[:2], layout.num_streams, layout.hidden_size)
    if not layout.num_selected:
        return hidden, None
    selection = Selection.from_rows(rows[0, :, width:], positions[0, : rows.shape[1]])
    return hidden, SelectedPositions(layout.num_selected, selection)
