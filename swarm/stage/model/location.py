"""Where a model's files are: a folder, GGUF files, or a hub's cache. Does not import torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.errors import ModelError
from swarm.hub.gguf import GgufModel, part_names, read_gguf
from swarm.hub.gguf_choice import is_model_file
from swarm.hub.headers import Report
from swarm.hub.names import parse_name
from swarm.stage.model.folder_files import RemoteWeights
from swarm.stage.model.gguf_folder import derive_folder
from swarm.stage.model.kinds import check_folder
from swarm.version import with_extra

if TYPE_CHECKING:
    from swarm.hub.gguf_snapshot import GgufSnapshot


@dataclass(frozen=True, slots=True)
class ModelLocation:
    """Location of a model. Without ``remote``, the folder is complete.

    The weights of a model of GGUF files are in these, and the folder has what is derived from their header.
    """

    folder: Path
    remote: RemoteWeights | None = None
    gguf: GgufModel | None = None

    @property
    def name(self) -> str:
        """A name for other processes instead of the user's input: it always means the same files."""
        if self.gguf is not None and self.remote is None:
            return str(self.gguf.files[0].path)
        return str(self.folder) if self.remote is None else self.remote.name


def locate_model(model: str, report: Report | None = None) -> ModelLocation:
    """Return the location of ``model``, as :func:`_locate` does, unless its configuration excludes it."""
    location = _locate(model, report)
    check_folder(location.folder)
    return location


def _locate(model: str, report: Report | None) -> ModelLocation:
    """Return the location of ``model``: a local folder, a GGUF file (one of its parts is enough) or, for a name such
    as owner/model, the folder in the hub's cache.

    For a name, missing small files are fetched from the hub; of the weights, only the descriptions. ``report`` is
    called with a line of text about anything that takes long. Raises ``ModelError``.
    """
    path, name = Path(model).expanduser(), parse_name(model)
    if path.is_dir():
        file = _find_gguf(path)
        return ModelLocation(path.resolve()) if file is None else _locate_gguf(file)
    if path.suffix == ".gguf" and (name is None or path.exists()):
        return _locate_gguf(path)
    if path.suffix == ".gguf" and path.parent.is_dir():  # as a name of a hub, it is less likely than a wrong path
        present = ", ".join(file.name for file in sorted(path.parent.glob("*.gguf"))[:9])
        raise ModelError(f"{path.parent} has no {path.name}; it has {present or 'no GGUF file'}")
    if path.exists():
        raise ModelError(
            f"{model} is neither a directory nor a .gguf file; name the directory that holds config.json and the "
            "safetensors files, or a GGUF file"
        )
    if name is None:
        raise ModelError(f"there is no directory {model}; name a model's directory, or a model on a hub as owner/model")
    try:
        from swarm.hub.gguf_snapshot import GgufSnapshot  # noqa: PLC0415 (slow to load, and seldom needed)
        from swarm.hub.lookup import look_up  # noqa: PLC0415
    except ImportError:
        raise ModelError(
            f"there is no directory or file {model}; to fetch it from a hub, install {with_extra('worker')}"
        ) from None
    snapshot = look_up(name, report)
    return locate_gguf(snapshot) if isinstance(snapshot, GgufSnapshot) else ModelLocation(snapshot.folder, snapshot)


def locate_gguf(snapshot: GgufSnapshot) -> ModelLocation:
    """Return the location of a GGUF model in the hub's cache. Raises ``ModelError``."""
    gguf = read_gguf(snapshot.path)
    return ModelLocation(derive_folder(gguf), snapshot, gguf)


def _locate_gguf(file: Path) -> ModelLocation:
    gguf = read_gguf(file.absolute())  # the hub's cache has links to files without names
    return ModelLocation(derive_folder(gguf), gguf=gguf)


def _find_gguf(folder: Path) -> Path | None:
    """Return the GGUF file, or the first part, in a folder that has no configuration of its own.

    Raises ``ModelError`` if there is a choice.
    """
    files = sorted(file for file in folder.glob("*.gguf") if is_model_file(file.name))
    if not files or (folder / "config.json").is_file():
        return None
    if {file.name for file in files} != set(part_names(files[0].name)):
        raise ModelError(f"{folder} has several GGUF models; name one of them: {', '.join(f.name for f in files[:9])}")
    return files[0]
