"""Source of tensors from GGUF files, in the names, shapes and order of rows of the model's modules."""

from __future__ import annotations

import torch

from swarm.errors import ModelError
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.gguf_names import Change, GgufTensor
from swarm.stage.native.quantizing import quantize
from swarm.stage.quantization.decoding import open_stored
from swarm.stage.quantization.formats import WeightFormat
from swarm.stage.quantization.reading import read_tensor
from swarm.stage.quantization.tensors import QuantizedWeight, can_join, join_rows


class GgufSource:
    """Implementation of ``WeightSource`` for GGUF files.

    The experts' matrices ``gate_up_proj`` are made of two tensors. In gpt-oss their rows alternate, and its modules
    hold all of the experts' matrices transposed.
    """

    def __init__(self, checkpoint: Checkpoint) -> None:
        assert checkpoint.gguf is not None, "the caller has checked"
        self._checkpoint = checkpoint
        self._tensors: dict[str, GgufTensor] = checkpoint.gguf
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
        pieces = [self._read_piece(piece) for piece in self.stored_names(name)]
        is_bias = name.endswith("_bias")
        result = pieces[0]
        if len(pieces) == 2:
            rows = -1 if is_bias else -2
            self._check_pieces(name, pieces)
            result = torch.cat([piece.to(torch.float32) for piece in pieces], dim=rows)
            if self._alternates:
                result = result.index_select(rows, _alternating(result.shape[rows]))
        if self._alternates and ".experts." in name and not is_bias:
            result = result.transpose(-1, -2).contiguous()
        return result

    def shape(self, name: str) -> torch.Size:
        sizes = [list(self._tensors[piece].stored.shape) for piece in self.stored_names(name)]
        rows = -1 if name.endswith("_bias") else -2
        if len(sizes) == 2:
            sizes[0][rows] += sizes[1][rows]
        if self._alternates and ".experts." in name and rows == -2:
            sizes[0][-2:] = sizes[0][:-3:-1]
        return torch.Size(sizes[0])

    def weight_format(self, name: str) -> WeightFormat | None:
        weight = self.quantized(name)
        return None if weight is None else weight.format

    def quantized(self, name: str) -> QuantizedWeight | None:
        """Return a quantized matrix; None if the tensor is plain, or is made of tensors of different types."""
        weights = [self._open_piece(piece) for piece in self.stored_names(name)]
        known = [weight for weight in weights if weight is not None]
        if not known or len(known) < len(weights) or not can_join(known):
            return None
        result = join_rows(known)
        if len(known) == 2 and self._alternates:
            result = result.reordered("alternating", _alternating(result.shape[-2]))
        return result

    def _open_piece(self, name: str) -> QuantizedWeight | None:
        stored = self._checkpoint.quantized.get(name)
        if stored is None:
            return None
        weight = open_stored(stored, self._checkpoint.digest_files(stored), quantize)
        change = self._tensors[name].change
        if change in self._heads:
            return weight.reordered(f"halves of {self._heads[change]} heads", self._halves(name, stored.shape, change))
        return weight

    def _read_piece(self, name: str) -> torch.Tensor:
        weight = self._open_piece(name)
        if weight is not None:
            return weight.read().dequantize(torch.float32)
        tensor, change = read_tensor(self._checkpoint.tensors[name]), self._tensors[name].change
        if change in self._heads:
            return tensor.index_select(0, self._halves(name, tuple(tensor.shape), change))
        return tensor.to(torch.float32) - 1 if change is Change.PLUS_ONE else tensor

    def _halves(self, name: str, shape: tuple[int, ...], change: Change) -> torch.Tensor:
        """Return the rows in the order of the model: of each head first the even ones, then the odd ones."""
        rows, heads = shape[0], self._heads[change]
        if rows % (2 * heads):
            path = self._tensors[name].stored.path
            raise ModelError(f"{path} has {name} with {rows} rows for {heads} heads; download it again")
        return torch.arange(rows).view(heads, -1, 2).transpose(1, 2).reshape(-1)

    def _check_pieces(self, name: str, pieces: list[torch.Tensor]) -> None:
        if pieces[0].shape != pieces[1].shape:
            shapes = " and ".join(str(list(piece.shape)) for piece in pieces)
            path = self._tensors[self.stored_names(name)[0]].stored.path
            raise ModelError(f"{path} has the pieces of {name} with shapes {shapes}; download it again")


def _alternating(rows: int) -> torch.Tensor:
    """Return the order of rows that takes one of the first half, then one of the second half."""
    return torch.arange(rows).view(2, -1).T.reshape(-1)
