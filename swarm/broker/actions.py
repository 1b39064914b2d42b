"""What the broker's core can ask for: orders to its shell. The shell carries them out in the order given."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec

from swarm.wire.messages import Order, ServerMessage, Step, Submit


@dataclass(frozen=True, slots=True)
class SayClient:
    client: bytes
    message: ServerMessage
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class OrderWorker:
    """``peer`` is the routing id of the worker's control connection."""

    peer: bytes
    message: Order


@dataclass(frozen=True, slots=True)
class OpenPipe:
    """Connect a fresh edge to the first stage of this epoch; drop the one before with all it holds."""

    epoch: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class ClosePipe:
    """Drop the edge to the first stage."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a step into the pipe."""

    step: Step


@dataclass(frozen=True, slots=True)
class WriteEpoch:
    """Journal an epoch, durably; then feed EpochWritten."""

    epoch: int


@dataclass(frozen=True, slots=True)
class WriteAcceptance:
    """Journal a request, durably; then feed AcceptanceWritten."""

    submit: Submit
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """Journal new tokens of one step: (sequence, position of the first, ids). Then feed TokensWritten."""

    tokens: tuple[tuple[int, int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class WriteEnd:
    """Journal how a sequence ended; nobody waits for it."""

    sequence: int
    reason: str
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for the log."""

    event: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)


def caused(action: Action, cause: str) -> Action:
    """The action with the id of the event that it follows from, where somebody may want to know it: in lines of the
    log, in steps, and in orders to workers, which put it into theirs."""
    match action:
        case Note():
            action.fields.setdefault("cause", cause)
            return action
        case Dispatch(step):
            return Dispatch(msgspec.structs.replace(step, cause=cause))
        case OrderWorker(peer, message):
            return OrderWorker(peer, msgspec.structs.replace(message, cause=cause))
        case _:
            return action


Action = (
    SayClient
    | OrderWorker
    | OpenPipe
    | ClosePipe
    | Dispatch
    | WriteEpoch
    | WriteAcceptance
    | WriteTokens
    | WriteEnd
    | Note
)
