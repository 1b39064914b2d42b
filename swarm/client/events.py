"""What can happen to a client's session, and what it can ask for."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.errors import ClientError
from swarm.wire.messages import (
    AssetPart,
    ClientMessage,
    Describe,
    Description,
    Finished,
    GetAsset,
    Hop,
    Join,
    LockMessage,
    LookUp,
    Query,
    Recall,
    Recalled,
    Report,
    ServerMessage,
    ShowSettings,
    Snapshot,
    Steer,
    StopWorker,
    Submit,
    TokenLogprob,
)

Question = Describe | GetAsset | Query | Recall | LookUp | Join | StopWorker | Steer | ShowSettings | LockMessage
Reply = Description | AssetPart | Recalled | Snapshot | Report

# --- events ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Reached:
    """Somebody has taken the connection; who that is will be known when it greets."""


@dataclass(frozen=True, slots=True)
class Unheard:
    """Somebody listens, and hangs up before we are through: it may be the broker, with another key."""


@dataclass(frozen=True, slots=True)
class Connected:
    """The connection stands (again), to a broker that speaks as we do."""


@dataclass(frozen=True, slots=True)
class Estranged:
    """The connection stands, to a broker that can't be talked to."""

    reason: str


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The connection is gone; the socket tries again by itself."""


@dataclass(frozen=True, slots=True)
class Received:
    """A message from the broker, and the bytes that came with it."""

    message: ServerMessage
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class NotUnderstood:
    """Something came from the broker that has no meaning here. ``request_id``: which request it is about, if it says so
    in the usual place."""

    reason: str
    request_id: str = ""


@dataclass(frozen=True, slots=True)
class Start:
    """The caller has a request. ``timeout_s`` counts from now. ``attached``: the broker has taken it before, perhaps
    from another process; it is only to be read."""

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
    """A stop string was found: tokens before ``at_index`` count."""

    request_id: str
    index: int
    at_index: int


@dataclass(frozen=True, slots=True)
class Leave:
    """The caller wants no more of this request. It is cancelled, unless it was detached or only read here;
    ``cancel``: in any case."""

    request_id: str
    cancel: bool = False


@dataclass(frozen=True, slots=True)
class Revoke:
    """The caller wants a request to end that was made elsewhere, and does not read it."""

    submit: Submit


@dataclass(frozen=True, slots=True)
class Ask:
    """The caller has a question; ``key`` comes back with the answer. ``timeout_s`` counts from now."""

    key: int
    question: Question
    timeout_s: float


@dataclass(frozen=True, slots=True)
class Withdraw:
    """The caller no longer waits for an answer."""

    key: int


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


Event = (
    Reached
    | Unheard
    | Connected
    | Estranged
    | Disconnected
    | Received
    | NotUnderstood
    | Start
    | Consumed
    | StopFound
    | Leave
    | Revoke
    | Ask
    | Withdraw
    | Tick
)


# --- actions ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    message: ClientMessage


@dataclass(frozen=True, slots=True)
class Deliver:
    """Tokens ``start`` … of a continuation, each exactly once and in order."""

    request_id: str
    index: int
    start: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...]
    hops: tuple[tuple[Hop, ...], ...]


@dataclass(frozen=True, slots=True)
class Ended:
    """A continuation has ended well, and all its tokens have been delivered."""

    request_id: str
    index: int
    finished: Finished


@dataclass(frozen=True, slots=True)
class Failed:
    """The request has ended badly; nothing more comes of it."""

    request_id: str
    error: ClientError


@dataclass(frozen=True, slots=True)
class Taken:
    """A detached request is in the broker's journal: from now on it needs nobody."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Answered:
    key: int
    answer: Reply
    payload: bytes = b""


@dataclass(frozen=True, slots=True)
class Unanswered:
    key: int
    error: ClientError


Action = Send | Deliver | Ended | Failed | Taken | Answered | Unanswered
Actions = list[Action]
