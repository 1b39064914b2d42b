"""Packages that each process of a swarm needs in addition to a client's: an extra of the package that may not be
installed."""

from __future__ import annotations

import importlib.util
from typing import Final

from swarm.errors import SwarmError
from swarm.version import install_command

FOR_MODELS: Final = ("torch", "transformers", "safetensors", "huggingface_hub")
_NEEDED: Final = {
    "broker": ("uvloop",),
    "gateway": ("fastapi", "uvicorn", "uvloop", "aiohttp", "prometheus_client"),
    "worker": (*FOR_MODELS, "uvloop"),
}


class MissingPackages(SwarmError):
    """Packages are missing. This may be temporary, during an upgrade, so services are restarted after this error."""


def missing_packages(part: str) -> str:
    """Return which packages a ``broker``, ``gateway`` or ``worker`` lacks, and the remedy; empty if none is missing."""
    absent = [name for name in _NEEDED[part] if importlib.util.find_spec(name) is None]
    if not absent:
        return ""
    article = "a" if part == "worker" else "the"
    return f"{article} {part} needs packages that are not installed ({', '.join(absent)}): {install_command(part)}"


def require_packages(*parts: str) -> None:
    """Raise ``MissingPackages`` if one of these processes can't run because of missing packages."""
    if lacking := [each for each in map(missing_packages, parts) if each]:
        raise MissingPackages("; ".join(lacking))
