"""Work beside the event loop: what takes longer than a moment, in a few threads that don't crowd out the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, ParamSpec, TypeVar

from swarm.gateway.errors import Problem

LONG_BODY: Final = 1 << 16  # bytes; what longer ones ask for is found out beside the loop
MOST_WAITING: Final = 256  # beyond, whoever comes is told to come again

P = ParamSpec("P")
R = TypeVar("R")


class Aside:
    """Threads for one kind of work. Belongs to one event loop."""

    def __init__(self, name: str, num_threads: int, most: int = MOST_WAITING) -> None:
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._most = most
        self._num = 0
        self._is_closed = False

    async def run(self, work: Callable[P, R], *args: P.args, **keywords: P.kwargs) -> R:
        """Return what the work returns. Raises Problem if too much of it waits already."""
        if self._num >= self._most:
            raise Problem(429, "too many long requests are being read", code="overloaded", retry_after_s=1.0)
        self._num += 1
        future = asyncio.get_running_loop().run_in_executor(self._threads, partial(work, *args, **keywords))
        future.add_done_callback(self._ended)
        try:
            return await future
        finally:
            del future  # an error's traceback has this frame: with it, the error and a whole body would stay

    def _ended(self, _: asyncio.Future[R]) -> None:
        self._num -= 1

    def start(self, work: Callable[[], object]) -> None:
        """Have something done that nobody waits for; not if too much waits already."""
        if self._num >= self._most or self._is_closed:
            return
        self._num += 1
        asyncio.get_running_loop().run_in_executor(self._threads, work).add_done_callback(self._ended)

    def close(self) -> None:
        """Begin nothing any more."""
        self._is_closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
