"""Serialised changes of the key store: each is on the disk before it takes effect, and before the client gets its
answer. A thread waits for the disk, so that the broker's loop does not."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final, NamedTuple

from swarm.auth.registry import KeyRegistry, RegistryRefusal
from swarm.auth.registry_file import RegistryFile
from swarm.errors import ConfigError
from swarm.wire.messages import ServerMessage

MAX_WAITING: Final = 256  # changes that wait for the disk


class ChangeResult(NamedTuple):
    """Result of a change of keys. ``roll``: the registry after it. ``answer``: sent to the client, if one waits.
    ``on_disk``: runs in the thread after the registry is written. ``after``: then runs on the loop. ``disconnects``:
    disconnect the keys that the change removes. (Not for used-up invitations: their clients wait for the answer.)"""

    roll: KeyRegistry
    answer: ServerMessage | None = None
    on_disk: Callable[[], None] | None = None
    after: Callable[[], None] | None = None
    disconnects: bool = False


# Called with the registry and the time when all earlier changes are done; raises RegistryRefusal.
KeyChange = Callable[[KeyRegistry, float], ChangeResult]
OnChanged = Callable[[ServerMessage | RegistryRefusal | None], None]


class _QueuedChange(NamedTuple):
    change: KeyChange
    on_done: OnChanged
    name: str


class KeyStoreWriter:
    """Queue of changes to the key store (see the module). ``on_key_lost`` is called with each key that is no longer
    valid."""

    def __init__(self, file: RegistryFile, on_key_lost: Callable[[str], None]) -> None:
        self._file = file
        self._on_key_lost = on_key_lost
        self._waiting: deque[_QueuedChange] = deque()
        self._has_new = asyncio.Event()

    def submit(self, change: KeyChange, on_done: OnChanged, name: str = "") -> None:
        """Queue a change, unless one of this ``name`` waits already. Raises RegistryRefusal if too many wait."""
        if name and any(queued.name == name for queued in self._waiting):
            return
        if len(self._waiting) >= MAX_WAITING:
            raise RegistryRefusal(f"{len(self._waiting)} changes of keys wait for the disk: try again in a moment")
        self._waiting.append(_QueuedChange(change, on_done, name))
        self._has_new.set()

    @property
    def is_busy(self) -> bool:
        """Whether a change is not finished yet."""
        return bool(self._waiting)

    async def run(self) -> None:
        """Carry out queued changes, until cancelled."""
        while True:
            await self._has_new.wait()
            self._has_new.clear()
            while self._waiting:
                await self.run_next()

    async def run_next(self) -> None:
        """Carry out the first queued change."""
        queued = self._waiting[0]  # it stays in the queue until it is done
        outcome: ServerMessage | RegistryRefusal | None
        try:
            outcome = await self._apply(queued.change)
        except RegistryRefusal as refusal:
            outcome = refusal
        finally:
            self._waiting.popleft()
        queued.on_done(outcome)

    async def _apply(self, change: KeyChange) -> ServerMessage | None:
        result = change(self._file.registry, self._file.now())
        before = self._file.registry.keys
        try:
            if result.roll is not self._file.registry or result.on_disk is not None:
                await asyncio.to_thread(self._write, result)
        finally:
            for key in before - self._file.registry.keys if result.disconnects else ():
                self._on_key_lost(key)
        if result.after is not None:
            result.after()
        return result.answer

    def _write(self, result: ChangeResult) -> None:
        """Write the result to the disk; runs in the thread."""
        self._file.write(result.roll)
        if result.on_disk is not None:
            try:
                result.on_disk()
            except ConfigError as error:
                raise RegistryRefusal(str(error)) from None
