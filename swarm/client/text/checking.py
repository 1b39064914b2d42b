"""Grammars checked beside the event loop: in threads of their own, so that no other work waits for a slow one.

Two are compiled at a time, the others wait in order, so many and so long at most; who would be one too many is told to
come again. The same grammar, asked for several times, is compiled once.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from swarm.client.text.grammar import GrammarChecker, digest
from swarm.errors import InvalidRequest, Overloaded, SwarmError, Unavailable
from swarm.params import SamplingParams

AT_ONCE = 2
MOST_WAITING = 64
WAIT_S = 10.0  # two that take as long as any may, and two behind them
_RETRY_S = 2.0


class GrammarChecks:
    """See the module's text. Belongs to one event loop."""

    def __init__(self, *, most: int = AT_ONCE + MOST_WAITING, wait_s: float = WAIT_S) -> None:
        self._threads = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="grammars")
        self._under_way: dict[tuple[GrammarChecker, bytes], asyncio.Future[SwarmError | None]] = {}
        self._most = most
        self._wait_s = wait_s

    async def check(self, checker: GrammarChecker, params: SamplingParams) -> None:
        """Raise InvalidRequest that says why the grammar can't be followed; Overloaded if too many others are being
        compiled to find out."""
        if params.grammar is None or checker.knows(params):
            return
        key = checker, digest(params.grammar)
        found = self._under_way.get(key)
        if found is None:
            if len(self._under_way) >= self._most:
                raise Overloaded(f"{self._most} grammars are being compiled; come again", _RETRY_S)
            loop = asyncio.get_running_loop()
            found = loop.run_in_executor(self._threads, _verdict, checker, params)
            self._under_way[key] = found
            found.add_done_callback(lambda _: self._under_way.pop(key, None))
        done, _ = await asyncio.wait({found}, timeout=self._wait_s)
        if not done:
            raise Overloaded(f"the grammar could not be compiled within {self._wait_s:g} s; come again", _RETRY_S)
        if found.cancelled():
            raise Unavailable("this client is closed")
        problem = found.result()
        if isinstance(problem, InvalidRequest):
            raise InvalidRequest(str(problem), problem.code)  # one for each who asked
        if problem is not None:
            raise problem

    def close(self) -> None:
        """Begin with none that waits any more."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _verdict(checker: GrammarChecker, params: SamplingParams) -> SwarmError | None:
    try:
        checker.check(params)
    except SwarmError as error:
        return error
    return None
