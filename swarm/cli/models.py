"""From what a user calls a model to the directory that workers load."""

from __future__ import annotations

import re
from pathlib import Path

from swarm.errors import ModelError

# What a model needs; repositories often hold the same weights in other formats too.
_FILES = ["*.json", "*.safetensors", "*.model", "*.jinja", "*.txt"]
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def resolve_model(model: str | None) -> Path:
    """The model's directory: a path, a name on the hub (fetched once, then from the cache), or the demo model.

    Raises ModelError; nothing that could have been noticed here is left to the workers.
    """
    if model is None:
        from swarm.demo import model_path

        return Path(model_path())
    path = Path(model).expanduser()
    if path.is_dir():
        return _checked(path.resolve())
    if path.exists():
        raise ModelError(f"{model} is a file; --model takes the directory that holds config.json and the weights")
    if _HUB_NAME.fullmatch(model) and not model.startswith("."):
        return _checked(_fetch(model))
    raise ModelError(f"there is no directory {model}; --model takes a directory or a hub name such as owner/model")


def _checked(path: Path) -> Path:
    if not (path / "config.json").is_file():
        raise ModelError(f"{path} is no model's directory: it has no config.json")
    if not any(path.glob("*.safetensors")):
        raise ModelError(f"{path} has no *.safetensors file; weights in other formats can't be used")
    return path


def _fetch(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import HfHubHTTPError
    except ImportError:
        raise ModelError(
            f"there is no directory {name}, and fetching it from the hub needs swarm[worker] installed"
        ) from None
    try:
        return Path(snapshot_download(name, allow_patterns=_FILES))
    except (HfHubHTTPError, OSError, ValueError) as error:
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise ModelError(f"there is no directory {name}, and the hub can't provide it: {first_line}") from None
