"""Which bodies are interpreted in a thread."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from starlette.requests import Request

from swarm.gateway.http.state import parse_off_loop
from swarm.gateway.thread_pool import LONG_BODY, BoundedThreadPool


@pytest.mark.parametrize(
    ("num_bytes", "num_added", "in_thread"),
    [(LONG_BODY, 0, False), (LONG_BODY + 1, 0, True), (9, LONG_BODY - 9, False), (9, LONG_BODY, True)],
)
async def test_a_body_is_as_long_as_what_it_refers_to(num_bytes: int, num_added: int, in_thread: bool) -> None:
    threads = BoundedThreadPool("body", 1)
    state = SimpleNamespace(swarms=SimpleNamespace(first=SimpleNamespace(body_threads=threads)))
    scope = {"type": "http", "swarm.body": bytes(num_bytes), "swarm.num_added": num_added}
    request = Request(scope | {"app": SimpleNamespace(state=state)})
    thread = await parse_off_loop(request, threading.current_thread)
    assert (thread is not threading.current_thread()) is in_thread
    threads.close()
