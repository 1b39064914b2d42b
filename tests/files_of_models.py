"""Files of a model without a model: its settings, and weights of 4 × 4, float32."""

from __future__ import annotations

import json

TINY_CONFIG = {
    "architectures": ["TinyForCausalLM"],
    "num_hidden_layers": 2,
    "vocab_size": 4,
    "hidden_size": 4,
    "num_attention_heads": 1,
    "max_position_embeddings": 64,
}


def entry(index: int) -> dict[str, object]:
    """Of a tensor in a header: 4 × 4, float32."""
    return {"dtype": "F32", "shape": [4, 4], "data_offsets": [64 * index, 64 * index + 64]}


def as_file(header: dict[str, object], num_bytes: int) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(num_bytes)


def safetensors(*names: str) -> bytes:
    """A file with these tensors."""
    return as_file({name: entry(index) for index, name in enumerate(names)}, 64 * len(names))
