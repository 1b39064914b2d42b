"""Translation of a stage of known modules into a program, or the reason why it is not possible.

A model's ``forward`` must be one of the known ones, which embed, make one pair of rotary tables, run the layers one
after the other, norm, and multiply by the head. A layer's ``forward`` must be one of the ones below. Both are
recognised by their code, and the modules that they call must be ours (``swarm.stage.modules``). All other models run
module by module.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import UnionType
from typing import Any

import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssDecoderLayer, GptOssModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel
from transformers.models.mistral.modeling_mistral import MistralModel
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralForCausalLM, MixtralModel
from transformers.models.olmo2.modeling_olmo2 import Olmo2DecoderLayer
from transformers.models.phi3.modeling_phi3 import Phi3DecoderLayer, Phi3Model
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

from swarm.stage import native
from swarm.stage.attention import kernel_args
from swarm.stage.model import program
from swarm.stage.model.program import ADD, ATTEND, HIDDEN, MIX, MIXED, MULTIPLY, NORM, NORMED, ROTATE, WIDE, Op
from swarm.stage.model.rope import RopeTable
from swarm.stage.modules.attention import NativeAttention
from swarm.stage.modules.experts import NativeMixture
from swarm.stage.modules.matrices import JoinedProducts
from swarm.stage.modules.mlps import NativeMlp
from swarm.stage.modules.norms import NativeRmsNorm
from swarm.stage.modules.recognition import same_code
from swarm.stage.native.linears import NativeLinear
from swarm.wire.messages import LayerRange


class UnsupportedModule(Exception):
    """The reason why a stage has no program."""


@dataclass(frozen=True, slots=True)
class _NormNames:
    """Names of a layer's norms: before and after attention, before and after the MLP; empty if there is none."""

    before_attention: str = ""
    after_attention: str = ""
    before_mlp: str = ""
    after_mlp: str = ""


_NORMS_BY_LAYER: dict[type[nn.Module], _NormNames] = {
    **dict.fromkeys(
        (LlamaDecoderLayer, Phi3DecoderLayer, MixtralDecoderLayer, GptOssDecoderLayer),
        _NormNames("input_layernorm", "", "post_attention_layernorm", ""),
    ),
    Olmo2DecoderLayer: _NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    Gemma2DecoderLayer: _NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
}
_MODELS: tuple[type[nn.Module], ...] = (
    LlamaModel,
    MistralModel,
    Qwen2Model,
    Qwen3Model,
    Phi3Model,
    Gemma2Model,
    MixtralModel,
    GptOssModel,
)
_MODELS_WITH_HEAD: tuple[type[nn.Module], ...] = (LlamaForCausalLM, Gemma2ForCausalLM, MixtralForCausalLM)


# a function that yields operations: they read rows from the given buffer and leave their result in NORMED
_PartWriter = Callable[[int], Iterator[Op]]


@dataclass(slots=True)
class _ProgramWriter:
    """State of a program that is being written."""

    dtype: torch.dtype
    lengths: list[int]  # elements of a row in each buffer at this point
    widths: list[int]  # the maximum of the same
    products: list[NativeLinear] = field(default_factory=list)  # by slot
    owners: list[object] = field(default_factory=list)  # owners of the memory that the operations point to
    keys: torch.Tensor | None = None  # an empty tensor with the layers' key heads and sizes

    def op(self, code: int, source: int, target: int, what: Any, layer: int = 0) -> Op:
        self.owners.append(what)
        return Op(code, source, target, native.KINDS[self.dtype], layer, ctypes.addressof(what))

    def check_input(self, buffer: int, length: int) -> None:
        if self.lengths[buffer] != length:
            raise UnsupportedModule(f"rows of {self.lengths[buffer]} numbers reach a part for {length}")

    def set_output(self, buffer: int, length: int) -> None:
        self.lengths[buffer] = length
        self.widths[buffer] = max(self.widths[buffer], length)

    # --- parts -------------------------------------------------------------------------------------------------------

    def norm(self, part: Any, source: int, target: int) -> Op:
        norm = self.check_type(part, NativeRmsNorm)
        size = len(norm.weight)
        self.check_input(source, size)
        self.set_output(target, size)
        return self.norm_pieces(norm, source, target, 0, 1)

    def norm_pieces(self, norm: NativeRmsNorm, source: int, target: int, first: int, count: int) -> Op:
        """Return the operation that normalises some pieces of each row, such as the heads of queries and keys."""
        self.owners.append(norm)
        address, size, stride = norm.weight.data_ptr(), len(norm.weight), self.lengths[source]
        what = program.NormArgs(address, size, count, first, stride, norm.rounded, norm.variance_epsilon)
        return self.op(NORM, source, target, what)

    def product(self, part: Any, source: int, target: int) -> Iterator[Op]:
        """Yield the operation of each matrix, which writes its own columns of the result."""
        products = self.check_type(part, NativeLinear | JoinedProducts)
        self.check_input(source, products.in_features)
        self.set_output(target, products.out_features)
        for linear, first in products.columns():
            self.products.append(linear)
            slot = len(self.products) - 1
            what = program.ProductArgs(ctypes.addressof(linear.matrix), first, products.out_features, slot)
            yield self.op(MULTIPLY, source, target, what)

    def check_type(self, part: Any, kind: type[Any] | UnionType) -> Any:
        if not isinstance(part, kind):
            raise UnsupportedModule(f"{type(part).__name__} is not supported")
        if part.dtype is not self.dtype:
            raise UnsupportedModule(f"{type(part).__name__} is of {part.dtype}")
        return part

    # --- a layer -----------------------------------------------------------------------------------------------------

    def layer(self, layer: Any, index: int) -> list[Op]:
        order = next((order for known, order in _NORMS_BY_LAYER.items() if same_code(layer, known)), None)
        if order is None:
            raise UnsupportedModule(f"{type(layer).__name__} is not supported")
        return [
            *self.add_with_norms(
                layer, order.before_attention, order.after_attention, self.attention(layer.self_attn, index)
            ),
            *self.add_with_norms(layer, order.before_mlp, order.after_mlp, self.mlp(layer.mlp)),
        ]

    def add_with_norms(self, layer: Any, before: str, after: str, part: _PartWriter) -> Iterator[Op]:
        """Yield the operations that add a part's result, with norms around it, to the rows."""
        source = HIDDEN
        if before:
            source = NORMED
            yield self.norm(getattr(layer, before), HIDDEN, NORMED)
        yield from part(source)
        if after:
            yield self.norm(getattr(layer, after), NORMED, NORMED)
        self.check_input(NORMED, self.lengths[HIDDEN])
        yield self.op(ADD, NORMED, HIDDEN, program.WidthArgs(self.lengths[HIDDEN]))

    def attention(self, part: Any, index: int) -> _PartWriter:
        if not isinstance(part, NativeAttention):
            raise UnsupportedModule(f"{type(part).__name__} is not supported")
        size, queries, qkv = part.size, part.query_heads, part.qkv
        key_heads = (qkv.out_features // size - queries) // 2
        if (queries + 2 * key_heads) * size != qkv.out_features:
            raise UnsupportedModule(f"{qkv.out_features} outputs are no heads of {size}")
        keys = torch.empty(key_heads, 0, size, dtype=self.dtype)
        if self.keys is not None and self.keys.shape != keys.shape:
            raise UnsupportedModule("layers have unlike heads")
        self.keys = keys
        heads = program.HeadArgs(self.attention_options(part), size, queries, key_heads)

        def write(source: int) -> Iterator[Op]:
            yield from self.product(qkv, source, WIDE)
            for norm, first, count in part.norm_places:
                yield self.norm_pieces(norm, WIDE, WIDE, first, count)
            yield self.op(ROTATE, WIDE, WIDE, heads)
            yield self.op(ATTEND, WIDE, MIXED, heads, index)
            self.set_output(MIXED, queries * size)
            yield from self.product(part.out, MIXED, NORMED)

        return write

    def attention_options(self, part: NativeAttention) -> kernel_args.NativeOptions:
        options, owners = kernel_args.native_options(part.options)
        self.owners.append(owners)
        return options

    def mlp(self, part: Any) -> _PartWriter:
        if isinstance(part, NativeMixture):
            return self.mixture(part)
        if not isinstance(part, NativeMlp):
            raise UnsupportedModule(f"{type(part).__name__} is not supported")

        def write(source: int) -> Iterator[Op]:
            yield from self.product(part.first, source, WIDE)
            yield from self.product(part.down, WIDE, NORMED)

        return write

    def mixture(self, part: NativeMixture) -> _PartWriter:
        size = part.experts.hidden
        if part.router.dtype is not self.dtype or part.experts.dtype is not self.dtype:
            raise UnsupportedModule(f"experts are of {part.experts.dtype}")

        def write(source: int) -> Iterator[Op]:
            self.check_input(source, size)
            self.check_input(source, part.router.in_features)
            self.set_output(NORMED, size)
            self.owners.append(part)
            yield self.op(MIX, source, NORMED, part.args)

        return write


def write_program(
    model: Any, base: Any, stack: Any, layers: LayerRange, dtype: torch.dtype, *, heads: bool
) -> tuple[program.Program | None, str]:
    """Return the program of these ``layers`` of the model's ``stack``; if it is not possible, None and the reason."""
    try:
        return _write_program(model, base, stack, layers, dtype, heads=heads), ""
    except UnsupportedModule as unknown:
        return None, str(unknown)


def _write_program(
    model: Any, base: Any, stack: Any, layers: LayerRange, dtype: torch.dtype, *, heads: bool
) -> program.Program:
    if native.library() is None or dtype not in native.KINDS:
        raise UnsupportedModule("its kernels are torch's")
    if not any(same_code(base, known) for known in _MODELS):
        raise UnsupportedModule(f"{type(base).__name__} is not supported")
    score = getattr(model, "score", None)  # a head that ``Stage.run`` applies itself
    if heads and score is None and not any(same_code(model, known) for known in _MODELS_WITH_HEAD):
        raise UnsupportedModule(f"{type(model).__name__} is not supported")
    output = model.lm_head if score is None else score
    if not isinstance(base.rotary_emb, RopeTable):
        raise UnsupportedModule(f"{type(base.rotary_emb).__name__} is not supported")
    rows = [int(model.config.get_text_config().hidden_size)] + [0] * (program.NUM_BUFFERS - 1)
    writer = _ProgramWriter(dtype, rows, rows.copy())
    operations = [writer.layer(stack[layer], layer - layers.first) for layer in range(layers.first, layers.stop)]
    widths = tuple(writer.widths)
    head: list[Op] = []
    if heads:
        head = [writer.norm(base.norm, HIDDEN, NORMED), *writer.product(output, NORMED, WIDE)]
    assert writer.keys is not None, "there is a layer"
    return program.Program(
        layers,
        operations,
        head,
        program.BufferShapes(widths, writer.keys),
        num_words=output.out_features if heads else 0,
        embed=base.embed_tokens,
        rotary=base.rotary_emb,
        num_rotated=stack[layers.first].self_attn.num_rotated,
        products=writer.products,
        owners=writer.owners,
    )
