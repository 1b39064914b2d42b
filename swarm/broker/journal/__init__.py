"""Durable journal: records what must not be lost before it is announced.

In: write actions of the core. Out: facts that confirm them. Dispatch of steps never waits for the journal.

- ``store``: the file; ``database``: its schema and errors; ``records``: reading requests from it; ``token_buffer``: the
  tokens of the last steps; ``disk``: the disk space it uses
- ``writer``: the thread that writes; ``reader``: the threads that read
- ``integrity``: whether the files can still be trusted; ``salvage``: builds a new journal from a damaged one
- ``values``: encoding with checksums; ``timestamps``: age of records over reboots and clock changes
"""

from __future__ import annotations

from swarm.broker.actions import (
    FinishJournalRewrite,
    WriteAcceptance,
    WriteAdapters,
    WriteEnd,
    WriteEpoch,
    WriteTokens,
)
from swarm.broker.events import (
    AcceptanceWritten,
    AdaptersWritten,
    EndWritten,
    EpochWritten,
    JournalRewritten,
    TokensWritten,
)

JournalWrite = WriteEpoch | WriteAcceptance | WriteTokens | WriteEnd | WriteAdapters | FinishJournalRewrite
WriteConfirmed = EpochWritten | AcceptanceWritten | TokensWritten | EndWritten | AdaptersWritten | JournalRewritten
# writes that must be synced to disk before they are confirmed
DurableWrite = WriteEpoch | WriteAcceptance | WriteAdapters | FinishJournalRewrite


def confirm(write: JournalWrite) -> WriteConfirmed:
    """Return the fact that confirms a write."""
    match write:
        case WriteEpoch(epoch):
            return EpochWritten(epoch)
        case WriteAcceptance(submit, sequences):
            return AcceptanceWritten(submit.request_id, sequences)
        case WriteTokens(tokens):
            return TokensWritten(tuple((new.sequence, new.position + len(new.ids)) for new in tokens))
        case WriteEnd(sequence):
            return EndWritten(sequence)
        case WriteAdapters(ticket):
            return AdaptersWritten(ticket)
        case FinishJournalRewrite():
            return JournalRewritten()
