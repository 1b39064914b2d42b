"""Files of a model without a model: its settings, and weights of 4 × 4, float32; and GGUF files of any sizes."""

from __future__ import annotations

import json
import random
import struct

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


def gguf(tensors: dict[str, int], *, seed: int = 0, note: str = "", alignment: int = 32) -> bytes:
    """A GGUF file with vectors of that many float32, of random bytes, and as many zeros between them as must be."""
    pieces = [b"GGUF", struct.pack("<IQQ", 3, len(tensors), 1), gguf_text("general.note"), struct.pack("<I", 8)]
    pieces.append(gguf_text(note))
    offset = 0
    for name, length in tensors.items():
        pieces.append(gguf_text(name) + struct.pack("<IQIQ", 1, length, 0, offset))
        offset += padded(4 * length, alignment)
    header = b"".join(pieces)
    data = [
        random.Random(seed + length).randbytes(4 * length).ljust(padded(4 * length, alignment), b"\0")
        for length in tensors.values()
    ]
    return header.ljust(padded(len(header), alignment), b"\0") + b"".join(data)


def gguf_text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def padded(num_bytes: int, alignment: int) -> int:
    return -(-num_bytes // alignment) * alignment
