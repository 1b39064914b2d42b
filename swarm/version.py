"""Version of this package, and the name of its distribution, which differs from the import's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

__version__ = "0.3.0"

DISTRIBUTION: Final = "swarm-llm"  # on the package index, "swarm" is another project


def with_extra(extra: str) -> str:
    """Return the requirement that adds an extra of ``pyproject.toml``, for example ``swarm-llm[worker]``."""
    return f"{DISTRIBUTION}[{extra}]"


def install_command(extra: str, prefix: Path = Path(sys.prefix)) -> str:
    """Return the command that installs an extra, for a shell: by the tool that made the environment at ``prefix``.

    uv and pipx remove the extras that a command does not name, so theirs names "all", too.
    """
    if (prefix / "uv-receipt.toml").exists():
        tool = "uv tool install"
    elif (prefix / "pipx_metadata.json").exists():
        tool = "pipx install --force"
    else:
        return f"pip install '{with_extra(extra)}'"
    return f"{tool} '{with_extra(f'all,{extra}')}'"
