"""A question "what if" is solved by a process of its own, which ends with it."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from swarm.broker.admin import solver
from swarm.broker.admin.solver import PlanSolver
from swarm.broker.events import Solved
from swarm.broker.planning.plan_query import PlanQuery, answer_query
from swarm.broker.planning.rules import PlanRules
from swarm.wire.messages import PlanWhatIf

QUESTION = PlanQuery(None, (), None, PlanRules(), PlanWhatIf(more=1))


async def _answers(num: int) -> list[Solved]:
    found: list[Solved] = []
    all_found = asyncio.Event()

    def told(solved: Solved) -> None:
        found.append(solved)
        if len(found) == num:
            all_found.set()

    beside = PlanSolver(told)
    running = asyncio.create_task(beside.run())
    for number in range(num):
        beside.ask(number, QUESTION)
    await asyncio.wait_for(all_found.wait(), 60.0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    return found


async def test_another_process_finds_the_same() -> None:
    """One question after the other; no process is left."""
    before = set(psutil.Process().children())  # other tests' helpers
    assert await _answers(2) == [Solved(number, answer_query(QUESTION)) for number in range(2)]
    assert set(psutil.Process().children()) <= before


async def test_what_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next question has its turn; no process is left."""
    monkeypatch.setattr(solver, "LIMIT_S", 0.01)
    before = set(psutil.Process().children())
    assert [bool(each.problem) for each in await _answers(2)] == [True, True]
    assert set(psutil.Process().children()) <= before


async def test_what_fails_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody waits for an answer that never comes."""
    monkeypatch.setattr(solver.sys, "executable", "/bin/false")
    (found,) = await _answers(1)
    assert "the search failed" in found.problem


@pytest.mark.parametrize(
    "answer", [b"", b"garbage", b"cnowhere\nnothing\n.", b"cswarm.broker.solver\nNothing\n.", b"I1x\n."]
)
async def test_an_answer_of_another_build_is_no_end(monkeypatch: pytest.MonkeyPatch, answer: bytes) -> None:
    """Swarm may be installed anew under a broker that runs; what it can't read is told, and it goes on."""

    async def other(_: bytes) -> bytes:
        return answer

    monkeypatch.setattr(solver, "_run_process", other)
    assert ["the search failed" in each.problem for each in await _answers(2)] == [True, True]
