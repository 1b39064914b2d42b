"""Ollama's descriptions of models: /api/tags, /api/show, /api/ps. Pure."""

from __future__ import annotations

import re
from hashlib import sha256

import msgspec

from swarm.gateway.apis.ollama_writer import timestamp
from swarm.gateway.apis.writer import Json
from swarm.gateway.completion.served_model import ServedModel
from swarm.wire.messages import LayerRange, Manifest

# The version of Ollama whose API these routes follow. Clients require a certain one.
API_VERSION = "0.12.11"
NEVER = "2099-01-01T00:00:00Z"  # when a loaded model expires
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_DTYPE_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}


def weight_bytes(manifest: Manifest) -> int:
    """Return the bytes of the model's weights."""
    return manifest.weight_bytes(LayerRange(0, manifest.num_layers))


def num_parameters(manifest: Manifest) -> int | None:
    """Return the number of the model's parameters; None if its weights are quantized."""
    size = None if manifest.weights else _DTYPE_BYTES.get(manifest.dtype)
    return None if size is None else weight_bytes(manifest) // size


def capabilities(served: ServedModel) -> list[str]:
    generates = not served.manifest.is_headless
    has_chat = generates and served.text is not None and served.text.template is not None
    abilities = {
        "completion": generates,
        "tools": has_chat,
        "vision": has_chat and served.manifest.vision is not None,
        "thinking": has_chat and served.reasoning_format is not None,
        "embedding": served.embeds,
    }
    return [name for name, is_there in abilities.items() if is_there]


def describe(served: ServedModel, created: int) -> Json:
    """Return the model as a row of /api/tags."""
    manifest = served.manifest
    return {
        "name": served.name,
        "model": served.name,
        "modified_at": timestamp(created),
        "size": weight_bytes(manifest),
        "digest": sha256(msgspec.json.encode(manifest)).hexdigest(),
        "details": _details(manifest),
    }


def describe_loaded(served: ServedModel, created: int) -> Json:
    """Return the model as a row of /api/ps."""
    described = describe(served, created)
    del described["modified_at"]
    return {**described, "expires_at": NEVER, "size_vram": 0, "context_length": served.manifest.context}


def describe_fully(served: ServedModel, created: int) -> Json:
    """Return the response of /api/show."""
    manifest, text = served.manifest, served.text
    architecture, count = _family(manifest), num_parameters(manifest)
    return {
        "license": "",
        "modelfile": "",
        "parameters": "",
        "template": "" if text is None else text.template_source,
        "details": _details(manifest),
        "model_info": {
            "general.architecture": architecture,
            **({} if count is None else {"general.parameter_count": count}),
            f"{architecture}.block_count": manifest.num_layers,
            f"{architecture}.context_length": manifest.context,
            f"{architecture}.embedding_length": manifest.hidden_size,
            f"{architecture}.vocab_size": manifest.vocab_size,
        },
        "capabilities": capabilities(served),
        "modified_at": timestamp(created),
    }


def _family(manifest: Manifest) -> str:
    """Return the architecture as Ollama calls it: llama for LlamaForCausalLM."""
    return re.sub(r"(For[A-Z]\w*|LMHeadModel)( \(text only\))?$", "", manifest.architecture).lower()


def _details(manifest: Manifest) -> Json:
    is_gguf = any(file.name.endswith(".gguf") for file in manifest.files)
    count = num_parameters(manifest)
    return {
        "parent_model": "",
        "format": "gguf" if is_gguf else "safetensors",
        "family": _family(manifest),
        "families": [_family(manifest)],
        "parameter_size": "" if count is None else _short_count(count),
        "quantization_level": manifest.weights or _DTYPE_NAMES.get(manifest.dtype, manifest.dtype),
    }


def _short_count(count: int) -> str:
    for size, unit in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if count >= size:
            return f"{count / size:.1f}{unit}"
    return str(count)
