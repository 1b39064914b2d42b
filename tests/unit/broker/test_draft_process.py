"""The draft model's process as the broker owns it: with a stand-in that answers as a test wants."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import pytest

from swarm.broker import draft_process
from swarm.broker.actions import AskDraft
from swarm.broker.draft_process import DraftProcess
from swarm.broker.events import DraftGone, DraftMessageReceived
from swarm.wire.draft_messages import NUM_CLASSES, AskProposals, DraftLoaded, Proposals

WITHIN_S = 20.0
STAND_IN = """
import os, signal, sys
from swarm.wire.draft_messages import *

def send(message):
    sys.stdout.buffer.write(encode_frame(message))
    sys.stdout.buffer.flush()

def requests():
    while head := sys.stdin.buffer.read(LENGTH_BYTES):
        yield decode_ask(sys.stdin.buffer.read(body_length(head)))

loaded = DraftLoaded("small", 97, 512, (), 1, float(os.getpid()))
"""
ANSWERS = "send(loaded)\nfor request in requests(): send(Proposals(request.number, ()))"
Events = list[DraftMessageReceived | DraftGone]


class Owner:
    """Runs a process and collects its events."""

    def __init__(self, script: Path) -> None:
        self.events: Events = []
        self._changed = asyncio.Event()
        self.process = DraftProcess([sys.executable, str(script)], self._on_event)

    def _on_event(self, event: DraftMessageReceived | DraftGone) -> None:
        self.events.append(event)
        self._changed.set()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(WITHIN_S):
            while not holds():
                self._changed.clear()
                await self._changed.wait()

    def kinds(self) -> list[str]:
        return [
            type(event.message).__name__ if isinstance(event, DraftMessageReceived) else type(event).__name__
            for event in self.events
        ]

    @property
    def pids(self) -> list[int]:
        """Ids of the processes, which the stand-in sends in place of its loading time."""
        messages = [event.message for event in self.events if isinstance(event, DraftMessageReceived)]
        return [int(message.load_s) for message in messages if isinstance(message, DraftLoaded)]

    def ask(self, number: int) -> None:
        self.process.ask(AskDraft(AskProposals(number, 0.0, (1.0,) * NUM_CLASSES, ())))


Start = Callable[[str], "asyncio.Future[Owner] | Awaitable[Owner]"]


@pytest.fixture
def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.setattr(draft_process, "FIRST_PAUSE_S", 0.01)

    @asynccontextmanager
    async def run(body: str) -> AsyncIterator[tuple[Owner, asyncio.Task[None]]]:
        script = tmp_path / "draft.py"
        script.write_text(STAND_IN + textwrap.dedent(body))
        owner = Owner(script)
        task = asyncio.create_task(owner.process.run())
        try:
            yield owner, task
        finally:
            task.cancel()
            await asyncio.wait((task,))
        assert not any(psutil.pid_exists(pid) for pid in owner.pids)

    return run


async def test_requests_and_answers(running) -> None:  # type: ignore[no-untyped-def]
    async with running(ANSWERS) as (owner, _):
        await owner.until(lambda: "DraftLoaded" in owner.kinds())
        for number in (1, 2):
            owner.ask(number)
            await owner.until(lambda number=number: owner.events[-1:] == [DraftMessageReceived(Proposals(number, ()))])
        assert owner.kinds() == ["DraftLoaded", "Proposals", "Proposals"]


async def test_a_killed_process_is_started_again(running) -> None:  # type: ignore[no-untyped-def]
    async with running(ANSWERS) as (owner, _):
        for number in (1, 2):
            await owner.until(lambda number=number: len(owner.pids) == number)
            os.kill(owner.pids[-1], signal.SIGKILL)
            await owner.until(lambda number=number: owner.kinds().count("DraftGone") == number)
        assert DraftGone("exit code -9", is_final=False) in owner.events
        await owner.until(lambda: len(owner.pids) == 3)
        owner.ask(1)
        await owner.until(lambda: "Proposals" in owner.kinds())


async def test_a_process_that_does_not_answer_is_killed(running, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(draft_process, "ANSWER_TIMEOUT_S", 0.2)
    async with running("send(loaded)\nfor request in requests(): pass") as (owner, _):
        await owner.until(lambda: "DraftLoaded" in owner.kinds())
        owner.ask(7)
        await owner.until(lambda: len(owner.pids) == 2)
        assert owner.events[1] == DraftGone("it did not answer within 0 s", is_final=False)


@pytest.mark.parametrize(
    "body", ["print('no frame at all')", "send(loaded); os.close(1)\nfor request in requests(): pass"]
)
async def test_a_process_that_sends_nonsense_or_closes_its_output_is_replaced(running, monkeypatch, body: str) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(draft_process, "EXIT_TIMEOUT_S", 0.1)
    async with running(body) as (owner, _):
        await owner.until(lambda: owner.kinds().count("DraftGone") == 2)
        assert not any(event.is_final for event in owner.events if isinstance(event, DraftGone))


async def test_an_unusable_model_is_not_tried_again(running) -> None:  # type: ignore[no-untyped-def]
    async with running("send(DraftUnusable('no such folder'))\nsys.exit(78)") as (owner, task):
        await asyncio.wait((task,), timeout=WITHIN_S)
        assert task.done()
        assert owner.events == [DraftGone("no such folder", is_final=True)]


async def test_a_stopped_process_stays_away(running) -> None:  # type: ignore[no-untyped-def]
    async with running(ANSWERS) as (owner, task):
        await owner.until(lambda: "DraftLoaded" in owner.kinds())
        owner.process.stop()
        await asyncio.wait((task,), timeout=WITHIN_S)
        assert owner.kinds() == ["DraftLoaded", "DraftGone"]
        assert owner.events[-1].is_final
        owner.ask(1)  # one that was under way: nothing happens


async def test_a_process_ends_with_its_owner(running) -> None:  # type: ignore[no-untyped-def]
    """The fixture checks that no process is left, even one that ignores signals and the end of its input."""
    async with running("signal.signal(signal.SIGTERM, signal.SIG_IGN)\nsend(loaded)\nwhile True: signal.pause()") as (
        owner,
        _,
    ):
        await owner.until(lambda: "DraftLoaded" in owner.kinds())
