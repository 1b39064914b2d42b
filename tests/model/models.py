"""Small random models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

VOCABULARY = 500


def llama_config(**changes: Any) -> LlamaConfig:
    values: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 176,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    return LlamaConfig(**(values | changes))


def random_model(config: Any, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Weights of high entropy: a model that repeats itself hides errors."""
    generator = torch.Generator().manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        offset = 1.0 if parameter.ndim == 1 else 0.0
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + offset
    return model.to(dtype).eval().requires_grad_(False)


def load_whole(folder: Path, dtype: torch.dtype = torch.float32, attention: str = "eager") -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
    return model.eval().requires_grad_(False)
