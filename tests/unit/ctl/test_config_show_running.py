"""``swarmctl config show --gateway``: a gateway asked over HTTP, and what else may answer there."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from swarm.ctl.main import run

ROWS = [
    {"name": "gateway.port", "value": 8000, "from": "the defaults"},
    {"name": "log.level", "value": "debug", "from": "the command line"},
]


@contextmanager
def server(status: int, body: bytes) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Its address, and what it was asked: path and key."""
    asked: list[tuple[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append((self.path, self.headers.get("authorization", "")))
            self.send_response(status)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as listening:
        thread = threading.Thread(target=listening.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{listening.server_port}", asked
        finally:
            listening.shutdown()
            thread.join()


def test_a_gateway_s_are_asked_with_a_key(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROOT_KEY", "sw-root")
    with server(200, json.dumps({"process": "gateway", "settings": ROWS}).encode()) as (url, asked):
        assert run(["config", "show", "--gateway", f"{url}/v1", "--api-key-env", "ROOT_KEY"]) == 0
        assert run(["config", "show", "--gateway", url, "--changed", "--json"]) == 0
    assert asked == [("/console/settings", "Bearer sw-root"), ("/console/settings", "")]
    shown = capsys.readouterr().out
    assert "gateway.port  8000     the defaults" in shown
    assert json.loads(shown[shown.index("{") :]) == {"process": "gateway", "settings": ROWS[1:]}


@pytest.mark.parametrize(
    ("status", "body", "says"),
    [
        (403, b'{"error": {"message": "that takes an admin"}}', "answers 403: that takes an admin"),
        (404, b"<html>", "answers 404: Not Found"),
        (200, b"hello", "no gateway answers at"),
        (200, b"[1]", "is not a gateway of Swarm"),
    ],
)
def test_what_else_answers_is_told_in_a_line(
    capsys: pytest.CaptureFixture[str], status: int, body: bytes, says: str
) -> None:
    with server(status, body) as (url, _):
        assert run(["config", "show", "--gateway", url]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_a_port_that_speaks_no_http_is_told_in_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """The broker's door for figures, say: it greets, and not by HTTP."""

    def greet(listening: socket.socket) -> None:
        connection, _ = listening.accept()
        with connection:
            connection.sendall(b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\n")
            connection.recv(4096)  # what was asked: unread, it would reset the connection

    with socket.create_server(("127.0.0.1", 0)) as listening:
        thread = threading.Thread(target=greet, args=(listening,))
        thread.start()
        assert run(["config", "show", "--gateway", f"http://127.0.0.1:{listening.getsockname()[1]}"]) == 1
        thread.join()
    (line,) = capsys.readouterr().err.splitlines()
    assert "no gateway answers at" in line
    assert "is not an HTTP server" in line


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--gateway", "rubbish"], "--gateway takes a URL"),
        (["--gateway", "http://127.0.0.1:1", "--worker", "w0"], "give one of them"),
        (["--gateway", "http://127.0.0.1:1", "--api-key-env", "NOT_SET"], "NOT_SET is empty or unset"),
    ],
)
def test_wrong_words_are_two(words: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["config", "show", *words]) == 2
    assert says in capsys.readouterr().err


def test_nobody_there_is_one() -> None:
    assert run(["config", "show", "--gateway", "http://127.0.0.1:9"]) == 1
