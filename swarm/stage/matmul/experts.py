"""Mixtures of experts: every expert multiplies the rows that chose it, with bits independent of how many rows did.

transformers keeps the experts of a layer as one three-dimensional weight and calls a function by its registered name.
During decoding, an expert usually gets few rows, and kernels treat few rows differently. Products therefore take tiles
of fixed numbers of rows (``tiled``), and activations take whole vectors. A row's results are added in the order of the
experts' numbers.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from transformers.integrations import moe

from swarm.stage.matmul.elementwise import ALIGN, aligned_length
from swarm.stage.matmul.probe import HEIGHTS
from swarm.stage.matmul.tiled import TiledMatmul, torch_matmul
from swarm.stage.matmul.triton_products import TritonLinear, TritonProduct, choose_height, plain_matrix

if TYPE_CHECKING:
    from swarm.stage.cuda.matmul import Matrix

NAME = "swarm"  # under which transformers finds the function
_PACKED = "swarm_matrices"  # attribute of a layer's experts: their quantized matrices on a device, by name
_PRODUCTS = "swarm_products"  # attribute: the two products on a device, made at first use


def register() -> None:
    """Register the function with transformers. Idempotent."""
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, mix_experts)


def describe_experts(module: Any, *, is_transposed: bool) -> None:
    """Describe a layer's experts, which have gates alone, as transformers describes those of other kinds."""
    about = {"is_transposed": is_transposed, "has_gate": True, "has_bias": False, "has_post_expert_norm": False}
    module.__class__ = type(type(module).__name__, (type(module),), about | {"_apply_gate": moe._default_apply_gate})


def mix_experts(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Return the experts' weighted results. ``hidden_states`` is [rows, hidden]; the other two are [rows, choices].
    Choices of expert -1 are left out."""
    if TritonLinear.supports(hidden_states.device, hidden_states.dtype):
        return _mix_on_device(module, hidden_states, top_k_index, top_k_weights)
    result = torch.zeros_like(hidden_states)
    # Ascending, so that a row's results are always added in the same order.
    for expert in torch.unique(top_k_index[top_k_index >= 0]).tolist():
        rows, choice = torch.where(top_k_index == expert)
        answer = _run_expert(module, expert, _pad_for_activation(hidden_states[rows], module.down_proj.shape))[
            : len(rows)
        ]
        result.index_add_(0, rows, (answer * top_k_weights[rows, choice, None]).to(result.dtype))
    return result


def _mix_on_device(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Multiply the rows of all experts together, without waiting for the device."""
    from swarm.stage.cuda.experts import combine, make_tiles, sort_choices  # noqa: PLC0415 - needs Triton

    first, down = device_products(module)
    num_experts = down.matrix.num_experts
    choices = sort_choices(top_k_index, num_experts)
    common = [height for height in first.heights if height in down.heights] or HEIGHTS
    height = choose_height(common, -(-top_k_index.numel() // num_experts))
    tiles = make_tiles(choices, height)
    inner = first(hidden_states, height=height, tiles=tiles, sources=choices.sources)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    answer = down(inner, height=height, tiles=tiles)
    if module.has_post_expert_norm:
        answer = module.post_expert_norm(answer)
    return combine(answer, top_k_weights, choices)


def device_products(module: Any) -> tuple[TritonProduct, TritonProduct]:
    """Return the products of a layer's experts on a device: before and after the activation."""
    products: tuple[TritonProduct, TritonProduct] | None = vars(module).get(_PRODUCTS)
    if products is not None:
        return products
    packed: dict[str, Matrix] = getattr(module, _PACKED, {})

    def product(name: str) -> TritonProduct:
        weight = getattr(module, name)
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        matrix = packed[name] if name in packed else plain_matrix(outputs_first(module, name))
        return TritonProduct(matrix, bias, weight.dtype)

    products = product(_first_name(module)), product("down_proj")
    setattr(module, _PRODUCTS, products)
    return products


def has_matrices(module: Any, name: str) -> bool:
    """Whether a parameter holds the matrices of a layer's experts, which ``mix_experts`` multiplies."""
    return hasattr(module, "is_transposed") and name in (_first_name(module), "down_proj")


def outputs_first(module: Any, name: str) -> torch.Tensor:
    """Return the experts' matrices as ``[experts, outputs, inputs]``."""
    tensor: torch.Tensor = getattr(module, name)
    return tensor.transpose(1, 2) if module.is_transposed else tensor


def keep_packed(module: Any, name: str, matrix: Matrix, dtype: torch.dtype) -> None:
    """Set the experts' quantized matrices, in place of their parameter."""
    setattr(module, _PACKED, {**getattr(module, _PACKED, {}), name: matrix})
    empty = torch.empty(matrix.num_experts, 0, 0, dtype=dtype, device=matrix.numbers.device)
    module._parameters[name] = torch.nn.Parameter(empty, requires_grad=False)


def _first_name(module: Any) -> str:
    return "gate_up_proj" if module.has_gate else "up_proj"


def _run_expert(module: Any, expert: int, rows: torch.Tensor) -> torch.Tensor:
    if module.has_gate:
        inner = module._apply_gate(_multiply(module, "gate_up_proj", expert, rows))
    else:
        inner = module.act_fn(_multiply(module, "up_proj", expert, rows))
    answer = _multiply(module, "down_proj", expert, inner)
    return module.post_expert_norm(answer) if module.has_post_expert_norm else answer


def _multiply(module: Any, name: str, expert: int, rows: torch.Tensor) -> torch.Tensor:
    return _expert_matmul(module, name, expert)(rows)


def _expert_matmul(module: Any, name: str, expert: int) -> TiledMatmul:
    weight = getattr(module, name)[expert]
    bias = getattr(module, f"{name}_bias")[expert] if module.has_bias else None
    return torch_matmul(weight.T if module.is_transposed else weight, bias)


def is_exact(module: Any) -> bool:
    """Whether the products of this layer's experts were shown to be exact."""
    names = (_first_name(module), "down_proj")
    if TritonLinear.supports(module.down_proj.device, module.down_proj.dtype):
        first, down = device_products(module)
        # both use the same tiles
        return first.proof.exact and down.proof.exact and not set(first.heights).isdisjoint(down.heights)
    return all(_expert_matmul(module, name, 0).proof.exact for name in names)


def _pad_for_activation(rows: torch.Tensor, down_shape: torch.Size) -> torch.Tensor:
    """Pad the rows so that their activations are cut into whole vectors, also when several threads share them."""
    multiple = ALIGN // math.gcd(ALIGN, *down_shape[1:])
    num_rows = -(-len(rows) // multiple) * multiple
    while any(aligned_length(num_rows * size, torch.get_num_threads()) != num_rows * size for size in down_shape[1:]):
        num_rows += multiple
    return functional.pad(rows, (0, 0, 0, num_rows - len(rows)))
