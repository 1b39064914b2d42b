"""Changes of what is known of keys, one after the other: each is on the disk before it counts, and before who asked is
told. A disk takes its time, which is no time of the broker's loop: a thread waits for it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.errors import ConfigError
from swarm.lock.file import RollFile
from swarm.lock.roll import Refusal, Roll
from swarm.wire.messages import ServerMessage

MAX_WAITING: Final = 256


class Done(NamedTuple):
    """What becomes of a change: the roll as it shall be; the ``answer``, if anybody waits for one; what else is to be
    done ``on_disk``, behind the roll's write, in the thread; and what is to be done on the loop ``after`` that.
    ``hangs_up``: on whose key counts no more. (Not on who has used up an invitation: it waits for the answer.)"""

    roll: Roll
    answer: ServerMessage | None = None
    on_disk: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    hangs_up: bool = False


Change = Callable[[Roll, float], Done]  # of the roll as it is when its turn has come, and the time. Raises Refusal
Answered = Callable[[ServerMessage | Refusal | None], None]


class _Asked(NamedTuple):
    change: Change
    answered: Answered
    name: str


class Changes:
    """See the module's text. ``lost`` is called with each key that opens nothing any more."""

    def __init__(self, file: RollFile, lost: Callable[[str], None]) -> None:
        self._file = file
        self._lost = lost
        self._waiting: deque[_Asked] = deque()
        self._some = asyncio.Event()

    def ask(self, change: Change, answered: Answered, name: str = "") -> None:
        """Put it behind those that wait, unless one of this ``name`` waits already. Raises Refusal if too many do."""
        if name and any(asked.name == name for asked in self._waiting):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise Refusal(f"{len(self._waiting)} changes of keys wait for the disk: say it again in a moment")
        self._waiting.append(_Asked(change, answered, name))
        self._some.set()

    @property
    def waits(self) -> bool:
        """Is there something that is not done yet?"""
        return bool(self._waiting)

    async def run(self) -> None:
        """Carry out what is asked for, until cancelled."""
        while True:
            await self._some.wait()
            self._some.clear()
            while self._waiting:
                await self.turn()

    async def turn(self) -> None:
        """Carry out the first of those that wait."""
        asked = self._waiting[0]  # it is one of those that wait until it is done
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
        """In the thread."""
        self._file.write(done.roll)
        if done.on_disk is not None:
            try:
                done.on_disk()
            except ConfigError as error:
                raise Refusal(str(error)) from None
