"""Swarm: runs one language model, cut by layers, over many processes and machines, and continues when some of them die.

The public names are here; each is imported when it is first used, so that ``import swarm`` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from swarm.version import __version__

if TYPE_CHECKING:
    from swarm.client.blocking import BlockingBatchStream, BlockingStream, Client
    from swarm.client.client import AsyncClient
    from swarm.client.results import BatchPiece, Choice, Completion, Embedding, Piece, RankedDocument, Usage
    from swarm.client.stream import BatchStream, PromptStream
    from swarm.errors import (
        ClientError,
        InvalidRequest,
        Overloaded,
        ReadElsewhere,
        RequestCancelled,
        RequestFailed,
        RequestTimeout,
        SwarmError,
        Unavailable,
    )
    from swarm.params import Grammar, SamplingParams, Thinking


_MODULES = {  # Module of each public name.
    "AsyncClient": "swarm.client.client",
    "BatchPiece": "swarm.client.results",
    "BatchStream": "swarm.client.stream",
    "BlockingBatchStream": "swarm.client.blocking",
    "BlockingStream": "swarm.client.blocking",
    "Choice": "swarm.client.results",
    "Client": "swarm.client.blocking",
    "ClientError": "swarm.errors",
    "Completion": "swarm.client.results",
    "Embedding": "swarm.client.results",
    "Grammar": "swarm.params",
    "InvalidRequest": "swarm.errors",
    "Overloaded": "swarm.errors",
    "Piece": "swarm.client.results",
    "PromptStream": "swarm.client.stream",
    "RankedDocument": "swarm.client.results",
    "ReadElsewhere": "swarm.errors",
    "RequestCancelled": "swarm.errors",
    "RequestFailed": "swarm.errors",
    "RequestTimeout": "swarm.errors",
    "SamplingParams": "swarm.params",
    "SwarmError": "swarm.errors",
    "Thinking": "swarm.params",
    "Unavailable": "swarm.errors",
    "Usage": "swarm.client.results",
}

__all__ = [
    "AsyncClient",
    "BatchPiece",
    "BatchStream",
    "BlockingBatchStream",
    "BlockingStream",
    "Choice",
    "Client",
    "ClientError",
    "Completion",
    "Embedding",
    "Grammar",
    "InvalidRequest",
    "Overloaded",
    "Piece",
    "PromptStream",
    "RankedDocument",
    "ReadElsewhere",
    "RequestCancelled",
    "RequestFailed",
    "RequestTimeout",
    "SamplingParams",
    "SwarmError",
    "Thinking",
    "Unavailable",
    "Usage",
    "__version__",
]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module 'swarm' has no attribute {name!r}")
    value = getattr(import_module(_MODULES[name]), name)
    globals()[name] = value
    return value
