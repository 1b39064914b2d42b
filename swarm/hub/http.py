"""Use of huggingface_hub below the level of whole files: range requests, progress, and its log output."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from huggingface_hub import constants, hf_hub_url
from huggingface_hub.utils import (
    build_hf_headers,
    disable_progress_bars,
    enable_progress_bars,
    hf_raise_for_status,
    http_stream_backoff,
    tqdm,
)

TIMEOUT_S = 20.0
NUM_RETRIES = 2


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
