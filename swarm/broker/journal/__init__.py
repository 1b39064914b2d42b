"""The durable record: what must not be forgotten before somebody is told of it.

Comes in: writes that the core asks for. Goes out: facts that they are done. Dispatch never waits. ``store`` is the
file (``database``: its tables; ``records``: what they tell; ``disk``: the room that it takes), ``writer`` the thread
that writes it, ``reader`` those that read it. ``doubts`` says whether it can still be believed, ``salvage`` makes a new
one of what is left.
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
