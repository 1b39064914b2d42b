"""/v1/models: the served model and its capabilities. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from swarm.gateway.completion.served_model import ServedModel


def describe_model(served: ServedModel, created: int, state: str) -> dict[str, Any]:
    """Describe a model. ``swarm`` has fields beyond those of OpenAI's format; ``state`` is that of its swarm."""
    manifest, text = served.manifest, served.text
    has_template = text is not None and text.template is not None
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "swarm",
        "root": served.name,
        "parent": manifest.name if served.adapter else None,
        "max_model_len": manifest.context,
        "swarm": {
            "state": state,
            "architecture": manifest.architecture,
            "context": manifest.context,
            "context_now": min(served.max_context or manifest.context, manifest.context),
            "vocabulary": manifest.vocab_size,
            "dtype": manifest.dtype,
            "weights": manifest.weights or manifest.dtype,
            "text": text is not None,
            "chat": has_template,
            "tools": served.tool_format.name if has_template else None,
            "image": has_template and manifest.vision is not None,
            "thinking": has_template and served.reasoning_format is not None,
            "json_schema": text is not None,
            "generation": not manifest.is_headless,
            "embeddings": served.embeds,
            "rerank": manifest.num_labels == 1,
            "aliases": list(served.aliases),
        },
    }


def to_anthropic_model(described: dict[str, Any]) -> dict[str, Any]:
    """Convert a description into Anthropic's format."""
    context = described.get("max_model_len")
    return {
        "type": "model",
        "id": described["id"],
        "display_name": described["id"],
        "created_at": datetime.fromtimestamp(described["created"], UTC).isoformat().replace("+00:00", "Z"),
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }


def to_anthropic_list(described: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Convert descriptions into a page of Anthropic's format; there is one page."""
    data = [to_anthropic_model(model) for model in described]
    return {"data": data, "has_more": False, **_ends(data)}


def _ends(data: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {"first_id": data[0]["id"] if data else None, "last_id": data[-1]["id"] if data else None}
