"""What the broker's core can ask for: orders to its shell. The shell carries them out in the order given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from swarm.wire.messages import (
    FinishReason,
    Hop,
    Manifest,
    Order,
    Query,
    ServerMessage,
    Step,
    Submit,
    TokenLogprob,
)

if TYPE_CHECKING:
    from swarm.broker.drafts.questions import Question
    from swarm.broker.state.archive import Account


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
class TryDoor:
    """Find out beside all else whether the first stage of this epoch can be reached: answered by DoorTried."""

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
    """Journal an epoch, durably; then feed EpochWritten. ``workers``: the names of those in its plan. ``manifest``: of
    the model that it is for. ``blames``: (sequence, worker deaths at which it was in flight)."""

    epoch: int
    workers: tuple[str, ...] = ()
    manifest: Manifest | None = field(default=None, compare=False)
    blames: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class WriteAcceptance:
    """Journal a request, durably; then feed AcceptanceWritten. ``age_s``: how long ago it was accepted, if it is
    written once more."""

    submit: Submit
    sequences: tuple[int, ...]
    tenant: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sequence, from ``position`` on; the first is number ``first`` of the generated ones.
    ``num_cached``: with the first token, how many of the prompt's tokens came from the prefix cache."""

    sequence: int
    position: int
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()
    num_cached: int = 0


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """Journal the new tokens of one step. Then feed TokensWritten."""

    tokens: tuple[NewTokens, ...]


@dataclass(frozen=True, slots=True)
class WriteEnd:
    """Journal how a sequence ended, and with how many of its tokens. Then feed EndWritten."""

    sequence: int
    reason: FinishReason
    num_tokens: int
    detail: str = ""


@dataclass(frozen=True, slots=True)
class WriteAnew:
    """The last of what memory gives a journal that was begun anew, durably: the epoch, and the number that the next
    sequence gets. Then feed JournalRewritten."""

    epoch: WriteEpoch
    next_sequence: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read what the journal has of a request; then feed RequestRead."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReadList:
    """Read what the journal has for a report to this client, of the account's own only if it has one; then feed
    ListRead."""

    client: bytes
    query: Query
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class Solve:
    """Find the answer beside the loop; then feed Solved with this number."""

    number: int
    question: Question


@dataclass(frozen=True, slots=True)
class CountDescriptors:
    """Feed DescriptorsCounted."""


@dataclass(frozen=True, slots=True)
class OpenDoor:
    """Let people in again at this door; if that fails again, feed DoorClosed again."""

    door: str


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on this door of the broker's own ("beat" or "data") hears who has one of these keys, and nobody else."""

    door: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class Relay:
    """From now on the relay passes on what comes with one of these tickets, and nothing else."""

    tickets: frozenset[str]


@dataclass(frozen=True, slots=True)
class ShowOwnSettings:
    """Tell this client by which settings the broker's process runs: only the process knows all of them."""

    client: bytes


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
    | TryDoor
    | ClosePipe
    | Dispatch
    | WriteEpoch
    | WriteAcceptance
    | WriteTokens
    | WriteEnd
    | WriteAnew
    | ReadRequest
    | ReadList
    | Solve
    | CountDescriptors
    | OpenDoor
    | Admit
    | Relay
    | ShowOwnSettings
    | Note
)


class Outbox(list[Action]):
    """What is to be done, in order: whoever decides appends to it. What is to be logged goes the same way."""

    def note(self, event: str, level: str = "info", **fields: object) -> None:
        self.append(Note(event, level, fields))
