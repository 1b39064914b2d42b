"""Modules with a state between positions, in place of a model's, where the computation is recognised.

A replacement takes over the parts and weights of the model's module, under the same names, and is loaded as any other
module is. Only its forward is ours: projections, then a recurrence of ``recurrence``, which takes the state of each
sequence from the current pass.
"""

from __future__ import annotations

import math
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import nn

from swarm.stage.modules.recognition import find_activation, same_code
from swarm.stage.modules.recurrence import Segments, apply_function, convolve, norm_pieces, recur, scan


class AdoptedParts(nn.Module):
    """A module made of the parts and weights of the model's module, with another forward."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self._modules.update(part._modules)
        self._parameters.update(part._parameters)

    def prepare(self) -> None:
        """Compute what depends on the weights alone, once they have been read."""

    def _apply_part(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        """Return the result of a part."""
        result: torch.Tensor = self._modules[name](rows)  # type: ignore[misc]
        return result


class RecurrentModule(AdoptedParts):
    """A module with a state between positions: the inputs that its convolution needs again, and other numbers."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.layer_idx = int(part.layer_idx)
        self._conv = next((name for name, child in part.named_children() if isinstance(child, nn.Conv1d)), "")
        # of the state: numbers of the convolution, which come first, and of all
        self._state = self._numbers = 0
        if self._conv:
            channels, _, taps = self.get_parameter(f"{self._conv}.weight").shape
            self._state = self._numbers = (taps - 1) * channels

    @property
    def state_bytes(self) -> int:
        """Size of a sequence's state."""
        return self._numbers * torch.float32.itemsize

    def prepare(self) -> None:
        """Keep the convolution's weights, ``[taps, channels]``, as the kernels read them."""
        if self._conv:
            part: Any = self.get_submodule(self._conv)
            self._conv_weight = part.weight.detach().squeeze(1).float().t().contiguous()
            self._conv_bias = None if part.bias is None else part.bias.detach().float().contiguous()

    def _convolve(self, rows: torch.Tensor, function: str, segments: Segments) -> torch.Tensor:
        return convolve(rows, self._conv_weight, self._conv_bias, function, segments)


def _rates(logarithms: torch.Tensor) -> torch.Tensor:
    """Return the rates at which states decay."""
    return -apply_function("exp", logarithms.detach().float())


def _function_of(act: Any) -> str:
    """Return the name of an activation that the kernels apply."""
    function = find_activation(act) if isinstance(act, nn.Module) else {"silu": ("swish", "")}.get(act)
    return "" if function is None or function[1] else function[0]


class DeltaNet(RecurrentModule):
    """Linear attention by the gated delta rule, with one decay for each head (Qwen3-Next, Qwen3.5, Olmo-hybrid)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._key_heads, self._heads = part.num_k_heads, part.num_v_heads
        self._key_size, self._value_size = part.head_k_dim, part.head_v_dim
        self._key_dim, self._value_dim = self._key_size * self._key_heads, self._value_size * self._heads
        self._numbers += self._key_size * self._value_dim
        self._function = _function_of(part.activation)
        self._beta_scale = 2.0 if getattr(part, "allow_neg_eigval", False) else 1.0
        self._norm, self._out = ("norm", "out_proj") if hasattr(part, "out_proj") else ("o_norm", "o_proj")

    def prepare(self) -> None:
        super().prepare()
        self._rate = _rates(self.get_parameter("A_log"))
        self._step_bias = self.get_parameter("dt_bias").detach().float()
        norm = self.get_submodule(self._norm)
        self._norm_weight, self._epsilon = norm.weight.detach(), float(norm.variance_epsilon)  # type: ignore
        device = self._rate.device
        # the length of a query or key is 1, and queries are scaled
        self._ones = torch.ones(self._value_size, device=device)
        self._key_weight = torch.full((self._key_size,), self._key_size**-0.5, device=device)
        self._query_weight = torch.full((self._key_size,), 1.0 / self._key_size, device=device)

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys and values side by side; gates; and what betas and steps are made of."""
        raise NotImplementedError

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        mixed, gate, beta, step = self._project(hidden_states)
        count = len(mixed)
        segments = Segments(self.layer_idx, self._numbers)
        wide = self._convolve(mixed, self._function, segments).float()
        query, key, value = torch.split(wide, [self._key_dim, self._key_dim, self._value_dim], dim=1)
        epsilon = 1e-6 / self._key_size
        query = norm_pieces(query, self._key_size, epsilon, self._query_weight)
        key = norm_pieces(key, self._key_size, epsilon, self._key_weight)
        out = recur(
            query.view(count, self._key_heads, -1),
            key.view(count, self._key_heads, -1),
            value.view(count, self._heads, -1),
            apply_function("exp", self._rate * apply_function("softplus", step.float() + self._step_bias)).unsqueeze(
                -1
            ),
            beta=apply_function("sigmoid", beta.float()) * self._beta_scale,
            segments=segments,
            state=self._state,
        )
        # rounded as the model's own norm rounds
        dtype = hidden_states.dtype
        normed = norm_pieces(out.to(dtype).float(), self._value_size, self._epsilon, self._ones).to(dtype)
        weighted = (self._norm_weight * normed).float().view(count, -1)
        rows = (weighted * apply_function("swish", gate.float())).to(dtype)
        return self._apply_part(self._out, rows.unsqueeze(0))


class JointDeltaNet(DeltaNet):
    """The delta rule of Qwen3-Next, whose matrices have the outputs of each key head together."""

    def prepare(self) -> None:
        super().prepare()
        share = self._heads // self._key_heads
        sizes = [self._key_size, self._key_size, share * self._value_size, share * self._value_size]
        self._order = self._outputs_by_kind(sizes)
        self._small_order = self._outputs_by_kind([share, share])

    def _outputs_by_kind(self, sizes: list[int]) -> torch.Tensor:
        """Return the order that puts the outputs of each size together, instead of those of each key head."""
        places = torch.arange(self._key_heads * sum(sizes), device=self._rate.device).view(self._key_heads, -1)
        return torch.cat([part.flatten() for part in torch.split(places, sizes, dim=1)])

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        big = self._apply_part("in_proj_qkvz", hidden)[0][:, self._order]
        small = self._apply_part("in_proj_ba", hidden)[0][:, self._small_order]
        mixed, gate = torch.split(big, [2 * self._key_dim + self._value_dim, self._value_dim], dim=1)
        beta, step = torch.split(small, self._heads, dim=1)
        return mixed, gate, beta, step


class SplitDeltaNet(DeltaNet):
    """The delta rule of Qwen3.5, with one matrix for queries, keys and values."""

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        names = ("in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a")
        return tuple(self._apply_part(name, hidden)[0] for name in names)


class PlainDeltaNet(DeltaNet):
    """The delta rule of Olmo-hybrid, with a matrix for each of queries, keys, values, gates, betas and steps."""

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, gate, beta, step = (self._apply_part(f"{name}_proj", hidden)[0] for name in "qkvgba")
        return torch.cat([query, key, value], dim=1), gate, beta, step


class ChannelDeltaNet(RecurrentModule):
    """The delta rule with one decay for each channel of a head (Kimi)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads, self._size, self._function = part.num_heads, part.head_dim, _function_of(part.activation)
        self._numbers += self._heads * self._size * self._size

    def prepare(self) -> None:
        super().prepare()
        self._rate = _rates(self.get_parameter("forget_gate.A_log")).view(-1, 1)
        self._step_bias = self.get_parameter("forget_gate.dt_bias").detach().float()
        norm: Any = self.get_submodule("o_norm")
        self._norm_weight, self._epsilon = norm.weight.detach().float(), float(norm.variance_epsilon)
        device = self._rate.device
        self._key_weight = torch.full((self._size,), self._size**-0.5, device=device)
        self._query_weight = torch.full((self._size,), 1.0 / self._size, device=device)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        mixed = torch.cat([self._apply_part(f"{name}_proj", hidden_states)[0] for name in "qkv"], dim=1)
        segments, shape = Segments(self.layer_idx, self._numbers), (len(mixed), self._heads, self._size)
        wide = self._convolve(mixed, self._function, segments).float()
        query, key, value = wide.chunk(3, dim=1)
        gate: Any = self.get_submodule("forget_gate")
        step = gate.f_b_proj(gate.f_a_proj(hidden_states))[0].float() + self._step_bias
        out = recur(
            norm_pieces(query, self._size, 1e-6 / self._size, self._query_weight).view(shape),
            norm_pieces(key, self._size, 1e-6 / self._size, self._key_weight).view(shape),
            value.view(shape),
            apply_function("exp", self._rate * apply_function("softplus", step).view(shape)),
            beta=apply_function("sigmoid", self._apply_part("b_proj", hidden_states)[0].float()),
            segments=segments,
            state=self._state,
        )
        dtype = hidden_states.dtype
        normed = norm_pieces(out.to(dtype).float(), self._size, self._epsilon, self._norm_weight)
        opened = self._apply_part("g_b_proj", self._apply_part("g_a_proj", hidden_states))[0].float()
        rows = (normed.view(len(mixed), -1) * apply_function("sigmoid", opened)).to(dtype)
        return self._apply_part("o_proj", rows.unsqueeze(0))


class StateSpace(RecurrentModule):
    """Mamba-2: a state for each head, with one decay for all of its numbers."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads, self._size, self._groups = part.num_heads, part.head_dim, part.n_groups
        self._numbers_per_channel, self._width = part.ssm_state_size, part.intermediate_size
        self._numbers += self._heads * self._size * self._numbers_per_channel
        self._function, self._limits = _function_of(part.activation), part.time_step_limit

    def prepare(self) -> None:
        super().prepare()
        self._rate = _rates(self.get_parameter("A_log"))
        self._step_bias = self.get_parameter("dt_bias").detach().float()
        self._skip = self.get_parameter("D").detach().float().view(-1, 1)
        self._prepare_norm()

    def _prepare_norm(self) -> None:
        norm: Any = self.get_submodule("norm")
        self._norm_weight, self._epsilon = norm.weight.detach().float(), float(norm.variance_epsilon)
        self._norm_size = int(norm.group_size)
        self._ones = torch.ones(self._norm_size, device=self._rate.device)

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._apply_part("in_proj", hidden)[0]

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        rows = self._project(hidden_states)
        segments, shared = Segments(self.layer_idx, self._numbers), self._groups * self._numbers_per_channel
        gate, mixed, step = torch.split(rows, [self._width, self._width + 2 * shared, self._heads], dim=1)
        wide = self._convolve(mixed, self._function, segments).float()
        x, write, read = torch.split(wide, [self._width, shared, shared], dim=1)
        x = x.reshape(len(rows), self._heads, self._size)
        step = apply_function("softplus", step.float() + self._step_bias).clamp(*self._limits)
        out = recur(
            read.view(len(rows), self._groups, -1),
            write.view(len(rows), self._groups, -1),
            x * step.unsqueeze(-1),
            apply_function("exp", step * self._rate).unsqueeze(-1),
            segments=segments,
            state=self._state,
        )
        out += x * self._skip
        gated = self._gate(out.view(len(rows), -1), gate.float()).to(hidden_states.dtype)
        return self._apply_part("out_proj", gated.unsqueeze(0))

    def _gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Gate the float32 rows, and norm them."""
        gated = rows * apply_function("swish", gate)
        normed: torch.Tensor = norm_pieces(gated, self._norm_size, self._epsilon, self._ones) * self._norm_weight
        return normed


class ScaledStateSpace(StateSpace):
    """Mamba-2 of Falcon-H1: with multipliers, and a norm before the gate, after it, or none."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._in_scale, self._has_norm = float(part.ssm_in_multiplier), bool(part.mamba_rms_norm)
        config, shared = part.swarm_config, part.n_groups * part.ssm_state_size
        sizes = (self._width, self._width, shared, shared, self._heads)
        self._scales = [(float(scale), size) for scale, size in zip(config.ssm_multipliers, sizes, strict=True)]

    def _prepare_norm(self) -> None:
        dtype, device = self.get_parameter("D").dtype, self._rate.device
        self._multipliers = torch.cat([torch.full((size,), scale) for scale, size in self._scales]).to(device, dtype)
        if self._has_norm:
            norm: Any = self.get_submodule("norm")
            self._norm_weight, self._epsilon = norm.weight.detach().float(), float(norm.variance_epsilon)
            self._norm_size, self._is_norm_first = self._width // norm.n_groups, bool(norm.norm_before_gate)
            self._ones = torch.ones(self._norm_size, device=device)

    def _project(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._apply_part("in_proj", hidden * self._in_scale)[0] * self._multipliers

    def _gate(self, rows: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        if self._has_norm and not self._is_norm_first:
            return super()._gate(rows, gate)
        if self._has_norm:
            rows = norm_pieces(rows, self._norm_size, self._epsilon, self._ones) * self._norm_weight
        return rows * apply_function("swish", gate)


class SelectiveScan(RecurrentModule):
    """Mamba-1: some numbers for each channel, each with a decay of its own (Mamba, Falcon-Mamba, Jamba)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._width, self._count, self._rank = part.intermediate_size, part.ssm_state_size, part.time_step_rank
        self._numbers += self._width * self._count
        self._function = _function_of(part.activation)
        # Falcon-Mamba's norms have no weights
        self._epsilon = float(getattr(part, "rms_eps", 0.0))

    def prepare(self) -> None:
        super().prepare()
        self._rate = _rates(self.get_parameter("A_log")).t().contiguous()
        self._skip = self.get_parameter("D").detach().float()
        self._ones = torch.ones(max(self._rank, self._count), device=self._rate.device)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        mixed, gate = self._apply_part("in_proj", hidden_states)[0].chunk(2, dim=1)
        segments = Segments(self.layer_idx, self._numbers)
        x = self._convolve(mixed, self._function, segments)
        mix = self._apply_part("x_proj", x.unsqueeze(0))[0]
        parts = torch.split(mix, [self._rank, self._count, self._count], dim=1)
        step, write, read = (self._norm(name, part) for name, part in zip(("dt", "b", "c"), parts, strict=True))
        step = apply_function("softplus", self._apply_part("dt_proj", step.unsqueeze(0))[0].float())
        x = x.float()
        out = scan(x, step, self._rate, write=write.float(), read=read.float(), segments=segments, state=self._state)
        out += x * self._skip
        rows = (out * apply_function("swish", gate.float())).to(hidden_states.dtype)
        return self._apply_part("out_proj", rows.unsqueeze(0))

    def _norm(self, name: str, rows: torch.Tensor) -> torch.Tensor:
        if self._epsilon:
            return norm_pieces(rows.float(), rows.shape[1], self._epsilon, self._ones[: rows.shape[1]]).to(rows.dtype)
        name = f"{name}_layernorm"
        return self._apply_part(name, rows) if name in self._modules else rows


class ShortConvolution(RecurrentModule):
    """A convolution between two gates (LFM2)."""

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        before, after, x = self._apply_part("in_proj", hidden_states)[0].chunk(3, dim=1)
        segments = Segments(self.layer_idx, self._numbers)
        rows = after * self._convolve(before * x, "none", segments)
        return self._apply_part("out_proj", rows.unsqueeze(0))


class LightningAttention(RecurrentModule):
    """Linear attention in which each head's state decays at a constant rate (MiniMax)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads, self._size = part.num_attention_heads, part.head_dim
        self._numbers = self._heads * self._size * self._size
        # the model's own slopes, in float64, whose last bits no float32 shows
        factor = 1 - part.layer_idx / (part.num_hidden_layers - 1 + 1e-5) + 1e-5
        slopes = [2.0 ** (-8 * (head + 1) / self._heads) * factor for head in range(self._heads)]
        self._decay = torch.tensor([math.exp(-slope) for slope in slopes])

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        rows = self._apply_part("act_fn", self._apply_part("qkv_proj", hidden_states))[0].float()
        segments, count = Segments(self.layer_idx, self._numbers), len(rows)
        query, key, value = (each.contiguous() for each in rows.view(count, self._heads, -1).chunk(3, dim=2))
        decay = self._decay.to(rows.device).view(1, -1, 1).expand(count, -1, 1)
        out = recur(query, key, value, decay, segments=segments, state=0).view(1, count, -1).to(hidden_states.dtype)
        gate = apply_function("sigmoid", self._apply_part("output_gate", hidden_states))
        return self._apply_part("out_proj", gate * self._apply_part("norm", out)), None


class PlainBlock(AdoptedParts):
    """A layer of one mixer, whose sums have the rows' dtype: what one stage sends another has no more digits."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self.layer_idx, self.block_type = int(part.layer_idx), getattr(part, "block_type", "linear_attention")

    def forward(self, hidden_states: torch.Tensor, **kwargs: object) -> torch.Tensor:
        normed, mixer = self._apply_part("norm", hidden_states), self.get_submodule("mixer")
        is_attention = self.block_type == "full_attention"
        result: torch.Tensor = mixer(hidden_states=normed, **kwargs)[0] if is_attention else mixer(normed)
        return hidden_states + result


class SharedMixture(AdoptedParts):
    """Experts beside one that all rows share through a gate of its own (Qwen)."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        rows = hidden_states.view(-1, hidden_states.shape[-1])
        shared = self._apply_part("shared_expert", rows)
        _, weights, chosen = self.get_submodule("gate")(rows)
        routed = self.get_submodule("experts")(rows, chosen, weights)
        gate = apply_function("sigmoid", self._apply_part("shared_expert_gate", rows))
        result: torch.Tensor = (routed + gate * shared).view(hidden_states.shape)
        return result


# Classes whose forward is known, and our module for them. Of NemotronHMamba2Mixer's and others' code there is one copy.
_KNOWN: tuple[tuple[str, str, type[AdoptedParts]], ...] = (
    ("qwen3_next", "Qwen3NextGatedDeltaNet", JointDeltaNet),
    ("qwen3_next", "Qwen3NextSparseMoeBlock", SharedMixture),
    ("qwen3_5", "Qwen3_5GatedDeltaNet", SplitDeltaNet),
    ("olmo_hybrid", "OlmoHybridGatedDeltaNet", PlainDeltaNet),
    ("kimi_linear", "KimiLinearDeltaAttention", ChannelDeltaNet),
    ("mamba2", "Mamba2Mixer", StateSpace),
    ("falcon_h1", "FalconH1Mixer", ScaledStateSpace),
    ("mamba", "MambaMixer", SelectiveScan),
    ("falcon_mamba", "FalconMambaMixer", SelectiveScan),
    ("jamba", "JambaMambaMixer", SelectiveScan),
    ("lfm2", "Lfm2ShortConv", ShortConvolution),
    ("minimax", "MiniMaxLightningAttention", LightningAttention),
    ("mamba2", "Mamba2Block", PlainBlock),
    ("mamba", "MambaBlock", PlainBlock),
    ("falcon_mamba", "FalconMambaBlock", PlainBlock),
    ("nemotron_h", "NemotronHBlock", PlainBlock),
)


@cache
def _known_kinds() -> list[tuple[type[nn.Module], type[AdoptedParts]]]:
    return [
        (getattr(import_module(f"transformers.models.{file}.modeling_{file}"), name), ours)
        for file, name, ours in _KNOWN
    ]


def replace_recurrent(model: Any) -> None:
    """Replace the modules with a state between positions that are known. Others keep the model's code."""
    kinds = set(getattr(model.config.get_text_config(), "layer_types", None) or ())
    if not model._is_stateful and kinds <= {"full_attention", "sliding_attention", "attention"}:
        return
    for name, part in list(model.named_modules()):
        ours = next((ours for known, ours in _known_kinds() if same_code(part, known)), None)
        if ours is not None:
            part.swarm_config = model.config.get_text_config()
            model.set_submodule(name, ours(part))


def state_bytes(layers: nn.ModuleList) -> tuple[int, ...]:
    """Return the size of each layer's state of a sequence; empty if no layer has one."""
    sizes = tuple(
        sum(part.state_bytes for part in layer.modules() if isinstance(part, RecurrentModule)) for layer in layers
    )
    return sizes if any(sizes) else ()


def has_attention(layer: nn.Module) -> bool:
    """Whether the layer of a model with states also keeps keys and values."""
    return any(hasattr(part, "num_key_value_groups") for part in layer.modules())
