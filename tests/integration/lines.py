"""A command with --json, and the lines that it prints."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from queue import Empty, Queue
from typing import Any

PATIENCE_S = 90.0
MODULE = [sys.executable, "-m", "swarm"]


class Lines:
    """A process's JSON lines, as they come."""

    def __init__(self, arguments: list[str], folder: Path, **environment: str) -> None:
        with (folder / "stderr").open("w") as errors:
            self.process = subprocess.Popen(
                [*MODULE, *arguments],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env={**os.environ, **environment},
            )
        self._queue: Queue[dict[str, Any]] = Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._queue.put(json.loads(line))

    def wait_for(self, event: str, words: str = "") -> dict[str, Any]:
        until = time.monotonic() + PATIENCE_S
        seen = []
        with contextlib.suppress(Empty):
            while True:
                seen.append(self._queue.get(timeout=max(0.01, until - time.monotonic())))
                if seen[-1]["event"] == event and words in json.dumps(seen[-1]):
                    return seen[-1]
        raise AssertionError(f"{event} {words!r} never came, but {seen}")

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reader.join()
        assert self.process.stdout is not None
        self.process.stdout.close()
