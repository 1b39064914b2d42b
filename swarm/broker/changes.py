"""Serialised changes of the key store: each is on the disk before it takes effect, and before the client gets its
answer. A thread waits for the disk, so that the broker's loop does not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.errors import ConfigError
from swarm.lock.file import RollFile
from swarm.lock.roll import Refusal, Roll
from swarm.wire.messages import ServerMessage

MAX_WAITING: Final = 256  # changes that wait for the disk


class Done(NamedTuple):
    """Result of a change of keys. ``roll``: the registry after it. ``answer``: sent to the client, if one waits.
    ``on_disk``: runs in the thread after the registry is written. ``after``: then runs on the loop. ``hangs_up``:
    disconnect the keys that the change removes. (Not for used-up invitations: their clients wait for the answer.)"""

    roll: Roll
    answer: ServerMessage | None = None
    on_disk: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    hangs_up: bool = False


Change = Callable[[Roll, float], Done]  # applied to the registry when its turn has come, and the time; raises Refusal
Answered = Callable[[ServerMessage | Refusal | None], None]


class _Asked(NamedTuple):
    change: Change
    answered: Answered
    name: str


class Changes:
    """Queue of changes to the key store (see the module). ``lost`` is called with each key that is no longer valid."""

    def __init__(self, file: RollFile, lost: Callable[[str], None]) -> None:
        self._file = file
        self._lost = lost
        self._waiting: deque[_Asked] = deque()
        self._some = asyncio.Event()

    def ask(self, change: Change, answered: Answered, name: str = "") -> None:
        """Queue a change, unless one of this ``name`` waits already. Raises Refusal if too many wait."""
        if name and any(asked.name == name for asked in self._waiting):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Refusal(f"{len(self._waiting)} changes of keys wait for the disk: try again in a moment")
        self._waiting.append(_Asked(change, answered, name))
        self._some.set()

    @property
    def waits(self) -> bool:
        """Whether a change is not finished yet."""
        return bool(self._waiting)

    async def run(self) -> None:
        """Carry out queued changes, until cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                await self.turn()

    async def turn(self) -> None:
        """Carry out the first queued change."""
        asked = self._waiting[0]  # it stays in the queue until it is done
        outcome: ServerMessage | Refusal | None
        try:
            outcome = await self._carried_out(asked.change)
        except Refusal as refusal:
            outcome = refusal
        finally:
            self._waiting.popleft()
        asked.answered(outcome)

    async def _carried_out(self, change: Change) -> ServerMessage | None:
        done = change(self._file.roll, self._file.now())
        before = self._file.roll.keys
        try:
            if done.roll is not self._file.roll or done.on_disk is not None:
                await asyncio.to_thread(self._write, done)
        finally:
            for key in before - self._file.roll.keys if done.hangs_up else ():
                self._lost(key)
        if done.after is not None:
            done.after()
        return done.answer

    def _write(self, done: Done) -> None:
        """Write the result to the disk; runs in the thread."""
        self._file.write(done.roll)
        if done.on_disk is not None:
            try:
                done.on_disk()
            except ConfigError as error:
                raise Refusal(str(error)) from None
