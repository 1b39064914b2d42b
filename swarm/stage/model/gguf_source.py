"""Reading of tensors from GGUF files, in the names, shapes and order of rows of the model's modules.

A stage reads the bytes of its own tensors and nothing else, through ``read_bytes``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.gguf_names import Change, GgufTensor
from swarm.stage.quantization.gguf_decode import decode_gguf
from swarm.stage.quantization.gguf_formats import FORMATS
from swarm.stage.quantization.tensors import QuantizedTensor, QuantizedWeight, can_join, join_rows

_DTYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}

ReadBytes = Callable[[StoredTensor], torch.Tensor]


def read_bytes(stored: StoredTensor) -> torch.Tensor:
    """Return the bytes of a tensor, in memory of their own. Raises ``ModelError``."""
    data = torch.empty(stored.num_bytes, dtype=torch.uint8)
    rest = memoryview(data.numpy())  # type: ignore[arg-type]
    try:
        with stored.path.open("rb", buffering=0) as file:
            file.seek(stored.offset)
            while len(rest):
                count = file.readinto(rest)
                if not count:
                    raise ModelError(f"{stored.path} ends inside tensor {stored.name}; download it again")
                rest = rest[count:]
    except OSError as error:
        raise ModelError(f"{stored.path} can't be read ({error}) at tensor {stored.name}") from None
    return data


class GgufSource:
    """Source of a model's tensors in GGUF files; it implements ``WeightSource``.

    The experts' matrices ``gate_up_proj`` are made of two tensors. In gpt-oss their rows alternate, and the modules
    hold them transposed; quantized, a matrix is ``[outputs, inputs]`` in every model.
    """

    def __init__(self, checkpoint: Checkpoint, read: ReadBytes = read_bytes) -> None:
        assert checkpoint.gguf is not None, "the caller has checked"
        self._tensors: dict[str, GgufTensor] = checkpoint.gguf
        self._digests = checkpoint.digests
        self._read = read
        config = checkpoint.text_config
        self._heads = {
            Change.QUERY_ROWS: int(config["num_attention_heads"]),
            Change.KEY_ROWS: int(config["num_key_value_heads"]),
        }
        self._alternates = config["model_type"] == "gpt_oss"

    def __contains__(self, name: str) -> bool:
        return bool(self.stored_names(name))

    def stored_names(self, name: str) -> list[str]:
        """Return the names of the stored tensors that this tensor is made of; empty if the files do not have it."""
        pieces = [name]
        if ".experts.gate_up_proj" in name:
            pieces = [name.replace("gate_up_proj", part) for part in ("gate_proj", "up_proj")]
        return pieces if all(piece in self._tensors for piece in pieces) else []

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        """Return the tensor as the model's module holds it; a quantized one as float32. The caller checks the shape."""
        pieces = [self._read_piece(self._tensors[piece]) for piece in self.stored_names(name)]
        is_bias = name.endswith("_bias")
        result = pieces[0]
        if len(pieces) == 2 and pieces[0].shape == pieces[1].shape:
            rows = -1 if is_bias else -2
            result = torch.cat([piece.to(torch.float32) for piece in pieces], dim=rows)
            if self._alternates:
                result = result.index_select(rows, _alternating(result.shape[rows]))
        if self._alternates and ".experts." in name and not is_bias:
            result = result.transpose(-1, -2).contiguous()
        return result

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return the tensor if it is quantized; None if it is plain, or is made of tensors of different types."""
        pieces = [self._tensors[piece] for piece in self.stored_names(name)]
        if not pieces or any(piece.stored.dtype not in FORMATS for piece in pieces):
            return None
        weights = [self._describe_quantized(piece) for piece in pieces]
        if not can_join(weights):
            return None
        result = join_rows(weights)
        if len(weights) == 2 and self._alternates:
            result = result.reordered("alternating", _alternating(result.shape[-2]))
        return result

    def _describe_quantized(self, tensor: GgufTensor) -> QuantizedWeight:
        stored = tensor.stored
        weight = QuantizedWeight(
            FORMATS[stored.dtype],
            torch.Size(stored.shape),
            f"{self._digests[stored.path.name]} {stored.name}",
            partial(self._decode, stored),
        )
        if tensor.change in self._heads:
            index = self._halves(stored, tensor.change)
            weight = weight.reordered(f"halves of {self._heads[tensor.change]} heads", index)
        return weight

    def _decode(self, stored: StoredTensor) -> QuantizedTensor:
        return decode_gguf(stored.dtype, self._read(stored), torch.Size(stored.shape))

    def _read_piece(self, tensor: GgufTensor) -> torch.Tensor:
        stored = tensor.stored
        if stored.dtype in FORMATS:
            return self._describe_quantized(tensor).read().dequantize(torch.float32)
        result = self._read(stored).view(_DTYPES[stored.dtype]).view(stored.shape)
        if tensor.change in self._heads:
            return result.index_select(0, self._halves(stored, tensor.change))
        if tensor.change is Change.PLUS_ONE:
            return result.to(torch.float32) - 1
        return result

    def _halves(self, stored: StoredTensor, change: Change) -> torch.Tensor:
        """Return the rows in the order of the model: of each head first the even ones, then the odd ones."""
        rows, heads = stored.shape[0], self._heads[change]
        if rows % (2 * heads):
            raise ModelError(f"{stored.path} has {stored.name} with {rows} rows for {heads} heads; download it again")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)


def _alternating(rows: int) -> torch.Tensor:
    """Return the order of rows that takes one of the first half, then one of the second half."""
    return torch.arange(rows).view(2, -1).T.reshape(-1)
