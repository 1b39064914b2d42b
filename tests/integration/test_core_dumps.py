"""Processes that hold keys, prompts and answers leave no image of their memory on the disk when they crash."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.integration.gateway import Served

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits of other processes are read from /proc")


def test_no_process_may_dump_its_memory(served: Served) -> None:
    processes = {"broker": served.swarm.broker, "gateway": served.gateway.process, **served.swarm.workers}
    for name, process in processes.items():
        limits = Path(f"/proc/{process.pid}/limits").read_text().splitlines()
        (line,) = (line for line in limits if line.startswith("Max core file size"))
        assert line.split()[4] == "0", (name, line)
