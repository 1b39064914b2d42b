"""Shared by the examples: connect to a running swarm, or start one."""

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer

START_S = 120.0  # a busy machine may need a while to import and load everything
STOP_S = 30.0  # `swarm up` takes 5 at most, on a machine that isn't busy


@contextmanager
def running_swarm(num_workers: int = 2, *, always_own: bool = False) -> Iterator[str]:
    """Yield the URL of a swarm: $SWARM_URL if it is set, else a new swarm with the demo model that runs until the block
    ends.

    ``always_own``: start a new swarm even if $SWARM_URL is set.
    """
    url = os.environ.get("SWARM_URL")
    if url and not always_own:
        yield url
        return
    port = _free_port()
    command = [sys.executable, "-m", "swarm", "up", "--no-http", "--workers", str(num_workers), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            _wait_for_line(up, "serving" if num_workers else "no worker is here")
            yield f"tcp://127.0.0.1:{port}"
        finally:
            up.send_signal(signal.SIGTERM)  # like Ctrl-C: `swarm up` stops its broker and workers, then exits
            up.wait(STOP_S)  # the with block would not wait after a Ctrl-C in this process


def _wait_for_line(up: "subprocess.Popen[str]", prefix: str) -> None:
    """Wait until `swarm up` prints a line with this prefix. Raise SystemExit if it exits or times out first."""
    assert up.stdout is not None
    deadline = Timer(START_S, up.terminate)
    deadline.start()
    try:
        has_started = any(line.startswith(prefix) for line in up.stdout)
    finally:
        deadline.cancel()
        up.stdout.close()  # `swarm up` keeps running without its standard output
    if not has_started:
        raise SystemExit("the swarm did not start; any error message is printed above")


def _free_port() -> int:
    """Return the first of two free consecutive ports, below the range that systems use for outgoing connections."""
    for port in random.sample(range(10000, 19000, 2), 50):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise SystemExit("no two free ports in a row")
