"""How a model's folder makes embeddings, as sentence-transformers writes it: ``modules.json`` lists the modules, and a
folder of each has its settings. Does not import torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from swarm.errors import ModelError
from swarm.stage.model.folder_files import read_json
from swarm.wire.messages import Pooling
from swarm.wire.messages.common import MAX_NAME

MODULES = "modules.json"
POOLING_FOLDER = "1_Pooling"
_MODES = {"lasttoken": "last", "mean_tokens": "mean", "cls_token": "cls", "max_tokens": "max"}
_PREFIX = "pooling_mode_"


def read_pooling(folder: Path) -> Pooling | None:
    """Return the folder's pooling; None if it does not state one. Kinds that cannot be served keep their name.

    Raises ``ModelError`` for files that can't be read.
    """
    path = folder / MODULES
    if not path.is_file():
        settings = folder / POOLING_FOLDER / "config.json"
        return Pooling(_kind_of(settings), normalizes=True) if settings.is_file() else None
    kinds: list[str] = []
    normalizes = False
    for place, kind in _read_modules(path):
        if kind == "Pooling":
            kinds.append(_kind_of(folder / place / "config.json"))
        elif kind == "Normalize":
            normalizes = True
        elif kind != "Transformer":
            kinds.append(kind)
    if not kinds:
        return None
    return Pooling("+".join(kinds)[:MAX_NAME], normalizes)


def _read_modules(path: Path) -> list[tuple[str, str]]:
    """Return the folder and the kind of each module."""
    try:
        modules = json.loads(path.read_text("utf-8"))
        return [(_inner_folder(module["path"]), str(module["type"]).rpartition(".")[2]) for module in modules]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as a list of modules ({error}); download it again") from None


def _inner_folder(place: Any) -> str:
    if not isinstance(place, str) or (place and Path(place).name != place):
        raise ValueError(f"{place!r} is no folder inside the model's")
    return place


def _kind_of(settings: Path) -> str:
    """Return the name of a pooling module's mode; several modes are joined, as their results would be."""
    config = read_json(settings)
    mode = config.get("pooling_mode")
    if isinstance(mode, str):
        return {"lasttoken": "last"}.get(mode, mode) or "mean"
    names = [name.removeprefix(_PREFIX) for name, value in config.items() if name.startswith(_PREFIX) and value is True]
    return "+".join(_MODES.get(name, name) for name in names) or "mean"
