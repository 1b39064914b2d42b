"""What each part of a swarm needs beside what a client has: an extra of the package, which may not be installed."""

from __future__ import annotations

import importlib.util
from typing import Final

from swarm.errors import SwarmError

FOR_MODELS: Final = ("torch", "transformers", "safetensors", "huggingface_hub")
_NEEDED: Final = {
    "broker": ("uvloop",),
    "gateway": ("fastapi", "uvicorn", "uvloop", "aiohttp", "prometheus_client"),
    "worker": (*FOR_MODELS, "uvloop"),
}


class Missing(SwarmError):
    """It may pass: while a newer version is installed, packages come and go. So services are tried again."""


def missing(part: str) -> str:
    """Say what is missing to run a ``broker``, ``gateway`` or ``worker``, and what to do; empty if nothing is."""
    absent = [name for name in _NEEDED[part] if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    article = "a" if part == "worker" else "the"
    return f"{article} {part} needs packages that are not installed ({', '.join(absent)}): pip install 'swarm[{part}]'"


def demand(*parts: str) -> None:
    """Raise Missing if one of these can't run for want of packages."""
    if lacking := [each for each in map(missing, parts) if each]:
        raise Missing("; ".join(lacking))
