"""``swarm up --detach``: starts the same command in the background, and returns when it serves or fails."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from contextlib import suppress

from swarm.cli.output import ConsoleProgress
from swarm.cli.up.processes import DETACHED_VARIABLE, LogFile, export_source_path
from swarm.cli.up.runs import log_path, read_run, start_time
from swarm.cli.up.supervisor import GRACE_S
from swarm.errors import SwarmError

READY_S = 600.0  # a large model takes minutes to load, and more to fetch
_POLL_S = 0.1


def start_detached() -> int:
    """Run this process's own command in the background; return its exit code if it fails before its log begins.

    Shows what it reports until it serves. Raises SwarmError if it fails or does not serve in time; in the latter case
    it goes on. An interrupt ends it.
    """
    export_source_path()
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "swarm", *sys.argv[1:]],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        env={**os.environ, DETACHED_VARIABLE: "1"},
        start_new_session=True,
    )
    try:
        with suppress(OSError):
            log_path(process.pid).unlink()  # of an earlier process with this number
        return _wait_until_ready(process)
    except KeyboardInterrupt:
        process.terminate()
        try:
            process.wait(2 * GRACE_S)  # longer than its own limits
        except subprocess.TimeoutExpired:
            process.kill()  # and with it, its children
        raise


def _wait_until_ready(process: subprocess.Popen[bytes]) -> int:
    progress, log = ConsoleProgress(sys.stdout), LogFile(log_path(process.pid))
    started, until = start_time(process.pid), time.monotonic() + READY_S
    while True:
        code = process.poll()
        run = read_run(process.pid)
        for line in log.new_lines():
            if not line.startswith("swarm: "):
                progress.print_line(line)
        if code is not None:
            if log.path.exists():
                raise SwarmError(log.last_error() or f"it ended with code {code}; its log: {log.path}")
            return code  # its error is on our stderr
        if run is not None and run.started == started and run.is_ready:
            return 0
        if time.monotonic() > until:
            raise SwarmError(f"it does not serve after {READY_S:.0f} s, and goes on: swarm logs {process.pid} --follow")
        time.sleep(_POLL_S)
