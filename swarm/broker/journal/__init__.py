"""The durable record: what must not be forgotten before somebody is told of it.

The core asks for a write and goes on when it hears that it is done; dispatch never waits. ``store`` is the file,
``writer`` the thread that writes it, ``steps`` what it has for traces. ``doubts`` says whether it can still be
believed, ``salvage`` makes a new one of what is left.
:class:`MemoryJournal` keeps nothing beyond the process: a broker without a state directory forgets its requests when it
dies.
"""

from __future__ import annotations

from swarm.broker.actions import WriteAcceptance, WriteAnew, WriteEnd, WriteEpoch, WriteTokens
from swarm.broker.events import AcceptanceWritten, EndWritten, EpochWritten, JournalRewritten, TokensWritten

Write = WriteEpoch | WriteAcceptance | WriteTokens | WriteEnd | WriteAnew
Written = EpochWritten | AcceptanceWritten | TokensWritten | EndWritten | JournalRewritten
Lasting = WriteEpoch | WriteAcceptance | WriteAnew  # what must be synced before its fact is told


def written(write: Write) -> Written:
    """The fact that a write is done."""
    match write:
        case WriteEpoch(epoch):
            return EpochWritten(epoch)
        case WriteAcceptance(submit, sequences):
            return AcceptanceWritten(submit.request_id, sequences)
        case WriteTokens(tokens):
            return TokensWritten(tuple((new.sequence, new.position + len(new.ids)) for new in tokens))
        case WriteEnd(sequence):
            return EndWritten(sequence)
        case WriteAnew():
            return JournalRewritten()


class MemoryJournal:
    """Everything is "written" as soon as it is asked for."""

    def write(self, write: Write) -> Written:
        return written(write)
