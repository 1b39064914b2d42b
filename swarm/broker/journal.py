"""The durable record: what must not be forgotten before somebody is told of it.

The core asks for a write and goes on when it hears that it is done; dispatch never waits. This version keeps nothing
beyond the process: it answers at once, so a broker that dies forgets its requests. The order of asking and hearing is
already the one that a journal on disk needs.
"""

from __future__ import annotations

from typing import Protocol

from swarm.broker.actions import WriteAcceptance, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.events import AcceptanceWritten, EpochWritten, TokensWritten

Write = WriteEpoch | WriteAcceptance | WriteTokens | WriteEnd
Written = EpochWritten | AcceptanceWritten | TokensWritten


class Journal(Protocol):
    """Where writes go. ``write`` returns the fact that the write is done, or None if nobody waits for it."""

    def write(self, write: Write) -> Written | None: ...


class MemoryJournal:
    """Everything is "written" as soon as it is asked for."""

    def write(self, write: Write) -> Written | None:
        match write:
            case WriteEpoch(epoch):
                return EpochWritten(epoch)
            case WriteAcceptance(submit, sequences):
                return AcceptanceWritten(submit.request_id, sequences)
            case WriteTokens(tokens):
                return TokensWritten(tuple((sequence, position + len(ids)) for sequence, position, ids in tokens))
            case WriteEnd():
                return None
