"""Processes that use a model on a stand-in hub: an executor, and ``swarm up``."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Self

from swarm.errors import ModelError
from tests.integration.processes import free_ports
from tests.standin_hub import NAME, Hub

ROOT = Path(__file__).parents[2]

# Prepares the ranges of layers that it reads, one a line, and says after each what was fetched and told meanwhile.
EXECUTOR = """
import json, sys
from swarm.errors import ModelError
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.wire.messages import LayerRange
executor = TorchExecutor(sys.argv[1], dtype="float32", threads=1)
for line in sys.stdin:
    told = []
    layers = LayerRange(*map(int, line.split()))
    try:
        executor.prepare(layers, (), 4, lambda done, total: told.append((done, total)))
    except ModelError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        continue
    executor.activate(layers)
    names = sorted(path.name for path in executor.checkpoint.folder.glob("*.safetensors"))
    print(json.dumps({"files": names, "told": told}), flush=True)
"""


def variables(hub: Hub, cache: Path) -> dict[str, str]:
    return {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HUB_CACHE": str(cache),
        "HF_HUB_OFFLINE": "0",
        "HF_HOME": str(cache),
        "SWARM_CACHE": str(cache),
    }


class Worker:
    """An executor in a process and with a cache of its own."""

    def __init__(self, hub: Hub, cache: Path, name: str = NAME) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **variables(hub, cache)}
        self._process = subprocess.Popen(
            [sys.executable, "-c", EXECUTOR, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )

    def prepare(self, first: int, stop: int) -> tuple[list[str], list[tuple[int, int]]]:
        """The files that are there afterwards, and the progress that was told. Raises ModelError with its error."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{first} {stop}\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        if "error" in answer:
            raise ModelError(answer["error"])
        return answer["files"], answer["told"]

    def end(self) -> None:
        self._process.communicate(timeout=60)


class Up:
    """A running ``swarm up --model owner/name``."""

    def __init__(self, hub: Hub, directory: Path, name: str = NAME) -> None:
        self.logs = directory / "state" / "logs"
        port = free_ports()
        self.url = f"tcp://127.0.0.1:{port}"
        command = ["up", "--no-http", "--workers", "2", "--port", str(port), "--model", name, "--memory-limit", "2GiB"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), **variables(hub, directory / "cache")}
        with (directory / "up.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "swarm", *command, "--state-dir", str(directory / "state")],
                stdout=log,
                stderr=log,
                env=environment,
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        assert self._process.wait(30) == 0

    def fetched_by(self, worker: str, files: set[str]) -> set[str]:
        """List the files that this worker fetched, by its log."""
        text = (self.logs / f"{worker}.log").read_text()
        return {file for file in files if f": {file} (" in text}
