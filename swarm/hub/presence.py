"""Which ranges of a partly downloaded file are present (``partial_file``). Does not import huggingface_hub."""

from __future__ import annotations

from pathlib import Path

import msgspec

from swarm.errors import ModelError
from swarm.hub.headers import StoredTensor
from swarm.hub.ranges import Ranges

PARTS_FOLDER = "parts"


class Record(msgspec.Struct, frozen=True):
    """What is recorded about a partly downloaded file, in JSON beside it."""

    num_bytes: int  # of the whole file
    ranges: tuple[tuple[int, int], ...] = ()
    is_described: bool = False  # the header is present, and valid
    is_verified: bool = False  # all is present, and has the sha256


def read_record(path: Path, num_bytes: int) -> Record:
    """Return the record of a file of this size; one without ranges if there is no valid one, or no data."""
    nothing = Record(num_bytes)
    try:
        if path.is_symlink() or path.stat().st_size != num_bytes:
            return nothing
        record = msgspec.json.decode(path.with_suffix(".json").read_bytes(), type=Record)
    except (OSError, msgspec.DecodeError):
        return nothing  # The ranges are fetched again.
    return record if record.num_bytes == num_bytes else nothing


def check_present(tensor: StoredTensor) -> None:
    """Raise ModelError if the tensor is in a partly downloaded file that lacks some of it: it would read as zeros."""
    path = tensor.path.resolve()
    if path.parent.name != PARTS_FOLDER or not path.is_file():
        return
    present = Ranges.of(read_record(path, path.stat().st_size).ranges)
    missing = Ranges.of([(tensor.offset, tensor.offset + tensor.num_bytes)]) - present
    # The file may have become whole, and its record may be gone, after its path was resolved.
    if missing and tensor.path.resolve() == path:
        raise ModelError(f"{tensor.path} lacks {missing.num_bytes} bytes of {tensor.name}; start again to fetch them")
