"""Comparison of cut and whole models: whether a kind of model is computed correctly when it is cut into stages.

Before weights are read, a tiny random model of the same class is computed in three stages, in ragged batches with
chunks and decodes, and its logits are compared with the logits of transformers' own whole forward pass. Anything that
this engine does not support (a state between layers, a mask of another kind) shows as a difference, and the model is
refused instead of giving wrong answers. The same is tried with the dtype and the kernels in use, on this machine, and
with matrices that are quantized as the model's are; transformers computes with the dequantized ones. Takes a fraction
of a second. The verdict is cached for the life of the process, and for workers forked from the same process.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from swarm.errors import ModelError, OutOfMemory, refusing_model, shorten
from swarm.stage import native
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine.forward import copy_to_array, run_batch
from swarm.stage.engine.tiny import VOCABULARY, tiny_config
from swarm.stage.executor import Batch, is_out_of_memory
from swarm.stage.model import attention_variants, text_models
from swarm.stage.model.build import DTYPES, ModelSkeleton, Stage, WeightLoader, find_parts
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.configuration import fix_rope
from swarm.stage.model.conversion import transposed_names
from swarm.stage.model.fitting import build_unloaded
from swarm.stage.model.weight_formats import PLAIN, WeightFormats
from swarm.stage.native import shared_cache
from swarm.stage.quantization.formats import WeightFormat
from swarm.stage.quantization.nearest import quantize_nearest
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight
from swarm.wire.messages import LayerRange, Row

# Relative to the largest logit. Correct models differ by 1e-6; a wrong mask, rotation or scale by 1e-2 and more.
TOLERANCE = 1e-4
# For bfloat16 and two orders of summation, in the median of the positions. Some positions differ by much because
# rounding chooses other experts. Correct models differ by 0.03, a wrong rotation by 0.5 and more.
KERNEL_TOLERANCE = 0.15
# Where a router's scores nearly tie, two right computations choose other experts. What differs with these many models,
# one after the other, is no such accident.
_NUM_MODELS = 3
_LENGTHS = (300, 21)  # longer than a tiny window, and than two cells of the attention's grid
_CPU = torch.device("cpu")
_CHUNK = 187  # prompt positions in a step; ends within a cell


class MemorySource:
    """Source of weights that are already in memory. ``state`` also has the quantized ones, dequantized."""

    def __init__(
        self, state: Mapping[str, torch.Tensor], quantized: Mapping[str, QuantizedTensor] = MappingProxyType({})
    ) -> None:
        self._state, self._quantized = state, quantized

    def __contains__(self, name: str) -> bool:
        return name in self._state

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        return self._state[name].clone()

    def weight_format(self, name: str) -> WeightFormat | None:
        return self._quantized[name].format if name in self._quantized else None

    def quantized(self, name: str) -> QuantizedWeight | None:
        tensor = self._quantized.get(name)
        return None if tensor is None else QuantizedWeight(tensor.format, tensor.shape, "", lambda: tensor)


@dataclass(frozen=True, slots=True)
class Numerics:
    """How matrices are stored, and whether rows are rounded to int8 before they are multiplied."""

    formats: WeightFormats = PLAIN
    int8_rows: bool = False

    @classmethod
    def of_model(cls, skeleton: ModelSkeleton, formats: WeightFormats) -> Numerics:
        return cls(formats, skeleton.rows.int8 and formats != PLAIN)


_AS_PLAIN = Numerics()


def check_served(folder: Path, checkpoint: Checkpoint | None = None) -> None:
    """Raise ``UnservedModel`` if this version can't serve a model with this configuration, whatever its weights;
    ``ModelError`` if those of ``checkpoint`` contradict it.

    A worker makes the same checks, in the same order, so that its refusal has the same text. For commands, not for
    workers: transformers logs no warnings afterwards, which would surround that text.
    """
    logging.set_verbosity_error()
    check_cut(build_unloaded(folder, checkpoint).config)


@refusing_model()
def check_cut(config: Any) -> None:
    """Raise ``UnservedModel`` unless a model with this configuration has the same logits cut into stages as whole, in
    float32.

    If that holds with torch's kernels only, our own are disabled in this process.
    """
    difference = _checked_difference(config, "float32")
    if not difference <= TOLERANCE and native.library() is not None:
        with native.disabled("to compare"):
            others = _checked_difference(config, "float32")
        if others <= TOLERANCE:
            native.disable(f"they compute {type(config).__name__} otherwise (relative difference {difference:.1e})")
            return
        difference = others
    if not difference <= TOLERANCE:  # NaN is no match either
        raise ModelError(
            f"{type(config).__name__}: cut into stages, this kind of model computes something else than whole "
            f"(relative difference {difference:.1e}), so it can't be served"
        )


def _checked_difference(config: Any, dtype: str, numerics: Numerics = _AS_PLAIN, device: torch.device = _CPU) -> float:
    own = device.type == "cpu" and native.library() is not None
    try:
        return _difference(_tiny_config_json(config), dtype, own, numerics, device)
    except _FAILURES as error:
        raise ModelError(
            f"{type(config).__name__}: a tiny model of this kind could not be computed in stages "
            f"({_shown(error)}), so it can't be served"
        ) from None


def _shown(error: Exception) -> str:
    """Return a failure's text, shortened. Raises ``OutOfMemory`` if it says nothing about the model."""
    short = shorten(error)
    if is_out_of_memory(error):
        raise OutOfMemory(
            f"this machine has too little memory to check the model with a tiny one ({short}); end other programs"
        ) from None
    return short


def check_kernels(config: Any, dtype: str, numerics: Numerics = _AS_PLAIN) -> None:
    """Switch this process to torch's kernels if our own compute this kind of model differently.

    Kernels are chosen by what a model's modules look like. This check verifies the choice, in the dtype in use, against
    transformers' whole model in float32. Raises ``ModelError`` if torch's kernels differ, too.
    """
    name = type(config).__name__
    if native.library() is not None:
        try:
            difference = _difference(_tiny_config_json(config), dtype, True, numerics)
        except _FAILURES as error:
            native.disable(f"they fail for {name}: {_shown(error)}")
        else:
            if difference <= allowed_difference(dtype, numerics):
                return
            native.disable(f"they compute {name} otherwise (relative difference {difference:.1e})")
    difference = _checked_difference(config, dtype, numerics)
    if not difference <= allowed_difference(dtype, numerics):
        raise ModelError(
            f"{name}: on this machine, a model of this kind computes something else in {dtype} than in float32 "
            f"(relative difference {difference:.1e}), so it can't be served; try worker.dtype = float32"
        )


def check_device(config: Any, dtype: str, device: torch.device, numerics: Numerics = _AS_PLAIN) -> None:
    """Raise ``ModelError`` unless this device computes a model of this kind as transformers does on a CPU."""
    difference = _checked_difference(config, dtype, numerics, device)
    if not difference <= allowed_difference(dtype, numerics):
        raise ModelError(
            f"{type(config).__name__}: on device {device}, a model of this kind computes something else in {dtype} "
            f"than on a CPU in float32 (relative difference {difference:.1e}), so it can't be served there; try "
            "worker.dtype = float32 or worker.device = cpu"
        )


def same_bits(config: Any, dtype: str, numerics: Numerics = _AS_PLAIN) -> bool:
    """Whether a model of this kind gives the same bits when it is cut into stages and its prompts into chunks as when
    it is computed whole.

    This finds differences that probes of single kernels can't. Call it after :func:`check_kernels`.
    """
    return _same_bits(_tiny_config_json(config), dtype, native.library() is not None, numerics)


# Errors that a model's code raises if it does not run in this engine.
_FAILURES = (
    *(RuntimeError, TypeError, ValueError, AttributeError, LookupError, ArithmeticError, AssertionError),
    StrictDataclassError,  # from a configuration's class
)


def allowed_difference(dtype: str, numerics: Numerics = _AS_PLAIN) -> float:
    """Return the largest allowed difference between two computations of the same numbers, relative to the largest
    number.

    Where nothing is rounded to less than float32, it limits the maximum over all positions, else the median.
    """
    return TOLERANCE if _is_precise(dtype, numerics) else KERNEL_TOLERANCE


def _is_precise(dtype: str, numerics: Numerics) -> bool:
    return dtype == "float32" and not numerics.int8_rows


def _tiny_config_json(config: Any) -> str:
    return json.dumps(tiny_config(config).to_dict(), sort_keys=True, default=str)


@lru_cache(maxsize=16)
def _difference(text: str, dtype: str, own: bool, numerics: Numerics = _AS_PLAIN, device: torch.device = _CPU) -> float:
    """Return the difference between the cut and the whole model, relative to the largest logit.

    It is the maximum where :func:`_is_precise`, else the median of the positions. ``own`` records in the cache key
    whether our own kernels are used; the caller switches them.
    """
    return shared_cache.get_or_compute(
        _cache_key(f"difference on {device}", text, dtype, own, numerics),
        float,
        lambda: _compute_difference(text, dtype, numerics, device),
    )


def _compute_difference(text: str, dtype: str, numerics: Numerics, device: torch.device) -> float:
    difference, config, ids = math.nan, *_load_case(text)
    for seed in range(1, 1 + _NUM_MODELS):
        whole = _random_model(config, seed).to(DTYPES[dtype]).float()
        difference = _compare(whole, config, ids, dtype, numerics, device=device)
        if difference <= allowed_difference(dtype, numerics):
            break
    return difference


def _compare(
    whole: Any, config: Any, ids: list[torch.Tensor], dtype: str, numerics: Numerics, *, device: torch.device
) -> float:
    source = _quantize(whole, numerics.formats)
    actual = _cut_logits(config, source, ids, DTYPES[dtype], int8_rows=numerics.int8_rows, device=device)
    expected = [_whole_logits(whole, each) for each in ids]  # last: RWKV's forward changes its weights
    scale = max(float(each.abs().max()) for each in expected)
    rows = torch.cat([(a.float().cpu() - b).abs().amax(-1) for a, b in zip(actual, expected, strict=True)])
    return float(rows.max() if _is_precise(dtype, numerics) else rows.median()) / scale  # NaN if any row has one


@lru_cache(maxsize=16)
def _same_bits(text: str, dtype: str, own: bool, numerics: Numerics = _AS_PLAIN) -> bool:
    return shared_cache.get_or_compute(
        _cache_key("same bits", text, dtype, own, numerics), bool, lambda: _compute_same_bits(text, dtype, numerics)
    )


def _cache_key(question: str, text: str, dtype: str, own: bool, numerics: Numerics) -> str:
    """Return a key with everything that the answer depends on."""
    kernels = native.variant() if own else "torch's"
    return f"{question} {text} {dtype} {kernels} {torch.get_num_threads()} {numerics}"


def _compute_same_bits(text: str, dtype: str, numerics: Numerics) -> bool:
    config, ids = _load_case(text)
    source = _quantize(_random_model(config), numerics.formats)

    def compute(ids: list[torch.Tensor], *, cut: bool) -> list[torch.Tensor]:
        return _cut_logits(config, source, ids, DTYPES[dtype], cut=cut, int8_rows=numerics.int8_rows)

    whole = [compute([each], cut=False)[0] for each in ids]
    return all(torch.equal(a, b) for a, b in zip(compute(ids, cut=True), whole, strict=True))


def _quantize(model: Any, formats: WeightFormats) -> MemorySource:
    """Return a source of the model's weights, quantized in these formats; the model gets the dequantized ones."""
    if formats == PLAIN:
        return MemorySource(model.state_dict())
    stack = find_parts(model).layers
    by_name = formats.kinds_by_name(stack, len(model.get_submodule(stack)))
    return quantize_model(model, by_name)


def quantize_model(model: Any, formats: Mapping[str, WeightFormat]) -> MemorySource:
    """Return a source of the model's weights, with these formats by name; the model gets the dequantized ones."""
    transposed, quantized = frozenset(transposed_names(model)), dict[str, QuantizedTensor]()
    for name, parameter in model.named_parameters():
        if name in formats:
            weights = parameter.data.transpose(1, 2) if name in transposed else parameter.data
            quantized[name] = quantize_nearest(weights, formats[name])
            weights = quantized[name].dequantize(torch.float32)
            parameter.data = weights.transpose(1, 2).contiguous() if name in transposed else weights
    tied = model.state_dict().keys() - dict((*model.named_parameters(), *model.named_buffers())).keys()
    return MemorySource({name: tensor for name, tensor in model.state_dict().items() if name not in tied}, quantized)


def _load_case(text: str) -> tuple[Any, list[torch.Tensor]]:
    """Return the configuration, and a long and a short prompt."""
    config = AutoConfig.for_model(**json.loads(text))
    max_length = getattr(config, "max_position_embeddings", None) or max(_LENGTHS)
    lengths = [min(length, max_length) for length in _LENGTHS]
    return config, [torch.randint(3, VOCABULARY, (length,), generator=_generator()) for length in lengths]


def _generator(seed: int = 1) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _random_model(config: Any, seed: int = 1) -> Any:
    """Return a model with random weights of high entropy: a model that repeats itself would hide errors."""
    generator = _generator(seed)
    text_models.register(config)
    # Falcon's own attention adds its position biases twice.
    attention = "sdpa" if config.model_type == "falcon" else "eager"
    model = AutoModelForCausalLM.from_config(
        fix_rope(config), dtype=torch.float32, attn_implementation=attention, trust_remote_code=False
    )
    attention_variants.drop_zero_experts(model)
    for parameter in model.parameters():
        offset, spread = (1.0, 0.15) if parameter.ndim == 1 else (0.0, min(0.15, 1.2 * parameter.shape[-1] ** -0.5))
        parameter.data = torch.randn(parameter.shape, generator=generator) * spread + offset
    return model.eval().requires_grad_(False)


def _whole_logits(model: Any, ids: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = model(ids.unsqueeze(0), use_cache=False).logits[0]
    return logits


def _cut_logits(
    config: Any,
    source: MemorySource,
    ids: list[torch.Tensor],
    dtype: torch.dtype,
    *,
    cut: bool = True,
    int8_rows: bool = False,
    device: torch.device = _CPU,
) -> list[torch.Tensor]:
    """Return the logits of the test sequences, computed in three stages and several steps; with ``cut=False``, in one
    stage and one step."""
    skeleton = ModelSkeleton(config, device, dtype, int8_rows=int8_rows)
    weights = WeightLoader(skeleton, source, lambda _: None)
    lines = sorted({0, 1, skeleton.num_layers - 1, skeleton.num_layers}) if cut else (0, skeleton.num_layers)
    stages = [Stage(skeleton, LayerRange(*pair), {}, weights) for pair in itertools.pairwise(lines)]
    arenas = [KvArena(skeleton.device) for _ in stages]
    for arena in arenas:
        for sequence, each in enumerate(ids):
            arena.open(sequence, len(each))
    at = [0] * len(ids)
    pieces: list[list[torch.Tensor]] = [[] for _ in ids]
    while any(place < len(each) for place, each in zip(at, ids, strict=True)):
        rows = tuple(_next_chunks(at, [len(each) for each in ids], cut))
        tokens = torch.cat([ids[row.sequence][row.start : row.start + row.count] for row in rows]).numpy()
        logits = _run_stages(stages, arenas, rows, tokens)
        for row, piece in zip(rows, torch.split(logits, [row.count for row in rows]), strict=True):
            pieces[row.sequence].append(piece)
            at[row.sequence] += row.count
    return [torch.cat(each) for each in pieces]


def _next_chunks(at: list[int], lengths: list[int], cut: bool) -> Iterator[Row]:
    """Yield the next chunk of every unfinished sequence. The last token is a chunk by itself, as in a decode."""
    for sequence, (start, length) in enumerate(zip(at, lengths, strict=True)):
        rest = length - start
        count = min(_CHUNK, max(1, rest - 1)) if cut else rest
        if rest:
            yield Row(sequence, start, count, True)


def _run_stages(
    stages: list[Stage], arenas: list[KvArena], rows: tuple[Row, ...], tokens: np.ndarray[Any, Any]
) -> torch.Tensor:
    hidden = result = None
    for stage, arena in zip(stages, arenas, strict=True):
        for row in rows:
            arena.mark_used(row)
        result = run_batch(stage, arena, Batch(rows, tokens, hidden, ()), head_rows=range(len(tokens)))
        hidden = None if stage.has_head or result is None else copy_to_array(result)
    if result is None:
        raise RuntimeError("the last stage gave no logits")
    return result
