"""Download of whole files, in a thread of its own while the caller gets progress reports."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future
from concurrent.futures import wait as wait_for
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import errors, hf_hub_download

from swarm.errors import ModelError
from swarm.hub.errors import DOWNLOAD_FAILED, HubErrors, gigabytes
from swarm.hub.headers import Progress, Report
from swarm.hub.http import counting_bar, silence_package

TIMEOUT_S = 20.0  # For the hub's first answer; a busy hub takes a few seconds, and a person is waiting.
PROGRESS_INTERVAL_S = 1.0  # Between two progress reports while no bytes arrive: far below any watchdog's timeout.


@dataclass(slots=True)
class Download:
    """Download of files of one commit, one after the other."""

    repository: str
    folder: Path
    sizes: Mapping[str, int]
    progress: Progress
    report: Report
    num_received: int = 0  # Bytes of finished files and of the current one.

    @property
    def errors(self) -> HubErrors:
        return HubErrors(self.repository, self.folder.name)

    def run(self, files: Collection[str]) -> None:
        missing = [file for file in sorted(files) if not (self.folder / file).is_file()]
        total = sum(self.sizes.get(file, 0) for file in missing)
        with self.errors.converted(DOWNLOAD_FAILED, ", ".join(missing)), silence_package():
            self._check_space(total)
            for number, file in enumerate(missing, 1):
                size = gigabytes(self.sizes.get(file, 0))
                self.report(f"fetching {self.repository}: {file} ({number} of {len(missing)}, {size})")
                self._fetch(file, total)

    def _fetch(self, file: str, total: int) -> None:
        before = self.num_received

        def on_bytes(num_bytes: int) -> None:
            self.num_received = max(self.num_received, before + num_bytes)

        future = in_background(
            lambda: hf_hub_download(
                self.repository,
                file,
                revision=self.folder.name,  # The commit of the small files, because the branch may have moved since.
                etag_timeout=TIMEOUT_S,
                tqdm_class=counting_bar(on_bytes),
            )
        )
        wait_with_progress(future, lambda: self.progress(min(self.num_received, total), total))
        self.num_received = before + self.sizes.get(file, 0)  # Another process may have downloaded it.
        self.progress(min(self.num_received, total), total)

    def _check_space(self, num_bytes: int) -> None:
        free = shutil.disk_usage(self.folder).free
        if num_bytes > free:
            raise self.errors.no_space(num_bytes, free)


def wait_with_progress(future: Future[object], on_interval: Callable[[], None]) -> None:
    """Wait for the end of background work, with a call every second. Raises its exception."""
    while not wait_for([future], PROGRESS_INTERVAL_S).done:
        on_interval()
    future.result()


def in_background(work: Callable[[], object]) -> Future[object]:
    """Run in a daemon thread, which does not keep the process alive while it waits for a slow hub."""
    future: Future[object] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except (OSError, errors.HTTPError, ValueError, RuntimeError, ModelError) as error:
            future.set_exception(error)
        finally:
            if not future.done():
                future.set_exception(RuntimeError("the download ended unexpectedly"))

    threading.Thread(target=run, name="fetch", daemon=True).start()
    return future
