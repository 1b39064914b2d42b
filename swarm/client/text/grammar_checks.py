"""Checks grammars in threads of their own, so that neither the event loop nor other work waits for a slow one.

Two grammars are compiled at a time. A bounded number of others wait in order, for a bounded time; beyond that, the
caller gets Overloaded. A grammar that several callers check at the same time is compiled once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from swarm.client.text.grammar import GrammarChecker, digest
from swarm.errors import InvalidRequest, Overloaded, SwarmError, Unavailable
from swarm.params import SamplingParams

NUM_THREADS = 2  # threads
MAX_WAITING = 64
WAIT_S = 10.0  # two compilations at the longest allowed time, and two queued after them
_RETRY_S = 2.0  # seconds that a refused caller is asked to wait


class GrammarCheckPool:
    """Bounded queue of grammar checks on a thread pool. Belongs to one event loop."""

    def __init__(self, *, max_checks: int = NUM_THREADS + MAX_WAITING, wait_s: float = WAIT_S) -> None:
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammars")
        # running checks by grammar
        self._running: dict[tuple[GrammarChecker, bytes], asyncio.Future[SwarmError | None]] = {}
        self._max_checks = max_checks
        self._wait_s = wait_s

    async def check(self, checker: GrammarChecker, params: SamplingParams) -> None:
        """Check that the grammar can be followed. Raises InvalidRequest with the reason if not, and Overloaded if too
        many other grammars are being compiled."""
        if params.grammar is None or checker.has_verdict(params):
            return
        key = checker, digest(params.grammar)
        future = self._running.get(key)
        if future is None:
            if len(self._running) >= self._max_checks:
                raise Overloaded(f"{self._max_checks} grammars are being compiled; try again later", _RETRY_S)
            loop = asyncio.get_running_loop()
            future = loop.run_in_executor(self._threads, _run_check, checker, params)
            self._running[key] = future
            future.add_done_callback(lambda _: self._running.pop(key, None))
        done, _ = await asyncio.wait({future}, timeout=self._wait_s)
        if not done:
            raise Overloaded(f"the grammar could not be compiled within {self._wait_s:g} s; try again later", _RETRY_S)
        if future.cancelled():
            raise Unavailable("this client is closed")
        problem = future.result()
        if isinstance(problem, InvalidRequest):
            raise InvalidRequest(str(problem), problem.code)  # a new exception for each caller
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Drop the queued checks and stop the threads."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _run_check(checker: GrammarChecker, params: SamplingParams) -> SwarmError | None:
    try:
        checker.check(params)
    except SwarmError as error:
        return error
    return None
