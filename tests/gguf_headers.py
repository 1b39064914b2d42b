"""GGUF files without a model in them: a header, and tensors of zeros. They need no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

VOCABULARY = 12


def write_file(
    path: Path,
    tensors: Mapping[str, tuple[int, ...]] | None = None,
    architecture: str = "llama",
    change: Callable[[gguf.GGUFWriter], object] = lambda _: None,
    **settings: Any,
) -> Path:
    """Write a file of float32 tensors, by default those of a tiny llama of two layers."""
    writer = gguf.GGUFWriter(path, architecture)
    sizes = {
        "block_count": 2,
        "context_length": 64,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "head_count": 2,
        "head_count_kv": 1,
        "layer_norm_rms_eps": 1e-5,
        "rope_freq_base": 10000.0,
    }
    for name, value in (sizes | settings).items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    change(writer)
    for name, shape in (llama_tensors() if tensors is None else tensors).items():
        writer.add_tensor(name, np.zeros(shape, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def llama_tensors() -> dict[str, tuple[int, ...]]:
    tensors: dict[str, tuple[int, ...]] = {"token_embd.weight": (VOCABULARY, 8), "output_norm.weight": (8,)}
    for layer in range(2):
        shapes = {
            "attn_norm": (8,),
            "attn_q": (8, 8),
            "attn_k": (4, 8),
            "attn_v": (4, 8),
            "attn_output": (8, 8),
            "ffn_norm": (8,),
            "ffn_gate": (16, 8),
            "ffn_up": (16, 8),
            "ffn_down": (8, 16),
        }
        tensors |= {f"blk.{layer}.{name}.weight": shape for name, shape in shapes.items()}
    return tensors
