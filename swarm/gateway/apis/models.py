"""/v1/models: the served model and its capabilities. Pure."""

from __future__ import annotations

from typing import Any

from swarm.gateway.completion.served_model import ServedModel


def describe_model(served: ServedModel, created: int) -> dict[str, Any]:
    """Describe a model. ``swarm`` has fields beyond those of OpenAI's format."""
    manifest, text = served.manifest, served.text
    has_template = text is not None and text.template is not None
    return {
        "id": served.name,
        "object": "model",
        "created": created,
        "owned_by": "swarm",
        "swarm": {
            "architecture": manifest.architecture,
            "context": manifest.context,
            "context_now": min(served.max_context or manifest.context, manifest.context),
            "vocabulary": manifest.vocab_size,
            "dtype": manifest.dtype,
            "weights": manifest.weights or manifest.dtype,
            "text": text is not None,
            "chat": has_template,
            "tools": served.tool_format.name if has_template else None,
            "json_schema": text is not None,
            "aliases": list(served.aliases),
        },
    }
