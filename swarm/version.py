"""Version of this package, and the name of its distribution, which differs from the import's."""

from __future__ import annotations

from typing import Final

__version__ = "0.3.0"

DISTRIBUTION: Final = "swarm-llm"  # on the package index, "swarm" is another project


def with_extra(extra: str) -> str:
    """Return the requirement that adds an extra of ``pyproject.toml``, for example ``swarm-llm[worker]``."""
    return f"{DISTRIBUTION}[{extra}]"


def install_command(extra: str) -> str:
    """Return the command that installs an extra, for a shell."""
    return f"pip install '{with_extra(extra)}'"
