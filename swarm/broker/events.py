"""What can happen to the broker: facts, each with what is known about it. ``core.handle`` takes them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.broker.state.archive import Account as Account  # noqa: PLC0414 (a part of what is said)
from swarm.wire.messages import Beat, ClientMessage, Json, Query, StepDone, WorkerMessage

if TYPE_CHECKING:
    from swarm.broker.drafts.questions import Found
    from swarm.broker.drafts.rules import PlanRules
    from swarm.broker.state.past import RequestRecord


@dataclass(frozen=True, slots=True)
class ClientSaid:
    """A message came through the client door. ``client`` is the connection's routing id. ``account``: of the key that
    it knocked with; None: who says it may do all."""

    client: bytes
    message: ClientMessage
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class ClientUnreachable:
    """A client is gone: its connection is closed, or there was none for a message."""

    client: bytes


@dataclass(frozen=True, slots=True)
class ClientStuck:
    """A message to a client was dropped, though it is connected: it has not read for long, and its queue is full."""

    client: bytes


@dataclass(frozen=True, slots=True)
class WorkerSaid:
    """A message came through the control door. ``peer`` is the connection's routing id. ``owner``: the member by whose
    key it was let in; empty: it is on the broker's own machine, of which no key is asked. ``not_at``: why nobody may
    connect to the address in its Hello; empty: everybody may."""

    peer: bytes
    message: WorkerMessage
    owner: str = ""
    not_at: str = ""


@dataclass(frozen=True, slots=True)
class AssetPartArrived:
    """A part of a file that clients need came from a worker: the bytes from ``offset`` on, of ``total``."""

    peer: bytes
    name: str
    offset: int
    total: int
    data: bytes


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """Bytes that can't be understood came through a door: "client", "control", "beat" or "data". ``foreign``: they came
    whole, and this is what has no meaning here; ``peer``: then, who said it."""

    door: str
    peer: bytes = b""
    foreign: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The control connection of this peer closed."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class BeatHeard:
    """``key``: of who sent it, where that door goes by keys."""

    beat: Beat
    key: str = ""


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    """This key opens no door any more."""

    key: str


@dataclass(frozen=True, slots=True)
class StepFinished:
    """The last stage answered a step."""

    done: StepDone


@dataclass(frozen=True, slots=True)
class EpochWritten:
    """The journal holds this epoch; it may be announced."""

    epoch: int


@dataclass(frozen=True, slots=True)
class AcceptanceWritten:
    """The journal holds this request; its client may be told. ``sequences`` are those of the acceptance written: the
    same request id may have been cancelled and used again since."""

    request_id: str
    sequences: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class TokensWritten:
    """The journal holds these sequences' tokens up to the given lengths; clients may see them."""

    committed: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class EndWritten:
    """The journal holds this sequence's end, and all its tokens."""

    sequence: int


@dataclass(frozen=True, slots=True)
class EndNotWritten:
    """The journal could not take this sequence's end: it lacks tokens of it."""

    sequence: int


@dataclass(frozen=True, slots=True)
class RequestRead:
    """What the journal has of a request; None: nothing. ``problem``: why it can't be read."""

    request_id: str
    record: RequestRecord | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ListRead:
    """What the journal has for a report: a row per request that has ended, the latest first."""

    client: bytes
    query: Query
    rows: tuple[Json, ...]
    problem: str = ""
    account: Account | None = None


@dataclass(frozen=True, slots=True)
class Solved:
    """What was found for the question of this number. ``problem``: why nothing was."""

    number: int
    found: Found
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JournalBroke:
    """The disk refuses: what was to be written is kept and tried again, and nothing counts as written meanwhile."""

    reason: str


@dataclass(frozen=True, slots=True)
class JournalMended:
    """All that was kept has been written."""


@dataclass(frozen=True, slots=True)
class JournalRenewed:
    """The journal could not be believed any more. Another one is in its place, with what the old one still gave; what
    memory has is to be written once more. ``note``: what happened, in words. ``next_sequence``: from here on no number
    of a sequence is taken in it."""

    note: str
    next_sequence: int


@dataclass(frozen=True, slots=True)
class JournalRewritten:
    """The new journal has what memory gave it."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """What writing took so far, for reports; ``write_s`` is how its transactions' seconds are spread."""

    values: Json


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """What the broker's own process takes, for reports."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class DoorClosed:
    """A door ("client" or "worker") lets nobody new in: accepting failed with this error number. ``limit``: the number
    of descriptors that this process may have."""

    door: str
    code: int
    limit: int


@dataclass(frozen=True, slots=True)
class DescriptorsCounted:
    """This many descriptors are open now, and this many may be."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class DoorTried:
    """Why the first stage of this epoch can't be reached from here; empty: it can."""

    epoch: int
    problem: str


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """The settings were read again while we run, and say this about plans."""

    rules: PlanRules


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


def described(event: Event) -> dict[str, object] | None:
    """Tell an event in a line of the log; None for the clock and for beats, which come often and cause little."""
    fields: dict[str, object] = {"kind": type(event).__name__}
    match event:
        case Tick() | BeatHeard() | JournalFigures() | ProcessFigures():
            return None
        case ClientSaid(client, message):
            fields |= {"client": client.hex(), "message": type(message).__name__}
            request_id = getattr(message, "request_id", "")
            return fields | ({"request": request_id} if request_id else {})
        case WorkerSaid(peer, message):
            return fields | {"worker": peer.decode(errors="replace"), "message": type(message).__name__}
        case StepFinished(done):
            return fields | {"epoch": done.epoch, "step": done.step, "caused_by": done.cause}
        case AcceptanceWritten(request_id=request_id) | RequestRead(request_id=request_id):
            return fields | {"request": request_id}
        case _:
            return fields


Event = (
    ClientSaid
    | ClientUnreachable
    | ClientStuck
    | WorkerSaid
    | AssetPartArrived
    | MessageRefused
    | WorkerDisconnected
    | BeatHeard
    | KeyRevoked
    | StepFinished
    | EpochWritten
    | AcceptanceWritten
    | TokensWritten
    | EndWritten
    | EndNotWritten
    | RequestRead
    | ListRead
    | Solved
    | JournalBroke
    | JournalMended
    | JournalRenewed
    | JournalRewritten
    | JournalFigures
    | ProcessFigures
    | DoorClosed
    | DoorTried
    | DescriptorsCounted
    | RulesChanged
    | Tick
)
