"""From what a user calls a model to the directory that workers load."""

from __future__ import annotations

import sys
from pathlib import Path

from swarm.errors import ModelError


def resolve_model(model: str | None) -> Path:
    """The model's directory: a path, a name on the hub (fetched once, then from the cache), or the demo model.

    Raises ModelError; nothing that could have been noticed here is left to the workers.
    """
    if model is None:
        from swarm.demo import model_path

        return Path(model_path())
    from swarm.cli.output import Progress
    from swarm.stage.checkpoint import resolve

    progress = Progress(sys.stdout)
    try:
        return _checked(resolve(model, progress.update))
    finally:
        progress.done()


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model's directory: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors file; weights in other formats can't be used")
    return path
