"""Requests of ``swarm batch`` to a gateway that breaks off its answers."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from swarm.cli.batch.http import GatewayClient

WHOLE = b"one\ntwo\nthree\n"
HEAD = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(WHOLE)
WAIT_S = 20.0


@contextmanager
def answering(*contents: bytes, reset: bool) -> Iterator[str]:
    """A gateway that gives one connection after the other these bytes and closes it; ``reset``: with an RST."""

    def serve() -> None:
        for content in contents:
            connection, _ = listener.accept()
            with connection:
                connection.settimeout(WAIT_S)
                connection.recv(1 << 16)
                connection.sendall(content)
                if reset and content != HEAD + WHOLE:
                    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(WAIT_S)
        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread.join(WAIT_S)


@pytest.mark.parametrize("reset", [False, True])
def test_a_download_that_breaks_off_is_repeated_until_it_is_whole(tmp_path: Path, reset: bool) -> None:
    reasons: list[str] = []
    target = tmp_path / "out.jsonl"
    with answering(HEAD + WHOLE[:6], HEAD, HEAD + WHOLE, reset=reset) as url:
        GatewayClient(url, on_wait=reasons.append, sleep=lambda _: None).download("file-1", target)
    assert target.read_bytes() == WHOLE
    assert len(reasons) == 2
    assert all(url in reason for reason in reasons)


def test_a_failed_write_is_not_taken_for_a_gateway_that_is_away(tmp_path: Path) -> None:
    (tmp_path / "out.jsonl.part").mkdir()
    with answering(HEAD + WHOLE, reset=False) as url:
        client = GatewayClient(url, sleep=lambda _: None)
        with pytest.raises(IsADirectoryError):
            client.download("file-1", tmp_path / "out.jsonl")
