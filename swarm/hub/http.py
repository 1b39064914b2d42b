"""Use of huggingface_hub below the level of whole files: range requests, progress, and its log output."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from huggingface_hub import constants, errors, hf_hub_url
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
    http_stream_backoff,
    tqdm,
)

from swarm.errors import ModelError

TIMEOUT_S = 20.0
NUM_RETRIES = 2

_SHA256 = re.compile(r"[0-9a-f]{64}")


def read_range(repository: str, commit: str, file: str, first: int, stop: int) -> bytes | None:
    """Return bytes ``first`` to ``stop`` of a file, fewer if it is shorter; None if the hub does not support range
    requests.

    huggingface_hub can parse headers of safetensors files itself, but from a hub that ignores ranges it would read
    files of any size into memory.
    """
    url = hf_hub_url(repository, file, revision=commit)
    headers = build_hf_headers() | {"Range": f"bytes={first}-{stop - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S, max_retries=NUM_RETRIES) as response:
        hf_raise_for_status(response)
        if response.status_code != 206:
            return None
        received = bytearray()
        for piece in response.iter_bytes():
            received += piece
            if len(received) >= stop - first:
                break
        return bytes(received[: stop - first])


@dataclass(frozen=True, slots=True)
class HubFile:
    """A file of a commit, with what the hub reported about it."""

    repository: str
    commit: str
    path: str  # in the repository
    num_bytes: int
    sha256: str  # empty if the hub reported none


class NoRangesError(RuntimeError):
    """The hub answers a range request with the whole file."""


def stream_range(file: HubFile, first: int, stop: int) -> Iterator[bytes]:
    """Yield bytes ``first`` to ``stop`` of a file in pieces, fewer if the connection breaks.

    Raises NoRangesError, ModelError if the hub sends another file's bytes than it described, and the errors of
    huggingface_hub.
    """
    url = hf_hub_url(file.repository, file.path, revision=file.commit)
    headers = build_hf_headers() | {"Range": f"bytes={first}-{stop - 1}", "Accept-Encoding": "identity"}
    with http_stream_backoff("GET", url, headers=headers, timeout=TIMEOUT_S, max_retries=NUM_RETRIES) as response:
        hf_raise_for_status(response)
        if response.status_code != HTTPStatus.PARTIAL_CONTENT:
            raise NoRangesError(f"the hub answers a range request with status {response.status_code}")
        _check_is_same_file(file, first, stop, [*response.history, response])
        remaining = stop - first
        with suppress(errors.HTTPError):
            for piece in response.iter_bytes():
                yield piece[:remaining]
                remaining -= len(piece)
                if remaining <= 0:
                    return


def _check_is_same_file(file: HubFile, first: int, stop: int, responses: list[Any]) -> None:
    """Raise ModelError unless the range is the requested one of the described file.

    ``responses`` are the hub's redirections and the last answer. Parts can't be checked against the file's sha256; so
    compare everything else that identifies the file.
    """
    reported: dict[str, str] = {}
    for response in responses:
        reported |= {name.lower(): value for name, value in response.headers.items()}
    expected_range = f"bytes {first}-{stop - 1}/{file.num_bytes}"
    if reported.get("content-range", "") != expected_range:
        raise changed_file(file, f"content-range {reported.get('content-range')} instead of {expected_range}")
    if reported.get("x-repo-commit", file.commit) != file.commit:
        raise changed_file(file, f"commit {reported['x-repo-commit']} instead of {file.commit}")
    etag = reported.get("x-linked-etag") or responses[0].headers.get("etag", "")
    digest = etag.removeprefix("W/").strip('"')
    if _SHA256.fullmatch(digest) and digest != file.sha256:
        raise changed_file(file, f"sha256 {digest} instead of {file.sha256}")


def changed_file(file: HubFile, difference: str) -> ModelError:
    """Return the error for a file that is not as the hub described it."""
    return ModelError(
        f"the hub at {constants.ENDPOINT} sends another file than it described as {file.path} of "
        f"{file.repository}@{file.commit} ({difference}); try again later, or name a local file"
    )


def counting_bar(on_bytes: Callable[[int], None]) -> type:
    """Return a progress bar class that displays nothing and calls ``on_bytes`` with the number of bytes of a file so
    far.

    huggingface_hub may create several bars for one file, for received and for written bytes, and may start over.
    """

    class CountingBar(tqdm):  # type: ignore[misc]
        num_came = 0

        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options | {"disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self.num_came += int(n or 0)
            on_bytes(self.num_came)
            return None

    return CountingBar


@contextmanager
def silence_package() -> Iterator[None]:
    """Silence the package's progress bars and warnings, which would interleave with our own progress lines."""
    logger = logging.getLogger("huggingface_hub")
    level, chosen = logger.level, constants.HF_HUB_DISABLE_PROGRESS_BARS is not None
    logger.setLevel(logging.ERROR)
    if not chosen:
        disable_progress_bars()
    try:
        yield
    finally:
        logger.setLevel(level)
        if not chosen:
            enable_progress_bars()
