"""Solver for plan previews outside of the broker's event loop: one process per question, one after the other.

A thread would not help: the search is written in Python and would compete with the event loop for milliseconds at a
time. A process that was started for one question ends with it, whatever happens to the broker; it runs at low priority
for at most ``LIMIT_S``.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import DEVNULL, PIPE
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from swarm.broker.events import Solved
from swarm.broker.planning.plan_query import PlanQuery, answer_query
from swarm.log import get_logger

LIMIT_S = 20.0
# Errors of unpickling an answer of another version: Swarm may be upgraded while a broker runs.
_UNREADABLE = (pickle.UnpicklingError, AttributeError, ImportError, IndexError, KeyError, TypeError, ValueError)
NICE = 10

log = get_logger(__name__)


class PlanSolver:
    """Answers questions in subprocesses; ``on_solved`` is called with the answers, in the event loop. The core limits
    the number of questions."""

    def __init__(self, on_solved: Callable[[Solved], None]) -> None:
        self._on_solved = on_solved
        self._queued: deque[tuple[int, bytes]] = deque()  # (number, pickled question)
        self._has_work = asyncio.Event()

    def ask(self, number: int, question: PlanQuery) -> None:
        """Queue a question; its data are copied now."""
        self._queued.append((number, pickle.dumps(question)))
        self._has_work.set()

    async def run(self) -> None:
        while True:
            await self._has_work.wait()
            while self._queued:
                number, question = self._queued.popleft()
                self._on_solved(await self._solve(number, question))
            self._has_work.clear()

    async def _solve(self, number: int, question: bytes) -> Solved:
        try:
            async with asyncio.timeout(LIMIT_S):
                return Solved(number, pickle.loads(await _run_process(question)))
        except TimeoutError:
            problem = f"the search took longer than {LIMIT_S:.0f} s"
        except (OSError, EOFError, *_UNREADABLE) as error:
            problem = f"the search failed ({type(error).__name__}: {error})"
        log.warning("question_not_solved", reason=problem)
        return Solved(number, None, problem)


async def _run_process(question: bytes) -> bytes:
    command = (sys.executable, "-m", "swarm.broker.admin.solver")
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
    try:
        answer, _ = await process.communicate(question)
        return answer
    finally:
        if process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()


def main() -> None:
    with suppress(PermissionError):  # systemd units may lack the permission
        os.nice(NICE)
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answer:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # keep printed output out of the answer
        pickle.dump(answer_query(pickle.load(sys.stdin.buffer)), answer)


if __name__ == "__main__":
    main()
