"""Compute the logits that weights of few bits stand for: dequantized, in transformers' float32 arithmetic.

Also what is left of them when the inputs of every product are rounded to 8 bits, as llama.cpp rounds them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import bench_gguf
import bench_gptq
import gguf
import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM

from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.location import locate_model
from swarm.stage.quantization.at_load import Quantization
from swarm.stage.quantization.decoding import read_stored

Logits = np.ndarray[Any, np.dtype[np.float32]]
Rounding = Callable[[torch.Tensor], torch.Tensor]


class Exact:
    """A plain model in float32, which takes other weights."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._plain = {name: weight.detach().clone() for name, weight in self.model.named_parameters()}

    def logits(self, prompts: Sequence[Sequence[int]]) -> Logits:
        """Return the logits after every token of every prompt."""
        with torch.inference_mode():
            rows = [self.model(torch.tensor([prompt]), use_cache=False).logits[0] for prompt in prompts]
        return torch.cat(rows).numpy()

    def take(self, weight_of: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        """Replace every weight by what ``weight_of`` returns for its name and plain values."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weight_of(name, self._plain[name]))

    def take_file(self, file: Path) -> None:
        """Take the weights of a GGUF file."""
        tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(file).tensors}
        config = self.model.config

        def read(name: str, plain: torch.Tensor) -> torch.Tensor:
            tensor = tensors[bench_gguf.gguf_name(name)]
            weight = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).view(plain.shape)
            if name.endswith("q_proj.weight"):
                return halves(weight, config.num_attention_heads)
            return halves(weight, config.num_key_value_heads) if name.endswith("k_proj.weight") else weight

        self.take(read)

    def take_gptq(self, group: int) -> None:
        """Take the weights that bench_gptq.py's files stand for."""

        def read(name: str, plain: torch.Tensor) -> torch.Tensor:
            if not bench_gptq.QUANTIZED.fullmatch(name):
                return plain
            return bench_gptq.dequantize(bench_gptq.quantize(plain, group), group)

        self.take(read)

    def take_own(self, folder: Path, quantization: Quantization) -> None:
        """Take the weights of a plain checkpoint as a worker quantizes them at load."""
        chosen = Checkpoint.at(locate_model(str(folder)), quantization).quantized

        def read(name: str, plain: torch.Tensor) -> torch.Tensor:
            return read_stored(chosen[name]).dequantize(torch.float32) if name in chosen else plain

        self.take(read)

    @contextmanager
    def rounded(self, file: Path) -> Iterator[None]:
        """Round the inputs of every product, as llama.cpp does with the types of this file."""
        types = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(file).tensors}
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                if isinstance(module, nn.Linear):
                    stored = bench_gguf.gguf_name(f"{name}.weight")
                    rounding = rounding_of(types[stored if stored in types else "token_embd.weight"])
                    hook = module.register_forward_pre_hook(lambda _, given, how=rounding: (how(given[0]),))
                    stack.callback(hook.remove)
            yield


def halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undo ``bench_gguf.neighbours``."""
    return weight.view(heads, -1, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def rounding_of(kind: gguf.GGMLQuantizationType) -> Rounding:
    """Return how llama.cpp rounds what it multiplies with weights of this type."""
    if kind.name.endswith("_K"):
        return round_super_groups
    return {"F32": lambda x: x, "F16": lambda x: x.half().float(), "BF16": lambda x: x.bfloat16().float()}.get(
        kind.name, round_groups
    )


def round_groups(x: torch.Tensor) -> torch.Tensor:
    """Q8_0: a float16 scale for 32 inputs."""
    grouped = x.unflatten(-1, (-1, 32))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    codes = torch.where(scale > 0, grouped / scale, torch.zeros(())).round()
    return (codes * scale.half().float()).flatten(-2)


def round_super_groups(x: torch.Tensor) -> torch.Tensor:
    """Q8_K: a float32 scale for 256 inputs."""
    grouped = x.unflatten(-1, (-1, 256))
    scale = grouped.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale > 0, grouped / scale, torch.zeros(())).round() * scale).flatten(-2)
