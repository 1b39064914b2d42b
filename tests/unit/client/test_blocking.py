"""The blocking client's thread: whoever needs it and can't have it is told at once."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any

import pytest

from swarm import Client, Unavailable


def no_loop(work: object) -> None:
    work.close()  # type: ignore[attr-defined]
    raise OSError(24, "Too many open files")


def test_a_thread_that_cannot_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are no descriptors for its loop."""
    monkeypatch.setattr(asyncio, "run", no_loop)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    with Client("tcp://127.0.0.1:9") as client:
        with pytest.raises(Unavailable, match="thread does not run"):
            client.describe()
        assert client._thread is not None
        client._thread.join()


def test_a_thread_that_is_gone() -> None:
    """As in a process that was forked from the one that made the client."""
    client = Client("tcp://127.0.0.1:9", connect_timeout_s=0.2)
    with pytest.raises(Unavailable, match="no broker answers"):
        client.describe()
    thread, client._thread = client._thread, threading.Thread(target=print)  # one that does not run
    with pytest.raises(Unavailable, match="thread does not run"):
        client.describe()
    client._thread = thread
    client.close()


@pytest.mark.parametrize("handed_over", [False, True])
def test_an_interrupt_while_work_is_handed_over_leaves_none_behind(
    monkeypatch: pytest.MonkeyPatch, handed_over: bool
) -> None:
    """Ctrl-C just then: Python would say on stderr that a coroutine was never awaited."""
    hand_over = asyncio.run_coroutine_threadsafe
    done: list[int] = []

    async def work() -> None:
        done.append(1)

    def interrupted(coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop) -> Future[Any]:
        if handed_over:
            hand_over(coroutine, loop).result()
        raise KeyboardInterrupt

    client = Client("tcp://127.0.0.1:9")
    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", interrupted)
    coroutine = work()
    with pytest.raises(KeyboardInterrupt):
        client._run(coroutine)
    monkeypatch.undo()
    client.close()
    assert inspect.getcoroutinestate(coroutine) == inspect.CORO_CLOSED
    assert done == [1] * handed_over
