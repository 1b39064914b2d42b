"""Forward of models whose layers read more than the layer before them: Gemma 3n and 4.

Each layer gets an input of its own, which is looked up by token, and the last layers attend to keys and values of
earlier ones. A stage passes all of this on beside the hidden states, in one wide row per position. What holds for rows
(logs, replays, checksums, comparisons) then holds here, too. A model can be cut anywhere, because a layer that shares
keys and values stores a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from transformers.modeling_outputs import BaseModelOutputWithPast

from swarm.stage.attention.passes import current_pass
from swarm.stage.model.sizes import shared_sources

# Modules with weights that run after the layers, by base model. Others run before them, whatever their order is.
AFTER_LAYERS = {
    "Gemma3nTextModel": ("norm", "altup_unembed_projections"),
    "Gemma4TextModel": ("norm",),
    "Gemma4UnifiedTextModel": ("norm",),
}
_KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Parts of a row that stages pass on, in this order."""

    hidden_size: int
    num_streams: int  # hidden states of a position: Gemma 3n has several
    num_layers: int
    input_size: int  # of each layer's own input
    shared: tuple[tuple[str, int, int], ...]  # type of layers that share keys and values, number and size of heads

    @classmethod
    def of_config(cls, config: Any) -> RowLayout:
        """Return the layout for a text model's configuration. For most kinds, a row is one hidden state."""
        kinds = getattr(config, "layer_types", None) or ()
        shared = []
        for layer in shared_sources(kinds, getattr(config, "num_kv_shared_layers", 0)):
            own = config.per_layer_config[layer]
            shared.append((kinds[layer], own.num_key_value_heads, own.head_dim))
        streams, size = getattr(config, "altup_num_inputs", 1), getattr(config, "hidden_size_per_layer_input", 0)
        return cls(config.hidden_size, streams, config.num_hidden_layers, size or 0, tuple(shared))

    @property
    def width(self) -> int:
        return sum(self._widths())

    def _widths(self) -> Iterator[int]:
        yield self.num_streams * self.hidden_size
        yield self.num_layers * self.input_size
        for _, heads, size in self.shared:
            yield from (heads * size, heads * size)

    def pack(
        self, hidden: torch.Tensor, inputs: torch.Tensor | None, shared: Mapping[str, _KeysValues]
    ) -> torch.Tensor:
        """Return rows ``[1, tokens, width]``. Keys and values of layers that come later are zeros."""
        if self.num_streams > 1:
            hidden = hidden.permute(1, 2, 0, 3).flatten(2)
        parts = [hidden] if inputs is None else [hidden, inputs.flatten(2)]
        for kind, heads, size in self.shared:
            if kind in shared:
                parts += [part.transpose(1, 2).flatten(2) for part in shared[kind]]
            else:
                parts.append(hidden.new_zeros(*hidden.shape[:2], 2 * heads * size))
        return torch.cat(parts, -1)

    def unpack(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, dict[str, _KeysValues]]:
        """Return hidden states, the layers' inputs, and keys and values by type of layer."""
        hidden, inputs, *rest = torch.split(rows, list(self._widths()), -1)
        if self.num_streams > 1:
            hidden = hidden.view(*rows.shape[:2], self.num_streams, -1).permute(2, 0, 1, 3)
        shared = {}
        for (kind, num, size), *pair in zip(self.shared, rest[::2], rest[1::2], strict=True):
            key, value = (part.view(*rows.shape[:2], num, size).transpose(1, 2) for part in pair)
            shared[kind] = (key, value)
        own = inputs.view(*rows.shape[:2], self.num_layers, -1) if self.input_size else None
        return hidden.contiguous(), own, shared


def is_wide(base: Any) -> bool:
    """Whether rows of this base model have more than a hidden state."""
    return type(base).__name__ in AFTER_LAYERS and RowLayout.of_config(base.config).width > base.config.hidden_size


def replace_forward(base: Any) -> None:
    """Replace the forward of a base model whose rows are wide."""
    base.swarm_layout = RowLayout.of_config(base.config)
    # Gemma 3n keeps these factors as buffers, in the dtype of the computation.
    base.swarm_rounds_factors = bool(base._buffers)
    base._buffers.clear()
    base.forward = MethodType(_run, base)
    for part in base.modules():
        if type(part).__name__ == "Gemma3nTextAltUp":
            part.predict = MethodType(_predict, part)


def _run(
    self: Any, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: object
) -> Any:
    """Run the layers. A stage after the first gets rows of the layer before as ``inputs_embeds``."""
    this, layout, kinds = current_pass(), self.swarm_layout, self.config.layer_types
    if inputs_embeds is not None:
        hidden, inputs, shared = layout.unpack(inputs_embeds)
        this.hidden = hidden
    else:
        embedded = self.embed_tokens(input_ids)
        hidden, inputs, shared = _split_streams(self, embedded), _layer_inputs(self, input_ids, embedded), {}
    tables = {kind: self.rotary_emb(hidden, this.positions, kind) for kind in set(kinds)}
    for index, layer in enumerate(self.layers):
        hidden = layer(
            hidden,
            per_layer_input=None if inputs is None else inputs[:, :, index],
            shared_kv_states=shared,
            position_embeddings=tables[kinds[index]],
            attention_mask=None,
            position_ids=this.positions,
        )
    if this.keep_rows is None:
        assert this.output is not None, "the stage's last layer has run"
        this.output = layout.pack(this.output, inputs, shared)
        return _output(hidden)
    return _output(self.norm(_join_streams(self, hidden)))


def _output(hidden: torch.Tensor) -> Any:
    """Return a base model's result with all that Gemma's models read from it."""
    output = BaseModelOutputWithPast(last_hidden_state=hidden)
    output.shared_kv_states = output.router_logits = None
    return output


def _layer_inputs(self: Any, ids: Any, embedded: torch.Tensor) -> torch.Tensor | None:
    """Return each layer's input ``[1, tokens, layers, size]``: from a table, and from the embedded token."""
    config = self.config
    if not config.hidden_size_per_layer_input:
        return None
    # The last tokens of Gemma 3n's vocabulary stand for images and sounds, and have no row.
    looked_up = self.embed_tokens_per_layer(torch.where(ids < config.vocab_size_per_layer_input, ids, 0))
    projected = self.per_layer_model_projection(embedded) * _factor(self, config.hidden_size**-0.5, embedded)
    projected = self.per_layer_projection_norm(projected.unflatten(2, (config.num_hidden_layers, -1)))
    inputs: torch.Tensor = (projected + looked_up.view_as(projected)) * _factor(self, 2.0**-0.5, embedded)
    return inputs


def _factor(self: Any, value: float, like: torch.Tensor) -> Any:
    return torch.tensor(value, dtype=like.dtype, device=like.device) if self.swarm_rounds_factors else value


def _split_streams(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    """Return the streams ``[streams, 1, tokens, size]`` that Gemma 3n's layers change."""
    if self.swarm_layout.num_streams == 1:
        return hidden
    magnitude = _magnitude(hidden)
    return torch.stack([hidden, *(_rescale(part(hidden), magnitude) for part in self.altup_projections)])


def _join_streams(self: Any, streams: torch.Tensor) -> torch.Tensor:
    if self.swarm_layout.num_streams == 1:
        return streams
    first, *others = streams
    magnitude, parts = _magnitude(first), zip(self.altup_unembed_projections, others, strict=True)
    return torch.stack([first, *(_rescale(part(other), magnitude) for part, other in parts)]).mean(0)


def _magnitude(hidden: torch.Tensor, least: float | None = None) -> torch.Tensor:
    squares = (hidden**2).mean(-1, keepdim=True)
    return (squares if least is None else squares.clamp(min=least)).sqrt()


def _rescale(hidden: torch.Tensor, magnitude: torch.Tensor) -> torch.Tensor:
    return hidden * magnitude / _magnitude(hidden, 1e-5)


def _predict(self: Any, streams: torch.Tensor) -> torch.Tensor:
    """Mix the streams. The model multiplies small matrices, by a kernel that depends on the number of rows."""
    active, num = streams[self.config.altup_active_idx], len(streams)
    mix = self.prediction_coefs(self.compute_router_modalities(active)).unflatten(2, (num, num)).float()
    wide, mixed = streams.float(), []
    for index in range(num):
        terms = [wide[other] * mix[..., index, other, None] for other in range(num)]
        mixed.append(sum(terms[1:], terms[0]).to(streams.dtype))
    return torch.stack(mixed) + streams
