"""Description of a stage's kernels in words, for ``swarmctl nodes`` and ``plan``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
import transformers

from swarm.stage import native
from swarm.stage.attention import function as attention
from swarm.stage.attention import native_attention
from swarm.stage.attention.grid import CELL
from swarm.stage.attention.paged import find_kernels
from swarm.stage.engine.kv_transfers import shape_in_config
from swarm.stage.matmul import experts, linears, proofs
from swarm.stage.matmul.probe import Proof
from swarm.stage.matmul.raw_matmul import has_other_matrices, raw_matrices
from swarm.stage.matmul.triton_products import TritonLinear
from swarm.stage.model import program
from swarm.stage.model.build import ModelSkeleton, Stage
from swarm.stage.model.weight_formats import PLAIN, WeightFormats
from swarm.stage.modules import experts as own_experts
from swarm.stage.modules.latents import TorchHeadProducts, TritonHeadProducts
from swarm.stage.native.linears import NativeLinear
from swarm.stage.native.variant_choice import PORTABLE
from swarm.version import __version__


def describe_kernels(
    skeleton: ModelSkeleton,
    roots: Iterable[torch.nn.Module],
    left_to_torch: Sequence[str] = (),
    *,
    formats: WeightFormats = PLAIN,
    same_bits_when_cut: bool = True,
) -> str:
    """Describe what multiplies in these modules, whose bits that gives, the dtype, and whether it is exact.

    Exact means that a sequence's bits depend on nothing but itself. Our own kernels guarantee it by design, and tests
    check them. torch's kernels, and ours for GPUs, are called exact where a probe on the device that serves has shown
    it. On other devices than CPUs that can be shown for products only, not for norms: a stage there is called inexact.
    ``left_to_torch`` lists the stage's operations that torch computes in a processor's own way
    (``portability``). ``formats`` are those of the whole model. ``same_bits_when_cut``: whether a tiny model of this
    kind had the same bits cut into stages as whole.
    """
    modules = [module for root in roots for module in root.modules()]
    products = ", ".join([_describe_linears(skeleton, modules), *_describe_formats(skeleton, formats)])
    parts = [f"linears {products}", f"attention {_describe_attention(skeleton)}"]
    if _has_experts(skeleton):
        parts.insert(1, f"experts {_describe_experts(skeleton)}")
    has_exact_products = all(map(_is_exact, modules))
    is_cpu = skeleton.device.type == "cpu"
    exact = same_bits_when_cut and is_cpu and has_exact_products and _is_attention_exact(skeleton)
    dtype = str(skeleton.dtype).removeprefix("torch.")
    parts.append(_bits_owner(skeleton, left_to_torch))
    notes = f" (not Swarm's own: {native.unavailable_reason()})" if _could_be_native(skeleton) else ""
    notes += f" (rejected: {native.rejected_variants()})" if native.rejected_variants() else ""
    notes += " (products are exact)" if has_exact_products and not is_cpu else ""
    return f"{'; '.join(parts)}; {dtype}, {'exact' if exact else 'inexact'}{notes}"


@lru_cache(maxsize=2)
def _has_experts(skeleton: ModelSkeleton) -> bool:
    """Whether the model has experts, which are stored as a three-dimensional parameter. A worker that takes layers over
    has no time for looking at all modules again."""
    return any(map(_holds_experts, skeleton.model.modules()))


def describe_bits(skeleton: ModelSkeleton, left_to_torch: Sequence[str], formats: WeightFormats = PLAIN) -> str:
    """Return a text that is equal for two workers if their bits are known to be.

    Where bits are portable, every kernel of the family gives the same ones. Where torch takes part, they depend on the
    type of machine, but not on which of the operations are torch's. Workers of one machine, of which one has layers
    that leave nothing to torch, have unequal texts.
    """
    owner, parts = _bits_owner(skeleton, left_to_torch), [str(skeleton.dtype), *_describe_formats(skeleton, formats)]
    if owner == _PORTABLE:
        return ", ".join([owner, *parts])
    parts = [_kernel_name(skeleton.kernel), f"attention {_describe_attention(skeleton)}", *parts]
    if _has_experts(skeleton):
        parts.append(f"experts {_describe_experts(skeleton)}")
    if left_to_torch or "torch" in owner:
        parts.append(f"on machines of make {proofs.machine_id(skeleton.device)}")
    return ", ".join(parts)


def describe_code() -> str:
    """Return the versions of all code that decides bits. Another text may mean other bits, even where
    ``describe_bits`` gives the same one: that text compares workers of one swarm, not of different times."""
    opened, _ = native.open_library()
    sources = "none" if opened is None else opened.swarm_native_sources().decode()
    return f"swarm {__version__}, torch {torch.__version__}, transformers {transformers.__version__}, C {sources}"


def describe_fallback(stage: Stage) -> str:
    """Return why a stage's steps are not one native call each.

    Empty if they are, or if no kernel is our own. The bits are the same either way.
    """
    if native.library() is None or stage.device.type != "cpu" or stage.dtype not in native.KINDS:
        return ""
    why = program.disabled_reason() or stage.no_program_reason
    return f" (module by module: {why})" if why else ""


_PORTABLE = "portable bits"


def _bits_owner(skeleton: ModelSkeleton, left_to_torch: Sequence[str]) -> str:
    if skeleton.kernel is not NativeLinear:
        return "bits of torch"
    if skeleton.dtype != torch.float32 and native.variant() not in PORTABLE:
        return f"bits of {native.variant()}"
    return f"{_PORTABLE} but for torch's {', '.join(left_to_torch)}" if left_to_torch else _PORTABLE


def _describe_linears(skeleton: ModelSkeleton, modules: list[torch.nn.Module]) -> str:
    """Name the kernels of linear layers: our own with their variant, torch's with the tiles that they need."""
    tilings_by_kernel: dict[str, set[str]] = {}
    for module in modules:
        if isinstance(module, linears.KERNELS):
            tilings = () if isinstance(module, NativeLinear) else module.tiling
            tilings_by_kernel.setdefault(_kernel_name(type(module)), set()).update(tilings)
    tilings_by_kernel = tilings_by_kernel or {_kernel_name(skeleton.kernel): set()}
    ways = {name: " or ".join(sorted(filter(None, how))) for name, how in tilings_by_kernel.items()}
    return ", ".join(f"{name} in tiles of {how}" if how else name for name, how in ways.items())


def _describe_formats(skeleton: ModelSkeleton, formats: WeightFormats) -> list[str]:
    """Return the formats of the model's quantized matrices in words, and how rows are rounded."""
    names = [f"{form.name} in groups of {form.group}" for form in formats.distinct()]
    return [*names, "rows as int8"] if names and skeleton.rows.int8 else names


def _kernel_name(kernel: linears.LinearKernel) -> str:
    return f"{kernel.name} {native.variant()}" if issubclass(kernel, NativeLinear) else kernel.name


def _is_exact(module: torch.nn.Module) -> bool:
    """Whether the bits of this module's own products are independent of the other rows."""
    if isinstance(module, (linears.KERNELS, TorchHeadProducts, TritonHeadProducts)):
        return module.exact
    if _holds_experts(module):
        return hasattr(module, "is_transposed") and experts.is_exact(module)
    return not has_other_matrices(module) and not any(matrix.doubts for matrix in raw_matrices(module))


def _holds_experts(module: torch.nn.Module) -> bool:
    """Whether the module has matrices of several experts. Weights of a convolution have as many dimensions."""
    is_convolution = isinstance(module, torch.nn.Conv1d)
    return not is_convolution and any(parameter.ndim == 3 for parameter in module.parameters(recurse=False))


def _is_attention_exact(skeleton: ModelSkeleton) -> bool:
    key = torch.empty(0, dtype=skeleton.dtype, device=skeleton.device)
    return native_attention.supports(key) or _prove_attention(skeleton).exact


def _could_be_native(skeleton: ModelSkeleton) -> bool:
    return skeleton.device.type == "cpu" and skeleton.dtype in native.KINDS and native.library() is None


def _describe_experts(skeleton: ModelSkeleton) -> str:
    every = [part for part in skeleton.model.modules() if _holds_experts(part)]
    if skeleton.kernel is NativeLinear and all(own_experts.gate_function(part) is not None for part in every):
        return "native, by group"
    if skeleton.kernel is TritonLinear:
        return f"{TritonLinear.name}, by group"
    return f"{linears.PlainLinear.name}, one by one"


def _describe_attention(skeleton: ModelSkeleton) -> str:
    if native_attention.supports(torch.empty(0, dtype=skeleton.dtype, device=skeleton.device)):
        return "native"
    if skeleton.device.type != "cpu":
        return f"pages, {'torch' if find_kernels(skeleton.device) is None else 'Triton'}"
    # Where long sums are split over threads, another number of threads gives other bits.
    threads = _prove_attention(skeleton).threads
    by = f" by {' or '.join(map(str, threads))} threads" if threads else ""
    return f"torch on cells of {CELL}{by}"


def _prove_attention(skeleton: ModelSkeleton) -> Proof:
    """Return the proof for torch's attention with the model's heads."""
    config, shape = skeleton.config.get_text_config(), shape_in_config(skeleton.config)
    num = getattr(config, "num_attention_heads", 1)  # models without attention have none
    like = torch.empty(0, dtype=skeleton.dtype, device=skeleton.device)
    query, key = (like.new_empty(0, heads, shape.key_size) for heads in (num, shape.heads))
    value = key[..., : shape.value_size or config.kv_lora_rank]
    return attention.prove_attention(query, key, value, is_latent=not shape.value_size)[0]
