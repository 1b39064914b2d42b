"""Events that a client's session handles, and actions that it returns."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ClientError
from swarm.wire.messages import (
    AdapterCommand,
    AssetPart,
    ClientMessage,
    Describe,
    Description,
    Finished,
    GetAsset,
    GetRequest,
    Hop,
    Join,
    KeyMessage,
    LookUp,
    PlanCommand,
    Query,
    Report,
    RequestDetails,
    ServerMessage,
    ShowSettings,
    StopWorker,
    Submit,
    TokenLogprob,
    TokensSnapshot,
)

Question = (
    Describe
    | GetAsset
    | Query
    | GetRequest
    | LookUp
    | Join
    | StopWorker
    | PlanCommand
    | AdapterCommand
    | ShowSettings
    | KeyMessage
)
Reply = Description | AssetPart | RequestDetails | TokensSnapshot | Report

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class TcpConnected:
    """A TCP connection was accepted. The peer's greeting, which is the next message, shows whether it is a broker."""


@dataclass(frozen=True, slots=True)
class HandshakeFailed:
    """A peer accepted the connection and closed it during the security handshake. It may be the broker with another
    key."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection to a compatible broker is up (again)."""


@dataclass(frozen=True, slots=True)
class IncompatibleBroker:
    """The connection is up, but the broker is incompatible or rejects this client. ``reason`` is for the caller."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is lost; the socket reconnects by itself."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the broker, and the bytes that came with it."""

    message: ServerMessage
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class UndecodableMessage:
    """A message from the broker could not be decoded. ``request_id``: the request that it names, if that field could be
    read."""

    reason: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class StartRequest:
    """The caller starts a request. ``timeout_s`` counts from now. ``attached``: the broker already has the request,
    perhaps from another process; this client only reads it."""

    submit: Submit
    timeout_s: float | None = None
    attached: bool = False


@dataclass(frozen=True, slots=True)
class Consumed:
    """The caller has taken the tokens before ``next_index`` of a continuation."""

    request_id: str
    index: int
    next_index: int


@dataclass(frozen=True, slots=True)
class StopFound:
    """A stop string was found: only the tokens before ``at_index`` count."""

    request_id: str
    index: int
    at_index: int


@dataclass(frozen=True, slots=True)
class LeaveRequest:
    """The caller no longer reads this request. It is cancelled unless it is detached or was only attached to;
    ``cancel``: cancelled in any case."""

    request_id: str
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class CancelForeignRequest:
    """The caller cancels a request that another client made and that this one does not read."""

    submit: Submit


@dataclass(frozen=True, slots=True)
class AskQuestion:
    """The caller has a question for the broker. ``key`` is returned with the answer. ``timeout_s`` counts from now."""

    key: int
    question: Question
    timeout_s: float


@dataclass(frozen=True, slots=True)
class AbandonQuestion:
    """The caller no longer waits for an answer."""

    key: int


@dataclass(frozen=True, slots=True)
class SessionTick:
    """Time has passed."""


SessionEvent = (
    TcpConnected
    | HandshakeFailed
    | Connected
    | IncompatibleBroker
    | Disconnected
    | Received
    | UndecodableMessage
    | StartRequest
    | Consumed
    | StopFound
    | LeaveRequest
    | CancelForeignRequest
    | AskQuestion
    | AbandonQuestion
    | SessionTick
)


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Send a message to the broker."""

    message: ClientMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """Deliver tokens ``start`` … of a continuation to the caller, each exactly once and in order."""

    request_id: str
    index: int
    start: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    hops: tuple[tuple[Hop, ...], ...]


@dataclass(frozen=True, slots=True)
class EndContinuation:
    """A continuation has ended normally, and all its tokens have been delivered."""

    request_id: str
    index: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class FailRequest:
    """The request has failed; nothing more will be delivered for it."""

    request_id: str
    error: ClientError


@dataclass(frozen=True, slots=True)
class ConfirmStored:
    """A detached request is in the broker's journal: it continues without this client."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReturnAnswer:
    """Return the broker's answer to the caller of question ``key``."""

    key: int
    answer: Reply
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class ReturnError:
    """Raise an error at the caller of question ``key``."""

    key: int
    error: ClientError


SessionAction = Send | Deliver | EndContinuation | FailRequest | ConfirmStored | ReturnAnswer | ReturnError
SessionActions = list[SessionAction]
