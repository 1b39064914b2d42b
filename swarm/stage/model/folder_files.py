"""Files of a model folder: JSON objects, and the tensors of all its safetensors files. Does not import torch."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Protocol

from swarm.errors import ModelError
from swarm.hub.headers import INDEX, SINGLE, Progress, RemoteFile, Report, StoredTensor, read_header, remote_header


class RemoteWeights(Protocol):
    """Source of the weight files that a folder lacks."""

    @property
    def name(self) -> str:
        """A name by which other processes, also on other machines, find exactly this model."""

    def describe(self, file: str) -> RemoteFile | None:
        """Return the description of a weight file without its data; None if there is none."""

    def missing(self, tensors: Collection[StoredTensor]) -> dict[str, int]:
        """Return how many bytes must be downloaded before these tensors can be read, by file."""

    def fetch_tensors(
        self, tensors: Collection[StoredTensor], progress: Progress | None = None, report: Report | None = None
    ) -> None:
        """Download what is missing of these tensors: their files, or their parts of files. Raises ``ModelError``."""


def read_json(path: Path, why: str = "") -> dict[str, Any]:
    try:
        content = json.loads(path.read_text("utf-8"))
        json.dumps(content, ensure_ascii=False).encode()  # half of a surrogate pair is not valid text
    except FileNotFoundError:
        raise ModelError(f"{path} is missing; {why or 'download it again'}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(f"{path} can't be read as JSON ({error}); download it again") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path} is not a JSON object; download it again")
    return content


def read_tensors(folder: Path, remote: RemoteWeights | None) -> Iterator[tuple[str, StoredTensor]]:
    index_path = folder / INDEX
    if not index_path.is_file():
        yield from ((tensor.name, tensor) for tensor in _tensors_of(folder / SINGLE, remote))
        return
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise ModelError(f"{index_path} has no weight_map; download it again")
    for shard in sorted(set(weight_map.values())):
        if Path(shard).name != shard:
            raise ModelError(f"{index_path} names {shard!r}, which is not a file name in the same folder")
        tensors = {tensor.name: tensor for tensor in _tensors_of(folder / shard, remote)}
        for name in (name for name, home in weight_map.items() if home == shard):
            if name not in tensors:
                raise ModelError(f"{folder / shard} lacks tensor {name}, which the index puts there; download it again")
            yield name, tensors[name]


def has_weights(folder: Path) -> bool:
    """Whether the folder has all of its files with weights."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map") if index.is_file() else {"": SINGLE}
    return not isinstance(weight_map, dict) or all((folder / str(name)).is_file() for name in weight_map.values())


def _tensors_of(path: Path, remote: RemoteWeights | None) -> Iterator[StoredTensor]:
    if path.is_file():
        return read_header(path)
    described = remote.describe(path.name) if remote is not None else None
    if described is not None:
        return remote_header(path, described)
    if path.name == SINGLE:
        raise ModelError(f"{path.parent} has no {SINGLE} and no index of shards; {_describe_weights(path.parent)}")
    raise ModelError(f"{path} is missing; download it again")


def _describe_weights(folder: Path) -> str:
    """Return what to do about a folder without safetensors."""
    if ggufs := sorted(file.name for file in folder.glob("*.gguf")):
        return f"to serve a GGUF file, name it: {', '.join(ggufs[:9])}"
    return "only safetensors are read" + (", and no pickles (*.bin)" if any(folder.glob("*.bin")) else "")
