"""Bounded thread pool: keeps work that takes longer than a moment off the event loop, in few threads, so that the loop
still gets processor time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from swarm.gateway.errors import ApiError

LONG_BODY: Final = 1 << 16  # bytes; longer bodies are processed in a thread
MAX_WAITING: Final = 256  # tasks; further callers are asked to retry

P = ParamSpec("P")
R = TypeVar("R")


class BoundedThreadPool:
    """Thread pool with a bounded queue for one kind of work. Belongs to one event loop."""

    def __init__(self, name: str, num_threads: int, max_tasks: int = MAX_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._max_tasks = max_tasks
        self._num_tasks = 0  # tasks running and queued
        self._is_closed = False

    async def run(self, work: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
        """Run the work in a thread and return its result. Raises ApiError (429) if too many tasks are queued."""
        if self._num_tasks >= self._max_tasks:
            raise ApiError(429, "too many long requests are being read", code="overloaded", retry_after_s=1.0)
        self._num_tasks += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **keywords))
        future.add_done_callback(self._on_done)
        try:
            return await future
        finally:
            del future  # an error's traceback holds this frame, and through it the error and a whole body

    def _on_done(self, _: asyncio.Future[R]) -> None:
        self._num_tasks -= 1

    def start(self, work: Callable[[], object]) -> None:
        """Run something in a thread without waiting for it. Skipped if too many tasks are queued."""
        if self._num_tasks >= self._max_tasks or self._is_closed:
            return
        self._num_tasks += 1
        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(self._on_done)

    def close(self) -> None:
        """Start no further tasks."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
