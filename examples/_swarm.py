"""What the examples have in common: a swarm to talk to."""

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
def a_swarm(num_workers: int = 2, *, always_own: bool = False) -> Iterator[str]:
    """The URL of a swarm: $SWARM_URL if that is set, else of one with the demo model that runs until the block ends."""
    url = os.environ.get("SWARM_URL")
    if url and not always_own:
        yield url
        return
    port = _free_port()
    command = [sys.executable, "-m", "swarm", "up", "--no-http", "--workers", str(num_workers), "--port", str(port)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as up:
        try:
            _wait_for(up, "serving" if num_workers else "no worker is here")
            yield f"tcp://127.0.0.1:{port}"
        finally:
            up.send_signal(signal.SIGTERM)  # as Ctrl-C: it ends its broker and workers, then itself
            up.wait(STOP_S)  # at our own Ctrl-C, too, when the with block would not wait


def _wait_for(up: "subprocess.Popen[str]", words: str) -> None:
    """Until `swarm up` says a line that begins with these words; SystemExit if it never does."""
    assert up.stdout is not None
    deadline = Timer(START_S, up.terminate)
    deadline.start()
    try:
        found = any(line.startswith(words) for line in up.stdout)
    finally:
        deadline.cancel()
        up.stdout.close()  # it goes on in silence
    if not found:
        raise SystemExit("the swarm did not start; if it said why, that stands above")


def _free_port() -> int:
    """The first of two free ports in a row, below those that systems lend to clients."""
    for port in random.sample(range(10000, 19000, 2), 50):
        with socket.socket() as one, socket.socket() as two:
            try:
                one.bind(("127.0.0.1", port))
                two.bind(("127.0.0.1", port + 1))
            except OSError:
                continue
            return port
    raise SystemExit("no two free ports in a row")
