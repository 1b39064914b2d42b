"""Settings of quantization at load, and which matrices of a plain checkpoint they apply to. Does not import torch.

Quantized at load are the matrices of linear layers, a layer's experts, the embedding and the head. Routers, biases,
norms and small matrices keep the dtype of the computation: they are a thousandth of a model, and sensitive.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.quantization.formats import Codes, WeightFormat
from swarm.stage.quantization.stored import StoredWeight
from swarm.stage.quantization.version import DECODERS

if TYPE_CHECKING:
    from swarm.config import WorkerSettings

AUTO, DENSE, INT4, INT6, INT8 = "auto", "dense", "int4", "int6", "int8"

# Parts of a model by the names of their tensors.
LAYER: Final = re.compile(r"(?:^|\.)(?:layers|h|blocks|block|layer)\.(\d+)\.")
HEAD: Final = re.compile(r"(?:^|\.)(?:lm_head|head|embed_out|output|output_layer)\.weight$")

# Version of the quantizer. Increase it when its codes or scales change: workers of unlike versions are no equals.
QUANTIZER: Final = 1

# Encodings of plain tensors that are quantized at load: as they are, and with the last two dimensions swapped.
PLAIN: Final = f"plain, quantizer {QUANTIZER}"
TRANSPOSED: Final = f"plain and transposed, quantizer {QUANTIZER}"

# Values of int4's codes, denser where weights of a group are: those of llama.cpp's IQ4_NL, halved. Twice a value is a
# whole number, and the range of these fits a byte, which is what kernels with int8 rows need.
_INT4_VALUES: Final = tuple(
    value / 2 for value in (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
)

# Heads of latents (``modules.latents``): they multiply by columns as well as by rows, so they stay plain.
LATENT_HEADS: Final = re.compile(r"\.kv_b_proj\.weight$")
# What chooses experts, and what weighs the scores by which an index chooses positions.
_ROUTER: Final = re.compile(r"\.(?:gate|router|shared_expert_gate|weights_proj)\.")
_EXPERTS: Final = re.compile(r"\.experts\.(?:gate_up_proj|gate_proj|up_proj|down_proj)$")
_TRANSPOSED_EXPERTS: Final = frozenset({"gpt_oss", "llama4", "llama4_text"})  # [experts, inputs, outputs]
# stored as [experts, inputs, outputs] or not, by the version that wrote them: they stay plain
_PLAIN_EXPERTS: Final = frozenset({"qwen3_vl_moe_text"})
_TRANSPOSED_MATRICES: Final = frozenset({"gpt2", "openai-gpt"})  # [inputs, outputs]


@dataclass(frozen=True, slots=True)
class Quantization:
    """How weights and activations are quantized: the settings ``worker.weights`` and those beside it."""

    weights: str = AUTO  # of the layers: auto, int8, int4 or dense
    group: int = 32  # weights of an output that share a scale
    embedding: str = AUTO  # auto follows ``weights``
    head: str = AUTO  # of the head, and of a table that serves as embedding and head
    activations: str = AUTO  # auto: in the dtype of the computation; int8: rounded to 8 bits before each product

    @classmethod
    def from_settings(cls, worker: WorkerSettings) -> Quantization:
        return cls(worker.weights, worker.weight_group, worker.embedding, worker.head, worker.activations)

    @property
    def is_dense(self) -> bool:
        """Whether quantized files are unpacked to the dtype of the computation."""
        return self.weights == DENSE

    @property
    def has_int8_rows(self) -> bool:
        """Whether products with quantized weights round their inputs to 8 bits."""
        return self.activations == INT8

    def choose_matrices(
        self, tensors: Iterable[StoredTensor], stored: Iterable[str], model_type: str, vocab_size: int
    ) -> dict[str, StoredWeight]:
        """Return the plain tensors of a checkpoint that are quantized at load.

        ``stored`` are the names of the matrices that are quantized in the files. Raises ``ModelError`` if the layers
        should be quantized and can't be.
        """
        tensors = [tensor for tensor in tensors if tensor.is_float]
        is_tied = not any(HEAD.search(name) for name in (*(tensor.name for tensor in tensors), *stored))
        tables = self._width_of_head() if is_tied else self._width_of_embedding()
        described = (self._describe(tensor, model_type, vocab_size, tables) for tensor in tensors)
        chosen = {weight.name: weight for weight in described if weight is not None}
        if self.weights in (INT4, INT8) and not any(LAYER.search(name) for name in chosen):
            raise ModelError(
                f"the layers of a {model_type} model can't be quantized at load; start without --weights {self.weights}"
            )
        return chosen

    def check_stored(self, stored: Iterable[StoredWeight], place: str) -> None:
        """Raise ``ModelError`` if matrices that are quantized in the model's files should be quantized otherwise."""
        kinds = sorted({weight.format.name for weight in stored})
        if kinds and self.weights in (INT4, INT8):
            raise ModelError(
                f"{place} is quantized already ({', '.join(kinds)}), and --weights {self.weights} is for plain "
                "checkpoints: leave worker.weights at auto, or name the model's float16 or bfloat16 original"
            )

    def describe(self, stored: Iterable[StoredWeight], chosen: Collection[StoredWeight]) -> str:
        """Return how a model's weights are quantized, in its files and at load; empty if they are plain.

        Equal texts mean equal numbers if the files are equal.
        """
        kinds = sorted({weight.format.name for weight in stored})
        parts = [DENSE] if kinds and self.is_dense else kinds
        if kinds:
            parts = [*parts, f"decoder {DECODERS}"]
        if chosen:
            if self.weights in (INT4, INT8):
                parts.append(self.weights)
            ends = (("embedding", self._width_of_embedding()), ("head", self._width_of_head()))
            parts += [f"{part} {width}" for part, width in ends if width not in (AUTO, self.weights)]
            parts += [f"groups of {self.group}", f"quantizer {QUANTIZER}"]
        return ", ".join(parts)

    def _describe(self, tensor: StoredTensor, model_type: str, vocab_size: int, tables: str) -> StoredWeight | None:
        width = self._width(tensor, model_type, vocab_size, tables)
        if width in (AUTO, DENSE):
            return None
        *experts, outputs, inputs = tensor.shape
        is_transposed = bool(experts) and model_type in _TRANSPOSED_EXPERTS
        if is_transposed:
            outputs, inputs = inputs, outputs
        weight = StoredWeight(
            tensor.name,
            own_format(width, self.group),
            (*experts, outputs, inputs),
            TRANSPOSED if is_transposed else PLAIN,
            {"weight": tensor},
        )
        # a smaller matrix would grow to a whole block
        return weight if weight.packed_bytes < 2 * math.prod(weight.shape) else None

    def _width(self, tensor: StoredTensor, model_type: str, vocab_size: int, tables: str) -> str:
        """Return how this tensor is quantized: int4, int6 or int8; auto or dense if it is not.

        ``tables``: how the embedding is quantized.
        """
        num_dimensions = len(tensor.shape)
        if not LAYER.search(tensor.name):
            if num_dimensions != 2 or tensor.shape[0] != vocab_size:
                return DENSE
            return self._width_of_head() if HEAD.search(tensor.name) else tables
        if num_dimensions == 3:
            return self.weights if _EXPERTS.search(tensor.name) and model_type not in _PLAIN_EXPERTS else DENSE
        is_plain = _ROUTER.search(tensor.name) or LATENT_HEADS.search(tensor.name)
        is_matrix = num_dimensions == 2 and tensor.name.endswith(".weight") and not is_plain
        return self.weights if is_matrix and model_type not in _TRANSPOSED_MATRICES else DENSE

    def _width_of_embedding(self) -> str:
        return self.weights if self.embedding == AUTO else self.embedding

    def _width_of_head(self) -> str:
        if self.head != AUTO:
            return self.head
        return INT6 if self.weights == INT4 else self.weights


AS_STORED: Final = Quantization()


def own_format(width: str, group: int) -> WeightFormat:
    """Return the format of matrices that are quantized at load."""
    if width == INT4:
        return WeightFormat(INT4, Codes.INT4, group, offset=8, table=_INT4_VALUES)
    codes, offset = {INT6: (Codes.INT6, 32), INT8: (Codes.INT8, 128)}[width]
    return WeightFormat(width, codes, group, offset=offset)
