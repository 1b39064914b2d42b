"""Records of files and batches, and their JSON as OpenAI has it. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from swarm.gateway.errors import ApiError, invalid_field

PAGE_BYTES = 1 << 20  # bytes of lines that are stored or read at a time
MAX_METADATA = 16  # pairs
MAX_WINDOW_S = 30 * 86_400
MIN_AGE_S = 3600  # seconds after which a caller may let a file expire
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_WINDOW = re.compile(r"([1-9]\d{0,6})([smhd])")


class BatchStatus(StrEnum):
    validating = "validating"
    in_progress = "in_progress"
    finalizing = "finalizing"
    completed = "completed"
    failed = "failed"
    expired = "expired"
    cancelling = "cancelling"
    cancelled = "cancelled"

    @property
    def is_final(self) -> bool:
        return self in _FINAL


_FINAL = {BatchStatus.completed, BatchStatus.failed, BatchStatus.expired, BatchStatus.cancelled}
# the time at which a batch entered each status
TIMES = (
    "in_progress_at",
    "finalizing_at",
    "completed_at",
    "failed_at",
    "expired_at",
    "cancelling_at",
    "cancelled_at",
)


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a batch was not accepted. ``line`` None: the whole file."""

    code: str
    message: str
    param: str | None
    line: int | None


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to a line: a line of the output file, or of the error file."""

    is_error: bool
    content: bytes


@dataclass(frozen=True, slots=True)
class FileRecord:
    """A stored file. Times are seconds since 1970."""

    id: str
    filename: str
    purpose: str
    num_bytes: int
    created_at: int
    expires_at: int  # it is deleted soon after, unless an unfinished batch reads it

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "file",
            "bytes": self.num_bytes,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            "filename": self.filename,
            "purpose": self.purpose,
            "status": "processed",
            "status_details": None,
        }


@dataclass(frozen=True, slots=True)
class NewBatch:
    """An order to create a batch."""

    owner: str
    tenant: str  # on whose account its lines run
    endpoint: str
    input_file_id: str
    window: str
    metadata: dict[str, str]
    models: tuple[str, ...] = ()  # the only models that its caller may use; empty: all
    # seconds after which its output and error file expire; None: batch.max_age_days, which is also the longest
    output_age_s: int | None = None

    @property
    def window_s(self) -> int:
        return parse_window(self.window)


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A stored batch."""

    id: str
    owner: str
    tenant: str
    endpoint: str
    input_file_id: str
    window: str
    metadata: dict[str, str]
    status: BatchStatus
    created_at: int
    expires_at: int
    errors: tuple[LineError, ...] = ()
    output_file_id: str | None = None
    error_file_id: str | None = None
    num_total: int = 0
    num_completed: int = 0
    num_failed: int = 0
    times: dict[str, int] = field(default_factory=dict)
    models: tuple[str, ...] = ()  # as in ``NewBatch``

    def to_json(self) -> dict[str, Any]:
        listed = [{"code": e.code, "message": e.message, "param": e.param, "line": e.line} for e in self.errors]
        return {
            "id": self.id,
            "object": "batch",
            "endpoint": self.endpoint,
            "errors": {"object": "list", "data": listed} if listed else None,
            "input_file_id": self.input_file_id,
            "completion_window": self.window,
            "status": self.status.value,
            "output_file_id": self.output_file_id,
            "error_file_id": self.error_file_id,
            "created_at": self.created_at,
            "expires_at": self.expires_at,
            **{name: self.times.get(name) for name in TIMES},
            "request_counts": {
                "total": self.num_total,
                "completed": self.num_completed,
                "failed": self.num_failed,
            },
            "metadata": self.metadata or None,
        }


@dataclass(frozen=True, slots=True)
class StoredLine:
    """A line of a batch's input file."""

    batch: BatchRecord
    number: int
    content: bytes


def parse_window(window: str) -> int:
    """Return the seconds of a completion window such as "24h". Raises ApiError."""
    match = _WINDOW.fullmatch(window)
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= MAX_WINDOW_S:
        raise invalid_field("completion_window", f"must be a time up to 30d, such as 24h, not {window[:40]!r}")
    return seconds


def parse_max_age(field: str, anchor: object, seconds: object) -> int:
    """Return the seconds of OpenAI's ``expires_after``; the service shortens longer ones than ``batch.max_age_days``.
    Raises ApiError."""
    if anchor != "created_at":
        raise invalid_field(f"{field}.anchor", f"must be created_at, not {str(anchor)[:40]!r}")
    age_s = int(str(seconds)) if str(seconds).isascii() and str(seconds).isdecimal() and len(str(seconds)) < 10 else 0
    if age_s < MIN_AGE_S:
        raise invalid_field(f"{field}.seconds", f"must be at least {MIN_AGE_S}, not {str(seconds)[:40]!r}")
    return age_s


def check_metadata(metadata: dict[str, str]) -> dict[str, str]:
    """Check metadata by OpenAI's limits. Raises ApiError."""
    if len(metadata) > MAX_METADATA:
        raise invalid_field("metadata", f"takes at most {MAX_METADATA} pairs")
    if any(len(name) > 64 or len(value) > 512 for name, value in metadata.items()):
        raise invalid_field("metadata", "names have at most 64 characters, values at most 512")
    return metadata


def not_found(kind: str, given: str) -> ApiError:
    return ApiError(404, f"there is no {kind} {given[:80]!r}", code="not_found")
