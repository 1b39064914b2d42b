"""Construction of a range of a model's layers, reading only their weights.

transformers supplies the whole model on the meta device, which takes no memory. A stage is that model's own ``forward``
with other stages' layers skipped, so that scales and soft caps stay where the model has them. Parts before a stage's
first layer have no effect: the first layer's input is replaced by the previous stage's output. Parts after its last
layer get only the rows that the head needs. Consecutive stages of one worker share layer modules, so the modules take
the state of a run from the calling thread's :class:`~swarm.stage.attention.passes.ForwardPass`.
"""

from __future__ import annotations

import copy
import dis
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.pytorch_utils import Conv1D

from swarm.errors import ModelError, refusing_model, shorten
from swarm.stage.attention import function as attention
from swarm.stage.attention.passes import ForwardPass, current_pass, use_pass
from swarm.stage.executor import FenceRaised
from swarm.stage.matmul import experts, linears
from swarm.stage.matmul.elementwise import AlignedActivation, align_calls, is_activation
from swarm.stage.matmul.raw_matmul import wrap_matrices
from swarm.stage.matmul.triton_products import TritonLinear, packed_matrix
from swarm.stage.model import decoders, layer_inputs, older_kinds, program, recipes, text_models, vision_tower
from swarm.stage.model.adapter_folder import AdapterFolder
from swarm.stage.model.checkpoint import Checkpoint, HeadKind
from swarm.stage.model.configuration import ERRORS_OF_SETTINGS, check_config, read_config, read_whole_config
from swarm.stage.model.conversion import ConvertedSource, FolderSource, ModelSource, WeightSource
from swarm.stage.model.gguf_source import GgufSource
from swarm.stage.model.portable_math import portable_math
from swarm.stage.model.rope import RopeTable, is_rotary
from swarm.stage.model.vision_tower import VisionTower
from swarm.stage.modules import families, fused, latents, recurrent
from swarm.stage.modules.matrices import JoinedProducts, make_linear, name_outputs
from swarm.stage.modules.reading import Matrix, RowKind, WeightReader
from swarm.stage.native.linears import NativeLinear, NativeModule
from swarm.stage.native.memory import release_free_memory
from swarm.stage.quantization.formats import packed_bytes
from swarm.stage.quantization.tensors import QuantizedWeight
from swarm.wire.messages import LayerRange, Vision

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def choose_dtype(name: str, stored: str, device: torch.device) -> str:
    """Return the name of the weights' dtype; for "auto", the stored one where the device computes fast in it."""
    if name == "auto":
        return stored if linears.is_efficient(device, DTYPES[stored]) else "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    if not linears.can_compute(device, DTYPES[name]):
        able = [each for each in DTYPES if linears.can_compute(device, DTYPES[each])]
        raise ModelError(f"device {device} can't compute in {name}: use auto, {' or '.join(able)}")
    return name


def possible_dtypes(name: str, device: torch.device) -> tuple[str, ...]:
    """Return the dtypes of weights that this device can compute with, even slowly.

    ``name`` is the setting; only "auto" leaves a choice.
    """
    return tuple(each for each in DTYPES if linears.can_compute(device, DTYPES[each])) if name == "auto" else (name,)


@dataclass(frozen=True, slots=True)
class ModelParts:
    """Names of a model's modules by their place: ``embed`` run before the layers, ``tail`` after them."""

    base: str  # the model without its head
    layers: str  # the list of layers
    embed: tuple[str, ...]
    tail: tuple[str, ...]
    shared: tuple[str, ...]  # modules without weights, such as rotary tables, which every stage has
    input_embedding: str
    output_embedding: str  # empty if the model has no head over the vocabulary


class ModelSkeleton:
    """The whole model without weights. Raises ``ModelError`` if this kind of model can't be cut.

    ``dense``: dequantize quantized matrices when they are loaded. ``int8_rows``: round rows to int8 before they are
    multiplied by quantized matrices. ``head``: the kind of the model's head. ``vision``: how it sees images, if it
    does; then ``whole`` is the configuration with its vision tower.
    """

    def __init__(
        self,
        config: Any,
        device: torch.device,
        dtype: torch.dtype,
        *,
        dense: bool = False,
        int8_rows: bool = False,
        head: HeadKind = "vocabulary",
        vision: Vision | None = None,
        whole: Any = None,
    ) -> None:
        attention.register()
        experts.register()
        self.device, self.dtype, self.rows = device, dtype, RowKind(dtype, int8_rows)
        self.config = check_config(config)
        self.model = _build_model(self.config, head)
        self._tied: Mapping[str, str] = self.model.all_tied_weights_keys
        recurrent.replace_recurrent(self.model)
        latents.check_known(self.model)
        self.parts = find_parts(self.model)
        self.vision = vision
        if vision is not None:
            with torch.device("meta"):
                self.model.add_module(vision_tower.NAME, vision_tower.build_tower(whole))
            self.parts = replace(self.parts, embed=(*self.parts.embed, vision_tower.NAME))
        self.num_layers = len(self.model.get_submodule(self.parts.layers))
        self.row_width = layer_inputs.RowLayout.of_config(self.config).width  # numbers that stages pass on by position
        widths = {part.in_features for part in self.model.modules() if isinstance(part, nn.Linear)}
        widths |= {part.nx for part in self.model.modules() if isinstance(part, Conv1D)}
        self.kernel = linears.choose_kernel(device, dtype, widths)
        # whether products read quantized matrices as they are
        self.has_quantized_products = self.kernel in linears.QUANTIZED_KERNELS and not dense
        if self.kernel is NativeLinear:
            families.move_softcap(self.model)

    def build_quantized(self, matrix: QuantizedWeight, bias: torch.Tensor | None) -> NativeLinear | TritonLinear:
        """Return the product with a quantized matrix by the model's kernels, which read it as it is."""
        if self.kernel is TritonLinear:
            return TritonLinear.from_quantized(matrix, bias, self.dtype, self.device)
        return make_linear(matrix, bias, self.rows)

    @classmethod
    def from_checkpoint(cls, checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype) -> ModelSkeleton:
        how, head, vision = checkpoint.quantization, checkpoint.head, checkpoint.vision
        with refusing_model():
            return cls(
                read_config(checkpoint.folder),
                device,
                dtype,
                dense=how.is_dense,
                int8_rows=how.has_int8_rows,
                head=head,
                vision=vision,
                whole=None if vision is None else read_whole_config(checkpoint.folder),
            )

    def tied_name(self, name: str) -> str:
        """Return the name of the tensor that this one equals where files lack it: the embedding's table for a tied
        head, or another layer's part. Empty if there is none."""
        if name == f"{self.parts.output_embedding}.weight" and self.config.get_text_config().tie_word_embeddings:
            return f"{self.parts.input_embedding}.weight"
        if name.rpartition(".")[2] in layer_inputs.INPUT_SCALES:
            return name.replace(".input_scale.", ".")
        return self._tied.get(name, "")

    def candidates(self, name: str) -> Iterator[str]:
        """Yield the names under which a source may have a tensor, the first one first."""
        yield name
        tied = self.tied_name(name)
        if tied:
            yield tied

    def source(self, checkpoint: Checkpoint) -> ModelSource:
        """Return the source of the model's tensors in its files."""
        if checkpoint.gguf is not None:
            return GgufSource(checkpoint)
        names = checkpoint.tensors.keys() | checkpoint.quantized.keys()
        return ConvertedSource(self.model, names, FolderSource(checkpoint), checkpoint.config.get("model_type"))


def _explain(error: BaseException, config: Any) -> str:
    """Return an error's text, shortened. A value that transformers looked up in vain is shown with its settings."""
    if isinstance(error, KeyError) and error.args and isinstance(error.args[0], str):
        settings = [name for name, value in _list_settings(config.to_dict()) if value == error.args[0]]
        if settings:
            return f"unknown value {error.args[0]!r} of {' and '.join(settings)}"[:200]
    return shorten(error)


def _list_settings(settings: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield all settings, those of sections by their path."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from _list_settings(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _build_model(config: Any, head: HeadKind = "vocabulary") -> Any:
    kind = AutoModelForSequenceClassification if head == "scores" else AutoModelForCausalLM
    # Some classes look for their attention in a table of their own, which is not used then.
    name = "eager" if config.model_type in older_kinds.OWN_TABLE else attention.NAME
    text_models.register(config)
    try:
        with torch.device("meta"):
            model = kind.from_config(config, dtype=torch.float32, attn_implementation=name, trust_remote_code=False)
    except ERRORS_OF_SETTINGS as error:
        if str(error).startswith("Unrecognized configuration class"):
            what = "transformers has no model of this kind that continues a text, so it can't be served"
            raise ModelError(f"{type(config).__name__}: {what}") from None
        why = _explain(error, config)
        raise ModelError(f"{type(config).__name__}: transformers can't build this model ({why})") from None
    if not model._supports_attention_backend and not model._is_stateful and not decoders.is_replaced(model):
        raise ModelError(f"{type(model).__name__} has no pluggable attention in transformers, so it can't be served")
    if hasattr(config, "_experts_implementation"):
        model.config._experts_implementation_internal = experts.NAME
    older_kinds.replace_forwards(model)
    if head == "none":
        model.set_output_embeddings(nn.Identity())
    return model.eval().requires_grad_(False)


def find_parts(model: Any) -> ModelParts:
    """Find the parts by the order of the model's modules: the ones with weights before the layers, and after them."""
    whole, base_name = decoders.find_base(model)
    base, kind = whole, type(model).__name__
    if base is model:
        raise ModelError(f"{kind} has no base model under a head, so it can't be cut")
    num_layers = decoders.count_layers(base.config.get_text_config())
    decoder = decoders.find_decoder(base)
    if decoder is not None and decoder.holder:
        base, base_name = getattr(base, decoder.holder), f"{base_name}.{decoder.holder}"
    if next(base.parameters(recurse=False), None) is not None:
        raise ModelError(f"{kind} has weights outside of its modules, so it can't be cut")
    parts = decoders.named_parts(base)
    order, stacks = list(parts), [name for name, child in parts.items() if _is_stack(child, num_layers)]
    if len(stacks) != 1:
        raise ModelError(f"{kind} has no single list of {num_layers} layers, so it can't be cut")
    weighty = [name for name, child in parts.items() if name != stacks[0] and _has_weights(child)]
    after = layer_inputs.AFTER_LAYERS.get(type(base).__name__) if decoder is None else decoder.after_layers
    tail = order[order.index(stacks[0]) :] if after is None else after
    names = {id(module): name for name, module in model.named_modules()}
    output = None if hasattr(model, "score") else model.get_output_embeddings()
    if output is None and not isinstance(getattr(model, "score", None), nn.Linear):
        raise ModelError(f"{kind} has no head over the vocabulary, and no linear score, so it can't be served")
    has_vocabulary = output is not None and _has_weights(output)
    return ModelParts(
        base=base_name,
        layers=f"{base_name}.{stacks[0]}",
        embed=tuple(f"{base_name}.{name}" for name in weighty if name not in tail),
        tail=tuple(f"{base_name}.{name}" for name in weighty if name in tail)
        + tuple(name for name, child in model.named_children() if child is not whole and _has_weights(child)),
        shared=tuple(f"{base_name}.{name}" for name in order if name not in weighty and name != stacks[0]),
        input_embedding=names[id(model.get_input_embeddings())],
        output_embedding=names[id(output)] if has_vocabulary else "",
    )


def _is_stack(module: object, num_layers: int) -> bool:
    return isinstance(module, nn.ModuleList) and len(module) == num_layers


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


class AbsentLayer(nn.Module):
    """Placeholder of another stage's layer. Keeps the plain attributes that the model may read from its layers."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self._num_results = _tuple_size(type(layer).forward)  # hidden states and others; 0: hidden states alone
        for name, value in vars(layer).items():
            if not name.startswith("_") and name not in vars(self):
                setattr(self, name, value)

    def forward(self, hidden_states: torch.Tensor, *_: object, **__: object) -> Any:
        return (hidden_states, *[None] * (self._num_results - 1)) if self._num_results else hidden_states


def _tuple_size(function: Any) -> int:
    """Return how many values a function returns in a tuple at its end; 0 if it returns no tuple."""
    *_, before, last = dis.get_instructions(inspect.unwrap(function))
    return int(before.arg or 0) if before.opname == "BUILD_TUPLE" and last.opname == "RETURN_VALUE" else 0


class WeightLoader:
    """Loads the weights of a skeleton's modules, one after the other, with the kernels of the device.

    ``on_loaded`` is called with the number of bytes of each tensor. ``adapters`` are loaded with the layers that they
    change.
    """

    def __init__(
        self,
        skeleton: ModelSkeleton,
        source: WeightSource,
        on_loaded: Callable[[int], None],
        adapters: Sequence[AdapterFolder] = (),
    ) -> None:
        self._skeleton, self._source, self._on_loaded, self._adapters = skeleton, source, on_loaded, adapters

    def load_module(self, model: Any, name: str) -> None:
        """Read the weights of the module ``name`` in place; its ``Linear`` parts become kernels."""
        module = model.get_submodule(name)
        for path, part in list(module.named_modules(prefix=name)):
            if latents.is_latent(part):
                latents.share_latents(part, self._reader(path), self._skeleton.kernel)
        if self._skeleton.kernel is NativeLinear:
            families.replace_modules(model, name, self._reader(name))
            module = model.get_submodule(name)
        for path, part in list(module.named_modules(prefix=name)):
            if fused.has_qkv(part):
                fused.join_qkv(part, self._reader(path), self._build_linear)
        for path, part in list(module.named_modules(prefix=name)):
            if not isinstance(part, (fused.FusedColumns, fused.FusedLinear, NativeModule, *linears.KERNELS)):
                self._rebuild_buffers(model, part)
                self._load_part(model, path, part)
        for path, part in list(module.named_modules(prefix=name)):
            self._simplify(model, path, part)
        module = model.get_submodule(name).eval()
        for part in module.modules():
            align_calls(part)
        for adapter in self._adapters:
            add_adapter(module, name, adapter)
        release_free_memory()

    def _load_part(self, model: Any, path: str, part: nn.Module) -> None:
        if type(part) is nn.Linear:
            model.set_submodule(path, self._load_linear(path, part))
        elif type(part) is Conv1D:
            model.set_submodule(path, self._load_transposed(path, part))
        elif type(part) is nn.Conv3d:
            model.set_submodule(path, self._load_patches(path, part))
        elif is_activation(part):
            model.set_submodule(path, AlignedActivation(part))
        else:
            self._read_own(path, part)

    def _simplify(self, model: Any, path: str, part: Any) -> None:
        """Replace a module with weights by a faster one."""
        if fused.is_rms_norm(part):
            model.set_submodule(path, fused.RmsNorm(part.weight, part.variance_epsilon))
        elif is_rotary(part):
            model.set_submodule(path, RopeTable(part))
        elif isinstance(part, recurrent.AdoptedParts):
            part.build_products(self._skeleton.kernel)
            part.prepare()
        elif fused.is_gated(part) and fused.can_fuse(part):
            model.set_submodule(path, fused.GatedMlp(part.gate_proj, part.up_proj, part.down_proj, part.act_fn))

    def _load_linear(self, path: str, part: nn.Linear) -> nn.Module:
        read = self._reader(path)
        bias = None if part.bias is None else read.tensor("bias", part.bias)
        return self._build_linear(read.matrix("weight", part.weight), bias, [(path, part.out_features)])

    def _load_transposed(self, path: str, part: Conv1D) -> nn.Module:
        """Load a linear layer whose plain weight is stored with its inputs first."""
        read = self._reader(path)
        quantized = read.quantized("weight", part.weight.T)
        matrix = read.tensor("weight", part.weight).T.contiguous() if quantized is None else quantized
        return self._build_linear(matrix, read.tensor("bias", part.bias), [(path, part.nf)])

    def _load_patches(self, path: str, part: nn.Conv3d) -> nn.Module:
        """Load the embedding of patches, which do not overlap, as a product with each of them."""
        read = self._reader(path)
        bias = None if part.bias is None else read.tensor("bias", part.bias)
        return self._build_linear(read.tensor("weight", part.weight).flatten(1), bias, [(path, part.out_channels)])

    def _build_linear(self, matrix: Matrix, bias: torch.Tensor | None, outputs: list[tuple[str, int]]) -> nn.Module:
        skeleton = self._skeleton
        if isinstance(matrix, QuantizedWeight):
            product: nn.Module = skeleton.build_quantized(matrix, bias)
        else:
            product = linears.build_linear(skeleton.kernel, matrix, bias)
        if isinstance(product, (NativeLinear, TritonLinear)):
            name_outputs(product, outputs)
        product.weight = torch.empty(0, dtype=skeleton.dtype, device=skeleton.device)  # models read its dtype
        return product

    def _read_own(self, path: str, part: nn.Module) -> None:
        for leaf, parameter in list(part.named_parameters(recurse=False)):
            if self._pack_experts(path, part, leaf):
                continue
            tensor = self._read_tensor(f"{path}.{leaf}", parameter)
            part._parameters[leaf] = nn.Parameter(tensor, requires_grad=False)
        for leaf, buffer in list(part.named_buffers(recurse=False)):
            if leaf not in part._non_persistent_buffers_set:
                part._buffers[leaf] = self._read_tensor(f"{path}.{leaf}", buffer)
        if not isinstance(part, recurrent.AdoptedParts):
            wrap_matrices(part)

    def _pack_experts(self, path: str, part: nn.Module, leaf: str) -> bool:
        """Pack the experts' quantized matrices on a device, if this parameter holds some."""
        skeleton = self._skeleton
        if skeleton.kernel is not TritonLinear or not experts.has_matrices(part, leaf):
            return False
        weight = self._reader(path).quantized(leaf, experts.outputs_first(part, leaf))
        if weight is not None:
            experts.keep_packed(part, leaf, packed_matrix(weight, skeleton.device), skeleton.dtype)
        return weight is not None

    def _rebuild_buffers(self, model: Any, part: nn.Module) -> None:
        """Compute the buffers that are not stored, such as rotary frequencies, by the model's own initialisation."""
        computed = {
            leaf: b for leaf, b in part.named_buffers(recurse=False) if leaf in part._non_persistent_buffers_set
        }
        if not computed:
            return
        for leaf, buffer in computed.items():
            # A buffer that the initialisation does not compute must not look like a valid number.
            filler = float("nan") if buffer.is_floating_point() else 0
            part._buffers[leaf] = torch.full_like(buffer, filler, device="cpu")
        with portable_math():
            model._init_weights(part)
        for leaf, buffer in list(part.named_buffers(recurse=False)):
            part._buffers[leaf] = buffer.to(self._skeleton.device) if leaf in computed else buffer

    def _reader(self, path: str) -> WeightReader:
        """Return the reader of a module's weights."""
        if self._skeleton.has_quantized_products:
            return WeightReader(self._read_tensor, self._skeleton.rows, self._read_quantized, f"{path}.")
        return WeightReader(self._read_tensor, self._skeleton.rows, prefix=f"{path}.")

    def _read_quantized(self, name: str, like: torch.Tensor) -> QuantizedWeight | None:
        weight = self._source.quantized(self._stored_name(name))
        if weight is not None:
            check_shape(name, weight.shape, like.shape)
            self._on_loaded(math.prod(weight.shape[:-2]) * packed_bytes(weight.format, *weight.shape[-2:]))
        return weight

    def _read_tensor(self, name: str, like: torch.Tensor) -> torch.Tensor:
        tensor = self._source.read(self._stored_name(name), like.shape)
        check_shape(name, tensor.shape, like.shape)
        result = tensor.to(device=self._skeleton.device, dtype=self._skeleton.dtype)
        self._on_loaded(result.nbytes)
        return result

    def _stored_name(self, name: str) -> str:
        for candidate in self._skeleton.candidates(name):
            if candidate in self._source:
                return candidate
        raise ModelError(f"the folder has no tensor {name}, which {type(self._skeleton.model).__name__} needs")


def add_adapter(module: nn.Module, name: str, adapter: AdapterFolder) -> None:
    """Add an adapter to the products of a loaded module. Raises ``ModelError`` if one that it changes is not there."""
    weights = adapter.read(f"{name}.")
    if not weights:
        return
    missing = set(weights)
    for linear in _products(module):
        missing -= linear.add_adapter(adapter.key, weights)
    if missing:
        raise adapter.unsupported(missing)


def keep_adapters(module: nn.Module, keys: AbstractSet[str]) -> None:
    """Drop all adapters but these from the products of a loaded module."""
    for linear in _products(module):
        linear.keep_adapters(keys)


def _products(module: nn.Module) -> Iterator[NativeLinear | TritonLinear]:
    for part in list(module.modules()):
        if isinstance(part, TritonLinear):
            yield part
        elif isinstance(part, (NativeLinear, JoinedProducts)):
            for linear, _ in part.columns():
                yield linear


def check_shape(name: str, shape: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(shape) != tuple(expected):
        raise ModelError(
            f"tensor {name} has shape {list(shape)}, but config.json requires {list(expected)}; "
            "the folder's files don't belong together"
        )


class Stage:
    """Layers ``layers`` of a model, with its embedding if they begin it and its head if they end it.

    ``held`` contains loaded modules by name; they are shared, not copied. Among them may be another stage's ``shared``
    ones: computing rotary tables anew would take most of the time of a first step. ``bare`` leaves out embedding and
    head, whatever the layers are.
    """

    def __init__(
        self,
        skeleton: ModelSkeleton,
        layers: LayerRange,
        held: Mapping[str, nn.Module],
        weights: WeightLoader,
        *,
        bare: bool = False,
    ) -> None:
        self.layers = layers
        self.has_embedding = layers.first == 0 and not bare  # whether it looks up the embedding
        self.has_head = layers.stop == skeleton.num_layers and not bare  # whether it ends in the head
        self.device, self.dtype = skeleton.device, skeleton.dtype
        self.modules: dict[str, nn.Module] = {}  # the stage's own modules with weights, by name
        self.shared: dict[str, nn.Module] = {}  # the modules without weights, which every stage has
        self._model = self._copy_frame(skeleton, held)
        self._base = self._model.get_submodule(skeleton.parts.base)
        self._has_vocabulary = bool(skeleton.parts.output_embedding)
        if self.has_head:
            self._base.register_forward_hook(_keep_normed)
        self._load(skeleton.parts, held, weights)
        self.tower: VisionTower | None = None  # on the stage that embeds, if the model sees images
        if self.has_embedding and skeleton.vision is not None:
            self.tower = VisionTower(self.modules[vision_tower.NAME], skeleton.vision)
            self._embedding = self._model.get_submodule(skeleton.parts.input_embedding)
        for part in (self._model, self._base):
            align_calls(part)
        stack = self._model.get_submodule(skeleton.parts.layers)
        # A program that runs the layers instead of their modules, or the reason why there is none.
        self.program, self.no_program_reason = recipes.write_program(
            self._model, self._base, stack, layers, self.dtype, heads=self.has_head
        )

    def _copy_frame(self, skeleton: ModelSkeleton, held: Mapping[str, nn.Module]) -> Any:
        """Copy the model's frame with loaded modules in place and other stages' layers replaced by placeholders.

        Copying those would take most of the time that a worker needs to take over layers that it keeps warm.
        """
        parts, instead = skeleton.parts, dict[int, nn.Module]()
        for index, layer in enumerate(skeleton.model.get_submodule(parts.layers)):
            name = f"{parts.layers}.{index}"
            if not self.layers.first <= index < self.layers.stop:
                instead[id(layer)] = AbsentLayer(layer)
            elif name in held:
                instead[id(layer)] = held[name]
        for name in parts.shared:
            if name in held:
                instead[id(skeleton.model.get_submodule(name))] = held[name]
        if skeleton.vision is not None and (not self.has_embedding or vision_tower.NAME in held):
            tower = skeleton.model.get_submodule(vision_tower.NAME)
            instead[id(tower)] = held[vision_tower.NAME] if self.has_embedding else nn.Identity()
        return copy.deepcopy(skeleton.model, instead)

    def _load(self, parts: ModelParts, held: Mapping[str, nn.Module], weights: WeightLoader) -> None:
        for index in range(self.layers.first, self.layers.stop):
            self._load_or_share(f"{parts.layers}.{index}", held, weights, index)
        for name in (parts.embed if self.has_embedding else ()) + (parts.tail if self.has_head else ()):
            self._load_or_share(name, held, weights)
        for name in parts.shared:
            if name not in held:
                weights.load_module(self._model, name)
            self.shared[name] = self._model.get_submodule(name)
        if not self.has_head:
            for name in parts.tail:
                self._model.set_submodule(name, nn.Identity())

    def _load_or_share(
        self, name: str, held: Mapping[str, nn.Module], weights: WeightLoader, layer: int | None = None
    ) -> None:
        if name in held:
            self._model.set_submodule(name, held[name])
        else:
            weights.load_module(self._model, name)
            if layer is not None:
                _add_hooks(self._model.get_submodule(name), layer)
        self.modules[name] = self._model.get_submodule(name)

    def run(self, forward_pass: ForwardPass, ids: torch.Tensor | None, positions: torch.Tensor) -> torch.Tensor | None:
        """Run a pass: return the last layer's output, narrowed to ``forward_pass.keep_rows``.

        The stage with the head returns the head's result for those rows instead (None if there are none), without the
        last ``num_pooled``. A model without a head over the vocabulary returns its scores, or the normed rows.
        """
        forward_pass.positions, images = positions, forward_pass.images
        by_modules = forward_pass.by_modules or images is not None or positions.ndim > 2
        if self.program is not None and not by_modules and program.is_enabled():
            return self.program.run(forward_pass, ids, positions)
        tokens = {"input_ids": ids} if self.has_embedding else {"inputs_embeds": forward_pass.hidden}
        if images is not None:
            tokens = {"inputs_embeds": images.embed(self._embedding(ids))}
        kept = forward_pass.keep_rows if self.has_head else None
        num_rows = 0 if kept is None else len(kept) - forward_pass.num_pooled
        more = {} if not num_rows or not forward_pass.num_pooled else self._head_rows(num_rows)
        has_logits = num_rows > 0 and self._has_vocabulary
        with use_pass(forward_pass), torch.inference_mode():
            whole = self._model if has_logits else self._base
            result = whole(**tokens, position_ids=positions, use_cache=False, **(more if has_logits else {}))
            if num_rows and not has_logits:
                score = getattr(self._model, "score", None)
                assert forward_pass.normed is not None, "the base model has run"
                rows = forward_pass.normed[:num_rows]
                return rows if score is None else score(rows)
        if has_logits:
            logits: torch.Tensor = result.logits[0]
            return logits[:num_rows]
        return None if self.has_head else forward_pass.output

    def _head_rows(self, num_rows: int) -> dict[str, Any]:
        """Return the argument that makes the model compute logits of the first rows only, where it takes one."""
        if "logits_to_keep" not in inspect.signature(self._model.forward).parameters:
            return {}
        return {"logits_to_keep": torch.arange(num_rows, device=self.device)}


def _keep_normed(_: nn.Module, __: object, output: Any) -> None:
    """Keep the base model's result in the pass: the normed rows."""
    current_pass().normed = output[0][0]


def _add_hooks(layer: nn.Module, index: int) -> None:
    """Make a layer take its input from the current pass and report to it."""

    def before_layer(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        this = current_pass()
        if this.is_fenced():
            raise FenceRaised
        if index != this.layers.first or this.hidden is None:
            return None
        if args:
            return (this.hidden, *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": this.hidden}

    def after_layer(_: nn.Module, __: object, output: Any) -> Any:
        this = current_pass()
        this.on_progress()
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        if this.images is not None:
            this.images.add_to(hidden, index)
        if index != this.layers.stop - 1:
            return output
        if this.keep_rows is not None:
            hidden = hidden.index_select(layer_inputs.token_dimension(layer), this.keep_rows)
        this.output = hidden
        this.on_layers_done()
        return hidden if isinstance(output, torch.Tensor) else (hidden, *output[1:])

    layer.register_forward_pre_hook(before_layer, with_kwargs=True)
    layer.register_forward_hook(after_layer)
