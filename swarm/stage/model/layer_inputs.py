"""Forward of models whose layers read more than the layer before them: Gemma 3n and 4, and Zamba.

Each layer of Gemma's gets an input of its own, which is looked up by token, and the last layers attend to keys and
values of earlier ones. Some of Zamba's layers read the embedded token. A stage passes all of this on beside the hidden
states, in one wide row per position. What holds for rows (logs, replays, checksums, comparisons) then holds here, too.
A model can be cut anywhere, because a layer that shares keys and values, or weights, stores a copy of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from swarm.stage.attention.passes import current_pass
from swarm.stage.model.sizes import shared_sources

# Modules with weights that run after the layers, by base model. Others run before them, whatever their order is.
AFTER_LAYERS = {
    "Gemma3nTextModel": ("norm", "altup_unembed_projections"),
    "Gemma4TextModel": ("norm",),
    "Gemma4UnifiedTextModel": ("norm",),
    "ZambaModel": ("final_layernorm",),
    "Zamba2Model": ("final_layernorm",),
    "ZayaModel": ("norm",),
}
_WITH_EMBEDDING = ("zamba", "zamba2")  # kinds with layers that read the embedded token, which is their own input
INPUT_SCALES = ("input_hidden_states_scale", "input_hidden_states_bias")  # of Zaya
_KeysValues = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class RowLayout:
    """Parts of a row that stages pass on, in this order."""

    hidden_size: int
    num_streams: int  # hidden states of a position: Gemma 3n has several
    num_layers: int
    input_size: int  # of each layer's own input
    shared: tuple[tuple[str, int, int], ...]  # type of layers that share keys and values, number and size of heads
    num_selected: int = 0  # positions that an index selects for later layers, too (``shared_indexes``)

    @classmethod
    def of_config(cls, config: Any) -> RowLayout:
        """Return the layout for a text model's configuration. For most kinds, a row is one hidden state."""
        if config.model_type in _WITH_EMBEDDING:
            return cls(config.hidden_size, 1, 1, config.hidden_size, ())
        if config.model_type == "zaya":  # a router reads what the one before it computed
            return cls(config.hidden_size, 1, 1, config.router_hidden_size, ())
        kinds = getattr(config, "layer_types", None) or ()
        shared = []
        for layer in shared_sources(kinds, getattr(config, "num_kv_shared_layers", 0)):
            own = config.per_layer_config[layer]
            shared.append((kinds[layer], own.num_key_value_heads, own.head_dim))
        size = getattr(config, "hidden_size_per_layer_input", 0)
        streams: int = getattr(config, "altup_num_inputs", getattr(config, "hc_mult", 1))
        num_selected = config.index_topk if "shared" in (getattr(config, "indexer_types", None) or ()) else 0
        return cls(config.hidden_size, streams, config.num_hidden_layers, size or 0, tuple(shared), num_selected)

    @property
    def width(self) -> int:
        return sum(self._widths())

    def _widths(self) -> Iterator[int]:
        yield self.num_streams * self.hidden_size
        yield self.num_layers * self.input_size
        for _, heads, size in self.shared:
            yield from (heads * size, heads * size)
        if self.num_selected:
            yield 2 * self.num_selected

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


def token_dimension(layer: Any) -> int:
    """Return the dimension of a layer's hidden states that counts tokens. Gemma 3n's streams come before it, and those
    of Hy 4 after it."""
    return -3 if type(layer).__name__ == "HYV4DecoderLayer" else -2


def is_wide(base: Any) -> bool:
    """Whether rows of this base model have more than a hidden state."""
    return type(base).__name__ in AFTER_LAYERS and RowLayout.of_config(base.config).width > base.config.hidden_size


def replace_forward(base: Any) -> None:
    """Replace the forward of a base model whose rows are wide."""
    base.swarm_layout = RowLayout.of_config(base.config)
    if base.config.model_type == "zaya":
        base.input_scale, base.forward = _InputScale(base), MethodType(_run_with_router, base)
        return
    if base.config.model_type in _WITH_EMBEDDING:
        base.forward = MethodType(_run_with_embedding, base)
        for index, layer in enumerate(base.layers):
            for part in layer.modules():
                _keep_own_adapter(part, index)
        return
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


class _InputScale(nn.Module):
    """A factor and a bias for embedded tokens, which Zaya's base model has itself."""

    def __init__(self, base: Any) -> None:
        super().__init__()
        self._parameters.update({name: base._parameters.pop(name) for name in INPUT_SCALES})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        bias, scale = (self.get_parameter(f"input_hidden_states_{name}") for name in ("bias", "scale"))
        return (hidden + bias) * scale


def _run_with_router(
    self: Any, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: object
) -> Any:
    """Run the layers of Zaya, which take and return whole rows: hidden states, and what the router computed."""
    this, rows, size = current_pass(), inputs_embeds, self.config.hidden_size
    if rows is None:
        hidden = self.input_scale(self.embed_tokens(input_ids))
        rows = torch.cat((hidden, hidden.new_zeros(*hidden.shape[:2], self.config.router_hidden_size)), -1)
    kinds = self.config.layer_types
    tables = {kind: self.rotary_emb(rows, this.positions, kind) for kind in set(kinds)}
    for kind, layer in zip(kinds, self.layers, strict=True):
        rows = layer(rows, position_embeddings=tables[kind], position_ids=this.positions)
    assert rows is not None, "a stage has tokens or rows"
    return _output(rows if this.keep_rows is None else self.norm(rows[..., :size].contiguous()))


def _keep_own_adapter(part: Any, layer: int) -> None:
    """Drop the adapters that a block shared with other layers has for those."""
    if hasattr(part, "num_key_value_groups"):
        part.layer_idx = layer
    own = getattr(part, "layer_dic", {}).get(layer)
    for adapters in [child for child in part.children() if isinstance(child, nn.ModuleList)] if own is not None else ():
        for other in range(len(adapters)):
            if other != own:
                adapters[other] = nn.Identity()


def _run_with_embedding(
    self: Any, input_ids: torch.Tensor | None = None, inputs_embeds: torch.Tensor | None = None, **_: object
) -> Any:
    """Run the layers of Zamba. A stage after the first gets rows of the layer before as ``inputs_embeds``."""
    this, layout = current_pass(), self.swarm_layout
    if inputs_embeds is not None:
        hidden, inputs, shared = layout.unpack(inputs_embeds)
        this.hidden = hidden
    else:
        hidden = self.embed_tokens(input_ids)
        inputs, shared = hidden.unsqueeze(2), {}
    tables = self.rotary_emb(hidden, this.positions) if hasattr(self, "rotary_emb") else None
    for index, layer in enumerate(self.layers):
        hidden = layer(hidden, inputs[:, :, 0], index, position_embeddings=tables, position_ids=this.positions)
    if this.keep_rows is None:
        assert this.output is not None, "the stage's last layer has run"
        this.output = layout.pack(this.output, inputs, shared)
        return _output(hidden)
    return _output(self.final_layernorm(hidden))


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
