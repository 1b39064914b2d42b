"""Events: facts that reach the broker's core, each with its data. ``core.handle`` takes them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

# part of a client's message
from swarm.broker.state.ended_requests import ClientAccount as ClientAccount  # noqa: PLC0414 (re-exported)
from swarm.wire.draft_messages import DraftMessage
from swarm.wire.messages import ClientMessage, Heartbeat, Json, Query, StepDone, WorkerMessage

if TYPE_CHECKING:
    from swarm.broker.planning.plan_query import PlanAnswer
    from swarm.broker.planning.rules import PlanRules
    from swarm.broker.state.journal_snapshot import RequestRecord


@dataclass(frozen=True, slots=True)
class ClientMessageReceived:
    """A client sent a message. ``client`` is the connection's routing id. ``account``: of the key with which it
    connected; None: it has all permissions."""

    client: bytes
    message: ClientMessage
    account: ClientAccount | None = None


@dataclass(frozen=True, slots=True)
class ClientUnreachable:
    """A client is gone: its connection is closed, or there was none for a message."""

    client: bytes


@dataclass(frozen=True, slots=True)
class ClientBlocked:
    """A message to a connected client was dropped: it has not read for long, and its queue is full."""

    client: bytes


@dataclass(frozen=True, slots=True)
class WorkerMessageReceived:
    """A worker sent a message on its control connection. ``peer``: the connection's routing id. ``owner``: the member
    whose key authenticated the worker; empty for a worker on the broker's own machine, which needs no key.
    ``address_error``: why other workers may not connect to the address in its Hello; empty if they may."""

    peer: bytes
    message: WorkerMessage
    owner: str = ""
    address_error: str = ""


@dataclass(frozen=True, slots=True)
class AssetPartArrived:
    """A worker sent a part of a file that clients need: the bytes from ``offset`` on, of ``total``."""

    peer: bytes
    name: str
    offset: int
    total: int
    data: bytes


@dataclass(frozen=True, slots=True)
class MessageRefused:
    """A message could not be decoded. It came through the socket "client", "control", "beat" or "data". ``foreign``:
    for a complete message, the part that this build does not support. ``peer``: the sender of such a message."""

    socket: str
    peer: bytes = b""
    foreign: str = ""


@dataclass(frozen=True, slots=True)
class WorkerDisconnected:
    """The control connection of this peer closed."""

    peer: bytes


@dataclass(frozen=True, slots=True)
class HeartbeatReceived:
    """A heartbeat arrived. ``key``: the sender's public key; empty where the socket does not check keys."""

    beat: Heartbeat
    key: str = ""


@dataclass(frozen=True, slots=True)
class KeyRevoked:
    """This key is no longer valid."""

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
    """The journal holds this request; its client may be informed. ``sequences`` identify the acceptance: the same
    request id may have been cancelled and used again since."""

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
    """The journal could not take this sequence's end: it lacks tokens of the sequence."""

    sequence: int


@dataclass(frozen=True, slots=True)
class AdaptersWritten:
    """The journal holds the adapters of the ``WriteAdapters`` with this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class RequestRead:
    """The journal was read for a request. ``record`` None: it has nothing. ``problem``: why it can't be read."""

    request_id: str
    record: RequestRecord | None
    problem: str = ""


@dataclass(frozen=True, slots=True)
class ListRead:
    """The journal has returned the rows for a report: one row per ended request, the latest first."""

    client: bytes
    query: Query
    rows: tuple[Json, ...]
    problem: str = ""
    account: ClientAccount | None = None


@dataclass(frozen=True, slots=True)
class Solved:
    """A plan query was answered. ``number``: the query's. ``problem``: why there is no answer."""

    number: int
    answer: PlanAnswer
    problem: str = ""


@dataclass(frozen=True, slots=True)
class JournalBroke:
    """The disk rejects writes: records are kept and tried again, and none counts as written meanwhile."""

    reason: str


@dataclass(frozen=True, slots=True)
class JournalMended:
    """All kept records have been written."""


@dataclass(frozen=True, slots=True)
class JournalRenewed:
    """The journal could no longer be trusted, and a new one has replaced it. The new journal holds what could be read
    from the old one; the broker must write the data in memory again. ``note``: what happened, as text.
    ``next_sequence``: a sequence number above all that the new journal contains."""

    note: str
    next_sequence: int


@dataclass(frozen=True, slots=True)
class JournalRewritten:
    """The new journal has all data from memory."""


@dataclass(frozen=True, slots=True)
class JournalFigures:
    """The journal reports its writing times; ``write_s`` is the distribution of its transactions' seconds."""

    values: Json


@dataclass(frozen=True, slots=True)
class ProcessFigures:
    """The broker's process reports the resources that it uses."""

    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class AcceptStopped:
    """A listening socket ("client" or "worker") has stopped accepting: accepting failed with this error number.
    ``limit``: the number of descriptors that this process may have."""

    socket: str
    code: int
    limit: int


@dataclass(frozen=True, slots=True)
class DescriptorsCounted:
    """The open file descriptors were counted. ``limit``: how many may be open."""

    used: int
    limit: int


@dataclass(frozen=True, slots=True)
class RouteTested:
    """The route to the first stage of this epoch was tested. ``problem``: why it can't be reached; empty: it can."""

    epoch: int
    problem: str


@dataclass(frozen=True, slots=True)
class RulesChanged:
    """The settings were reloaded, with these rules for plans."""

    rules: PlanRules


@dataclass(frozen=True, slots=True)
class DraftMessageReceived:
    """The process of the draft model sent a message."""

    message: DraftMessage


@dataclass(frozen=True, slots=True)
class DraftGone:
    """The process of the draft model has ended. ``is_final``: it is not started again."""

    reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class WaitExpired:
    """The time that ``BrokerCore.wake_at`` returned has come."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


def describe_event(event: Event) -> dict[str, object] | None:
    """Return an event's fields for the log; None for frequent events that cause little, such as ticks."""
    fields: dict[str, object] = {"kind": type(event).__name__}
    match event:
        case (
            Tick() | WaitExpired() | HeartbeatReceived() | JournalFigures() | ProcessFigures() | DraftMessageReceived()
        ):
            return None
        case ClientMessageReceived(client, message):
            fields |= {"client": client.hex(), "message": type(message).__name__}
            request_id = getattr(message, "request_id", "")
            return fields | ({"request": request_id} if request_id else {})
        case WorkerMessageReceived(peer, message):
            return fields | {"worker": peer.decode(errors="replace"), "message": type(message).__name__}
        case StepFinished(done):
            return fields | {"epoch": done.epoch, "step": done.step, "caused_by": done.cause}
        case AcceptanceWritten(request_id=request_id) | RequestRead(request_id=request_id):
            return fields | {"request": request_id}
        case _:
            return fields


Event = (
    ClientMessageReceived
    | ClientUnreachable
    | ClientBlocked
    | WorkerMessageReceived
    | AssetPartArrived
    | MessageRefused
    | WorkerDisconnected
    | HeartbeatReceived
    | KeyRevoked
    | StepFinished
    | EpochWritten
    | AcceptanceWritten
    | TokensWritten
    | EndWritten
    | EndNotWritten
    | AdaptersWritten
    | RequestRead
    | ListRead
    | Solved
    | JournalBroke
    | JournalMended
    | JournalRenewed
    | JournalRewritten
    | JournalFigures
    | ProcessFigures
    | AcceptStopped
    | RouteTested
    | DescriptorsCounted
    | RulesChanged
    | DraftMessageReceived
    | DraftGone
    | WaitExpired
    | Tick
)
