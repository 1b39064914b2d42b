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

from swarm.stage.attention.passes import current_pass
from swarm.stage.matmul import linears
from swarm.stage.modules.latents import build_head_products
from swarm.stage.modules.norms import NativeLayerNorm
from swarm.stage.modules.recognition import find_activation, same_code
from swarm.stage.modules.recurrence import (
    Segments,
    apply_function,
    convolve,
    norm_pieces,
    raise_exponents,
    recur,
    scan,
    shift,
)
from swarm.stage.native.linears import NativeLinear


class AdoptedParts(nn.Module):
    """A module made of the parts and weights of the model's module, with another forward."""

    def __init__(self, part: Any) -> None:
        super().__init__()
        self._modules.update(part._modules)
        self._parameters.update(part._parameters)

    def build_products(self, kernel: linears.LinearKernel) -> None:
        """Build the products with weights that no linear layer has, once they have been read."""

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
        out = recur(
            norm_pieces(query, self._size, 1e-6 / self._size, self._query_weight).view(shape),
            norm_pieces(key, self._size, 1e-6 / self._size, self._key_weight).view(shape),
            value.view(shape),
            apply_function("exp", self._decay_rates(hidden_states, shape)),
            beta=apply_function("sigmoid", self._apply_part("b_proj", hidden_states)[0].float()),
            segments=segments,
            state=self._state,
        )
        dtype = hidden_states.dtype
        normed = norm_pieces(out.to(dtype).float(), self._size, self._epsilon, self._norm_weight)
        rows = (normed.view(len(mixed), -1) * apply_function("sigmoid", self._open(hidden_states))).to(dtype)
        return self._apply_part("o_proj", rows.unsqueeze(0))

    def _decay_rates(self, hidden: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return the logarithms of decays."""
        gate: Any = self.get_submodule("forget_gate")
        step = gate.f_b_proj(gate.f_a_proj(hidden))[0].float() + self._step_bias
        return self._rate * apply_function("softplus", step).view(shape)

    def _open(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return what the gates of the result are made of."""
        return self._apply_part("g_b_proj", self._apply_part("g_a_proj", hidden))[0].float()


class BoundedDeltaNet(ChannelDeltaNet):
    """The delta rule of Ling, whose decays may have a lower bound, and whose gates have whole matrices."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        gate = part.forget_gate
        self._lower_bound = float(gate.lower_bound) if gate.safe_gate else None

    def _decay_rates(self, hidden: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        gate: Any = self.get_submodule("forget_gate")
        step = (gate.f_proj(hidden)[0].float() + self._step_bias).view(shape)
        if self._lower_bound is None:
            return self._rate * apply_function("softplus", step)
        return self._lower_bound * apply_function("sigmoid", -self._rate * step)

    def _open(self, hidden: torch.Tensor) -> torch.Tensor:
        return self._apply_part("g_proj", hidden)[0].float()


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


class HeadScan(SelectiveScan):
    """Mamba-1 of several heads, each with matrices of its own (Zamba)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads = part.n_mamba_heads

    def build_products(self, kernel: linears.LinearKernel) -> None:
        for name in ("x_proj", "dt_proj"):
            weights: Any = self._parameters.pop(f"{name}_weight")
            self._modules[name] = build_head_products(weights.detach().contiguous(), kernel)

    def prepare(self) -> None:
        RecurrentModule.prepare(self)
        self._rate = _rates(self.get_parameter("A_log")).transpose(1, 2).contiguous()  # [heads, numbers, channels]
        self._skip = self.get_parameter("D").detach().float().flatten()
        self._step_bias = self.get_parameter("dt_proj_bias").detach().float().unsqueeze(1)

    def forward(self, hidden_states: torch.Tensor, **_: object) -> torch.Tensor:
        mixed, gate = self._apply_part("in_proj", hidden_states)[0].view(-1, self._width, 2).unbind(2)
        segments, size = Segments(self.layer_idx, self._numbers), self._width // self._heads
        x = self._convolve(mixed.contiguous(), self._function, segments)
        by_head = x.view(len(x), self._heads, size)
        mix = self._modules["x_proj"](by_head, self._rank + 2 * self._count)  # type: ignore[misc]
        step, write, read = torch.split(mix, [self._rank, self._count, self._count], dim=2)
        step = self._modules["dt_proj"](step, size).transpose(0, 1).float() + self._step_bias  # type: ignore[misc]
        step, wide = apply_function("softplus", step), by_head.transpose(0, 1).float()
        write, read = write.transpose(0, 1), read.transpose(0, 1)
        parts = [
            scan(
                wide[head],
                step[head],
                self._rate[head],
                write=write[head].float(),
                read=read[head].float(),
                segments=segments,
                state=self._state + head * self._count * size,
            )
            for head in range(self._heads)
        ]
        out = torch.cat(parts, dim=1) + x.float() * self._skip
        rows = (out * apply_function("swish", gate.float())).to(hidden_states.dtype)
        return self._apply_part("out_proj", rows.unsqueeze(0))


class GatedRecurrence(RecurrentModule):
    """A number for each channel, whose decay and whose input have gates (RecurrentGemma)."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads, self._width = part.rg_lru.num_attention_heads, part.lru_width
        self._numbers += self._width

    def build_products(self, kernel: linears.LinearKernel) -> None:
        rule = self.get_submodule("rg_lru")
        for name in ("input_gate", "recurrent_gate"):
            weights: Any = rule._parameters.pop(f"{name}_weight")
            self._modules[name] = build_head_products(weights.detach().transpose(1, 2).contiguous(), kernel)

    def prepare(self) -> None:
        super().prepare()
        rule: Any = self.get_submodule("rg_lru")
        self._rate = -8.0 * apply_function("softplus", rule.recurrent_param.detach().float())
        self._biases = {
            name: getattr(rule, f"{name}_bias").detach().float().flatten() for name in ("input_gate", "recurrent_gate")
        }

    def forward(self, hidden_states: torch.Tensor, **_: object) -> tuple[torch.Tensor, None]:
        beside = self._apply_part("act_fn", self._apply_part("linear_y", hidden_states))
        segments = Segments(self.layer_idx, self._numbers)
        x = self._convolve(self._apply_part("linear_x", hidden_states)[0], "none", segments)
        rates = self._gate("recurrent_gate", x) * self._rate
        scale = torch.sqrt((1.0 - apply_function("exp", 2.0 * rates)).clamp(min=0.0))
        scale = torch.where((current_pass().positions[0] == 0).unsqueeze(1), 1.0, scale)
        one = torch.ones(len(x), 1, 1, device=x.device)
        out = recur(
            one,
            one,
            (x.float() * self._gate("input_gate", x) * scale).unsqueeze(2),
            apply_function("exp", rates).unsqueeze(2),
            segments=segments,
            state=self._state,
        )
        return self._apply_part("linear_out", out.view(hidden_states.shape[0], len(x), -1).to(x.dtype) * beside), None

    def _gate(self, name: str, x: torch.Tensor) -> torch.Tensor:
        by_head = x.view(len(x), self._heads, -1)
        products = self._modules[name](by_head, self._width // self._heads)  # type: ignore[misc]
        return apply_function("sigmoid", products.reshape(len(x), -1).float() + self._biases[name])


class WeightedMeanBlock(RecurrentModule):
    """A layer of RWKV-4: a mean of all values before, which their keys and distances weight, and a gated product.

    The state has the last inputs of both parts, then the mean's numerator and denominator for each channel, and the
    exponent that both are divided by.
    """

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._width, self._channels = part.config.hidden_size, part.attention.attention_hidden_size
        self._numbers = 2 * self._width + 3 * self._channels
        # As transformers divides the sums, so that they stay in float16's range.
        every = part.config.rescale_every
        self._scale = 0.5 ** (self.layer_idx // every) if every > 0 else 1.0
        self._is_halved = every > 0 and (self.layer_idx + 1) % every == 0

    def prepare(self) -> None:
        super().prepare()
        self._rate = _rates(self.get_parameter("attention.time_decay"))
        self._bonus = self.get_parameter("attention.time_first").detach().float()

    def forward(self, hidden: torch.Tensor, **_: object) -> torch.Tensor:
        segments = Segments(self.layer_idx, self._numbers)
        if "pre_ln" in self._modules:
            hidden = self._apply_part("pre_ln", hidden)
        hidden = hidden + self._mix_times(self._apply_part("ln1", hidden)[0], segments) * self._scale
        hidden = hidden + self._mix_channels(self._apply_part("ln2", hidden)[0], segments) * self._scale
        return hidden / 2 if self._is_halved else hidden

    def _mix_times(self, rows: torch.Tensor, segments: Segments) -> torch.Tensor:
        part: Any = self.get_submodule("attention")
        before = shift(rows, segments, 0)
        key, value, gate = (
            getattr(part, name)(_blend(rows, before, getattr(part, f"time_mix_{name}")))[0]
            for name in ("key", "value", "receptance")
        )
        means = self._weigh(key.float(), value.float(), segments).to(rows.dtype)
        result: torch.Tensor = part.output((apply_function("sigmoid", gate) * means).unsqueeze(0))
        return result

    def _mix_channels(self, rows: torch.Tensor, segments: Segments) -> torch.Tensor:
        part: Any = self.get_submodule("feed_forward")
        before = shift(rows, segments, self._width)
        key, gate = (
            getattr(part, name)(_blend(rows, before, getattr(part, f"time_mix_{name}")))
            for name in ("key", "receptance")
        )
        result: torch.Tensor = apply_function("sigmoid", gate) * part.value(torch.relu(key).square())
        return result

    def _weigh(self, key: torch.Tensor, value: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Return the weighted means of float32 values ``[rows, channels]``."""
        sums, exponents = 2 * self._width, 2 * self._width + 2 * self._channels
        before, after = raise_exponents(self._rate.expand_as(key), key, segments, exponents, _LOWEST)
        written, one = apply_function("exp", key - after), key.new_ones(len(key), 1, 1)
        decay = apply_function("exp", before + self._rate - after).unsqueeze(2)
        both = recur(one, one, torch.stack((written * value, written), 2), decay, segments=segments, state=sums)
        numerator, denominator = shift(both.flatten(1), segments, sums, keep=False).view_as(both).unbind(2)
        own = key + self._bonus
        largest = torch.maximum(before, own)
        old, new = apply_function("exp", before - largest), apply_function("exp", own - largest)
        return (old * numerator + new * value) / (old * denominator + new)


_LOWEST = -1e38  # an exponent of no weight


def _blend(rows: torch.Tensor, before: torch.Tensor, share: torch.Tensor) -> torch.Tensor:
    """Return a share of each row and the rest of the row before it, ``[1, rows, width]``."""
    return rows * share + before * (1 - share)


class MatrixMemory(RecurrentModule):
    """A matrix for each head, which gates with exponentials write and forget (xLSTM).

    The state has the matrices, each with one more column for the sum of all keys, then each head's exponent, by which
    all its numbers are divided.
    """

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        config = part.config
        self._heads, self._is_fused = config.num_heads, config.weight_mode == "fused"
        self._keys, self._values = part.qk_dim // self._heads, part.v_dim // self._heads
        self._numbers = self._heads * (self._keys * (self._values + 1) + 1)
        self._cap, self._epsilon, self._norm_epsilon = float(config.gate_soft_cap), config.eps, config.norm_eps

    def build_products(self, kernel: linears.LinearKernel) -> None:
        is_native = kernel is NativeLinear
        one = torch.ones(self._values, device=self.get_parameter("multihead_norm.weight").device)
        self._norm = (
            NativeLayerNorm(one, None, self._norm_epsilon)
            if is_native
            else nn.LayerNorm(self._values, self._norm_epsilon, elementwise_affine=False)
        )

    def forward(self, hidden_states: torch.Tensor, state: object = None) -> tuple[torch.Tensor, None]:
        query, key, value, gate, new, forget = self._project(hidden_states)
        segments, count = Segments(self.layer_idx, self._numbers), len(query)
        new = self._cap * torch.tanh(new.float() / self._cap)
        kept = -apply_function("softplus", -self._cap * torch.tanh(forget.float() / self._cap))
        before, after = raise_exponents(kept, new, segments, self._numbers - self._heads, 0.0)
        values = value.float().view(count, self._heads, -1)
        written = apply_function("exp", new - after).unsqueeze(2)
        out = recur(
            (query.float() * self._keys**-0.5).view(count, self._heads, -1),
            key.float().view(count, self._heads, -1).contiguous(),
            torch.cat((values * written, written), dim=2),
            apply_function("exp", before + kept - after).unsqueeze(2),
            segments=segments,
            state=0,
        )
        weights = torch.maximum(out[..., -1:].abs(), apply_function("exp", -after).unsqueeze(2)) + self._epsilon
        dtype, norm = hidden_states.dtype, self.get_submodule("multihead_norm")
        rows = self._norm((out[..., :-1] / weights).view(-1, self._values)).view(count, -1).to(dtype) * norm.weight
        if norm.bias is not None:
            rows = rows + norm.bias
        return self._apply_part("out_proj", (apply_function("sigmoid", gate) * rows).unsqueeze(0)), None

    def _project(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return queries, keys, values, and what three gates are made of: of the result, of new and of old values."""
        if not self._is_fused:
            names = ("q", "k", "v", "ogate_preact", "igate_preact", "fgate_preact")
            return tuple(self._apply_part(name, hidden)[0] for name in names)
        keys, values = self._heads * self._keys, self._heads * self._values
        wide, gates = self._apply_part("qkv_opreact", hidden)[0], self._apply_part("ifgate_preact", hidden)[0]
        return (*torch.split(wide, [keys, keys, values, values], dim=1), *gates.chunk(2, dim=1))


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


class ConvolvedHeads(RecurrentModule):
    """Queries and keys that convolutions mix with those before, and values of which half are of the row before (Zaya).

    The state has the depthwise convolution's inputs, its last results without their bias, which the heads' convolution
    needs again, and the last row's half of the values.
    """

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._heads, self._key_heads, self._size = part.num_attention_heads, part.num_key_value_heads, part.head_dim
        self._taps, self._has_bias = part.grouped_kernel_size, bool(part.config.attention_bias)
        self._width = (self._heads + self._key_heads) * self._size
        self._numbers += (self._taps - 1) * self._width + self._key_heads * self._size // 2

    def build_products(self, kernel: linears.LinearKernel) -> None:
        part: Any = self.get_submodule("conv_qk_grouped")
        by_tap = part.weight.detach().view(-1, self._size, self._size, self._taps).transpose(2, 3)
        self._modules["by_head"] = build_head_products(by_tap.flatten(2).contiguous(), kernel)

    def prepare(self) -> None:
        super().prepare()
        self._first_bias, self._conv_bias = self._conv_bias, None
        part: Any = self.get_submodule("conv_qk_grouped")
        self._second_bias = part.bias.detach().float()

    def forward(self, hidden_states: torch.Tensor, *_: object) -> tuple[torch.Tensor, ...]:
        segments, count = Segments(self.layer_idx, self._numbers), hidden_states.shape[1]
        query, key = (self._apply_part(name, hidden_states)[0] for name in ("q_proj", "k_proj"))
        mixed = self._mix(torch.cat((query, key), dim=1), segments).view(count, -1, self._size)
        groups = self._heads // self._key_heads
        query, key = query.view(count, -1, groups, self._size).float(), key.view(count, -1, 1, self._size).float()
        query = (query + key) * 0.5
        key = sum(query.unbind(2)[1:], query[:, :, 0]) / groups
        now, later = (self._apply_part(f"v_proj_{name}", hidden_states)[0] for name in ("current", "delayed"))
        before = shift(later, segments, self._numbers - later.shape[1])
        if self._has_bias:  # what it makes of zeros stands before the first
            start = self._apply_part("v_proj_delayed", torch.zeros_like(hidden_states[:, :1]))[0]
            before = torch.where((current_pass().positions[0] == 0).unsqueeze(1), start, before)
        parts = (
            mixed[:, : self._heads] + query.flatten(1, 2),
            mixed[:, self._heads :] + key,
            torch.cat((now, before), dim=1).view(count, -1, self._size),
        )
        return tuple(part.to(hidden_states.dtype).unsqueeze(0) for part in parts)

    def _mix(self, rows: torch.Tensor, segments: Segments) -> torch.Tensor:
        """Return the float32 results of both convolutions. The second one's inputs before the first row are biases."""
        rows, state = self._convolve(rows, "none", segments), self._state
        inputs = [rows]
        for _ in range(self._taps - 1):
            inputs.insert(0, shift(inputs[0], segments, state))
            state += self._width
        if self._first_bias is not None:
            inputs = [(each.float() + self._first_bias).to(rows.dtype) for each in inputs]
        by_head = torch.stack([each.view(len(rows), -1, self._size) for each in inputs], dim=2).flatten(2)
        products = self._modules["by_head"](by_head, self._size)  # type: ignore[misc]
        mixed: torch.Tensor = products.reshape(len(rows), -1).float() + self._second_bias
        return mixed


class HeadLengths(AdoptedParts):
    """Norms of queries and keys, with a factor for each key head (Zaya)."""

    def prepare(self) -> None:
        self._factors = self.get_parameter("temp").detach()

    def forward(self, query: torch.Tensor, key: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ones, dtype = torch.ones(query.shape[-1], device=query.device), query.dtype
        query, key = (norm_pieces(rows.float(), rows.shape[-1], 1e-12, ones).to(dtype) for rows in (query, key))
        return query, key * self._factors.view(-1, 1)


class RoutedBlock(AdoptedParts):
    """A layer of Zaya, whose router reads what the router before it computed: it follows a row's hidden state."""

    def __init__(self, part: Any) -> None:
        super().__init__(part)
        self._sizes = [part.hidden_size, part.mlp.gate.router_hidden_size]

    def forward(self, rows: torch.Tensor, **kwargs: object) -> torch.Tensor:
        hidden, states = (part.contiguous() for part in torch.split(rows, self._sizes, dim=-1))
        mixed, _ = self.get_submodule("self_attn")(hidden_states=self._apply_part("input_layernorm", hidden), **kwargs)
        hidden = self.get_submodule("post_attention_residual_scale")(mixed, hidden)
        mixed, states = self.get_submodule("mlp")(self._apply_part("post_attention_layernorm", hidden), states)
        return torch.cat((self.get_submodule("post_mlp_residual_scale")(mixed, hidden), states), dim=-1)


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
    ("bailing_hybrid", "BailingHybridDeltaAttention", BoundedDeltaNet),
    ("mamba2", "Mamba2Mixer", StateSpace),
    ("falcon_h1", "FalconH1Mixer", ScaledStateSpace),
    ("mamba", "MambaMixer", SelectiveScan),
    ("falcon_mamba", "FalconMambaMixer", SelectiveScan),
    ("jamba", "JambaMambaMixer", SelectiveScan),
    ("zamba", "ZambaMambaMixer", HeadScan),
    ("zamba2", "Zamba2MambaMixer", StateSpace),
    ("recurrent_gemma", "RecurrentGemmaRecurrentBlock", GatedRecurrence),
    ("rwkv", "RwkvBlock", WeightedMeanBlock),
    ("xlstm", "xLSTMLayer", MatrixMemory),
    ("lfm2", "Lfm2ShortConv", ShortConvolution),
    ("minimax", "MiniMaxLightningAttention", LightningAttention),
    ("zaya", "ZayaCCAProjection", ConvolvedHeads),
    ("zaya", "ZayaQKNorm", HeadLengths),
    ("zaya", "ZayaDecoderLayer", RoutedBlock),
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
            if not hasattr(part, "layer_idx"):  # the first number in the name is the layer's
                part.layer_idx = int(next(piece for piece in name.split(".") if piece.isdigit()))
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
