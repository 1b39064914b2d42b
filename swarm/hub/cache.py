"""Our own files in the hub's cache, and where the cache has what.

A model's folder in the cache has the structure of huggingface_hub (``blobs``, ``refs``, ``snapshots``), and a folder of
ours beside them. Deleting the model deletes it, too.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import msgspec
from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from swarm.hub.headers import RemoteFile

TOKENIZER = "tokenizer.json"
OUR_FOLDER = "swarm"


def model_folder(repository: str) -> Path:
    """Return the folder of a repository in the cache."""
    return Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=repository, repo_type="model"))


def find_snapshot(repository: str, revision: str | None) -> Path | None:
    """Return the folder of a revision's commit, as far as the cache has it; None if it has not."""
    folder = model_folder(repository)
    name = revision or constants.DEFAULT_REVISION
    try:
        commit = (folder / "refs" / name).read_text("utf-8").strip()
    except (OSError, ValueError):
        commit = name
    snapshot = folder / "snapshots" / commit
    return snapshot if "/" not in commit and snapshot.is_dir() else None


def add_snapshot(repository: str, revision: str | None, commit: str) -> Path:
    """Return the folder of a commit, created if needed, and record that the revision is this commit."""
    folder = model_folder(repository)
    snapshot = folder / "snapshots" / commit
    snapshot.mkdir(parents=True, exist_ok=True)
    name = revision or constants.DEFAULT_REVISION
    if name != commit:
        reference = folder / "refs" / name
        reference.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(reference, commit.encode())
    return snapshot


def descriptions_path(folder: Path) -> Path:
    """Return the path of the descriptions: outside the commit's folder, which belongs to the repository's own files.

    A commit never changes, so the descriptions never become outdated.
    """
    return folder.parent.parent / OUR_FOLDER / f"{folder.name}.json"


def is_complete(folder: Path) -> bool:
    """Whether all small files of the hub are here: either we downloaded them, or there are more than a library would
    download that needs only the weights."""
    return (folder / TOKENIZER).is_file() or descriptions_path(folder).is_file()


def read_descriptions(folder: Path) -> dict[str, RemoteFile]:
    try:
        return msgspec.json.decode(descriptions_path(folder).read_bytes(), type=dict[str, RemoteFile])
    except (OSError, msgspec.DecodeError):
        return {}  # The hub is asked again.


def store_descriptions(folder: Path, described: dict[str, RemoteFile]) -> None:
    """Add descriptions to those of the commit's other files."""
    descriptions_path(folder).parent.mkdir(exist_ok=True)
    write_atomically(descriptions_path(folder), msgspec.json.encode(read_descriptions(folder) | described))


def write_atomically(path: Path, content: bytes) -> None:
    """Replace a file's content at once, because other processes may read at the same time."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, suffix=".part")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    finally:
        Path(name).unlink(missing_ok=True)
