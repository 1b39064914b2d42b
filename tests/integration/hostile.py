"""Bodies that cost a gateway as much as they can, and how long others wait meanwhile (tools/bench_hostile.py, too)."""

from __future__ import annotations

import http.client
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.integration.fake_broker import FakeBroker
from tests.integration.gateway import Gateway

LARGE = 15_000_000  # bytes: just below the bound of a body
PAUSE_S = 0.002  # between two looks of the others
CHAT, TEXT = "/v1/chat/completions", "/v1/completions"


def chat(content: str = "hi", **fields: Any) -> bytes:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], "max_tokens": 1} | fields
    return json.dumps(body, ensure_ascii=False).encode()


def _called(arguments: str) -> list[dict[str, Any]]:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
    user = {"role": "user", "content": "x"}
    return [
        user,
        {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
        user,
    ]


def _tools() -> list[dict[str, Any]]:
    properties = {f"property{number}": {"type": "string", "description": "x" * 50} for number in range(300)}
    schema = {"type": "object", "properties": properties}
    return [{"type": "function", "function": {"name": f"f{number}", "parameters": schema}} for number in range(128)]


@dataclass(frozen=True)
class Hostile:
    """``status``: with which it is answered."""

    path: str
    make: Callable[[], bytes]
    status: int = 400


BODIES = {
    "a word of 15 MB": Hostile(CHAT, lambda: chat("abcdefgh" * (LARGE // 8))),
    "15 MB of blanks": Hostile(CHAT, lambda: chat(" " * LARGE)),
    "15 MB of emoji": Hostile(CHAT, lambda: chat("\N{GRINNING FACE}" * (LARGE // 4))),
    "15 MB of escapes": Hostile(CHAT, lambda: chat("CUT").replace(b"CUT", b"\\u20ac" * (LARGE // 6))),
    "15 MB of special tokens": Hostile(CHAT, lambda: chat("<s></s>" * (LARGE // 7))),
    "a text of 15 MB": Hostile(
        TEXT, lambda: json.dumps({"model": "tiny", "prompt": "cat the " * (LARGE // 8)}).encode()
    ),
    "15 MB to /tokenize": Hostile("/tokenize", lambda: json.dumps({"prompt": "cat the " * (LARGE // 8)}).encode()),
    "15 MB to count_tokens": Hostile(
        "/v1/messages/count_tokens", lambda: chat("cat the " * (LARGE // 8), max_tokens=None)
    ),
    "15 MB to responses": Hostile(
        "/v1/responses", lambda: json.dumps({"model": "tiny", "input": "cat the " * (LARGE // 8)}).encode()
    ),
    "5 million lists": Hostile(CHAT, lambda: b'{"model":"tiny","messages":[' + b"[]," * (LARGE // 3) + b"[]]}"),
    "1.5 million keys": Hostile(CHAT, lambda: b"{" + b",".join(b'"%x":1' % n for n in range(1_500_000)) + b"}"),
    "100,000 levels": Hostile(CHAT, lambda: b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "a number of 10 million digits": Hostile(
        CHAT, lambda: chat(seed=1).replace(b'"seed": 1', b'"seed": ' + b"9" * 10**7)
    ),
    "16,000 messages": Hostile(CHAT, lambda: chat(messages=[{"role": "user", "content": "a " * 200}] * 16_000)),
    "128 tools with 300 properties": Hostile(CHAT, lambda: chat(tools=_tools(), tool_choice="required")),
    "arguments of 5 million lists": Hostile(CHAT, lambda: chat(messages=_called("[" + "[]," * (LARGE // 3) + "[]]"))),
    "16,000 wrong biases": Hostile(CHAT, lambda: chat(logit_bias={str(n): "x" for n in range(16_000)})),
    "a stop string of 10 MB": Hostile(CHAT, lambda: chat(stop=["x" * 10_000_000])),
    "130,000 token ids": Hostile(TEXT, lambda: json.dumps({"model": "tiny", "prompt": [5] * 130_000}).encode()),
    "130,000 ids to /detokenize": Hostile("/detokenize", lambda: json.dumps({"tokens": [5] * 130_000}).encode(), 200),
}


@dataclass(frozen=True)
class Seen:
    """What came of one body. Waits are those of /health, asked without a pause meanwhile."""

    status: int
    answer: bytes
    took_s: float
    waits_s: list[float]
    grown_bytes: int

    @property
    def p99_s(self) -> float:
        return (
            statistics.quantiles(self.waits_s, n=100, method="inclusive")[-1]
            if len(self.waits_s) > 1
            else max(self.waits_s)
        )


class Victim:
    """A gateway before a stand-in for the broker."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self.process = psutil.Process(gateway.process.pid)

    def ask(self, path: str, body: bytes) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=120)
        try:
            connection.request("POST", path, body, {"content-type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def suffer(self, hostile: Hostile) -> Seen:
        """Send the body, and see how others fare."""
        body, before = hostile.make(), self.process.memory_info().rss
        waits_s: list[float] = []
        ended = threading.Event()
        looking = threading.Thread(target=self._look, args=(waits_s, ended))
        looking.start()
        began = time.monotonic()
        try:
            status, answer = self.ask(hostile.path, body)
        finally:
            took_s = time.monotonic() - began
            ended.set()
            looking.join()
        return Seen(status, answer, took_s, waits_s, self.process.memory_info().rss - before)

    def _look(self, waits_s: list[float], ended: threading.Event) -> None:
        connection = http.client.HTTPConnection("127.0.0.1", self._gateway.port, timeout=120)
        while not ended.is_set():
            began = time.monotonic()
            connection.request("GET", "/health")
            connection.getresponse().read()
            waits_s.append(time.monotonic() - began)
            ended.wait(PAUSE_S)
        connection.close()


@contextmanager
def victim(logs: Path) -> Iterator[Victim]:
    with FakeBroker(lambda submit, _: [5] * submit.params.max_tokens).in_thread() as broker:
        gateway = Gateway(broker.url, logs)
        gateway.start()
        one = Victim(gateway)
        try:
            assert one.ask(CHAT, chat())[0] == 200  # it knows the model
            yield one
        finally:
            gateway.stop()
