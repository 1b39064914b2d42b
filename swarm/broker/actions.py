"""Actions: orders of the broker's core to its shell, which carries them out in the order given."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from swarm.wire.draft_messages import AskProposals
from swarm.wire.messages import (
    AdapterEntry,
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
    from swarm.broker.planning.plan_query import PlanQuery
    from swarm.broker.state.ended_requests import ClientAccount


@dataclass(frozen=True, slots=True)
class SendToClient:
    """Send a message to a client."""

    client: bytes  # routing id of the client's connection
    message: ServerMessage
    payload: bytes | None = None


@dataclass(frozen=True, slots=True)
class SendToWorker:
    """Send an order to a worker. ``peer`` is the routing id of the worker's control connection."""

    peer: bytes
    message: Order


@dataclass(frozen=True, slots=True)
class ConnectPipeline:
    """Open a connection to the first stage of this epoch; drop the previous one with everything queued in it."""

    epoch: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class ProbeRoute:
    """Probe in the background whether the first stage of this epoch can be reached; then feed ``RouteTested``."""

    epoch: int
    endpoint: str


@dataclass(frozen=True, slots=True)
class DisconnectPipeline:
    """Close the connection to the first stage."""


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send a step to the first stage."""

    step: Step


@dataclass(frozen=True, slots=True)
class WriteEpoch:
    """Journal an epoch, durably; then feed EpochWritten. ``workers``: the names of the workers in its plan.
    ``manifest``: of its model. ``blames``: (sequence, worker deaths at which it was in flight)."""

    epoch: int
    workers: tuple[str, ...] = ()
    manifest: Manifest | None = field(default=None, compare=False)
    blames: tuple[tuple[int, int], ...] = field(default=(), compare=False)


@dataclass(frozen=True, slots=True)
class WriteAcceptance:
    """Journal a request, durably; then feed AcceptanceWritten. ``age_s``: time since it was accepted, if it is written
    again."""

    submit: Submit
    sequences: tuple[int, ...]
    tenant: str = ""
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NewTokens:
    """Tokens of one sequence, from ``position`` on; the first is number ``first`` of the generated ones.
    With the first token: ``num_cached``, the number of the prompt's tokens that came from the prefix cache, and
    ``prompt_logprobs``, if the request asked for them."""

    sequence: int
    position: int
    first: int
    ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] = ()
    hops: tuple[tuple[Hop, ...], ...] = ()  # by token: the times of its step at each stage
    num_cached: int = 0
    prompt_logprobs: bytes = b""


@dataclass(frozen=True, slots=True)
class WriteTokens:
    """Journal the new tokens of one step; then feed TokensWritten."""

    tokens: tuple[NewTokens, ...]


@dataclass(frozen=True, slots=True)
class WriteEnd:
    """Journal how a sequence ended, and with how many of its tokens; then feed EndWritten. ``vector``: the answer of a
    request for a vector. ``num_cached``, ``prompt_logprobs``: as of ``NewTokens``, for a sequence without tokens.
    ``has_pixels``: the request's submission has pixels, which are not kept after its last sequence's end."""

    sequence: int
    reason: FinishReason
    num_tokens: int
    detail: str = ""
    vector: bytes = b""
    num_cached: int = 0
    prompt_logprobs: bytes = b""
    has_pixels: bool = False


@dataclass(frozen=True, slots=True)
class WriteAdapters:
    """Journal the adapters that are loaded at run time, durably; then feed AdaptersWritten with this ticket.
    ``dropped``: keys of those that new requests can't have."""

    ticket: int
    adapters: tuple[AdapterEntry, ...]
    dropped: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FinishJournalRewrite:
    """Write the last records from memory into a journal that was started again, durably: the epoch, and the number of
    the next sequence; then feed JournalRewritten."""

    epoch: WriteEpoch
    next_sequence: int


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """Read a request from the journal; the result arrives as a ``RequestRead`` event."""

    request_id: str


@dataclass(frozen=True, slots=True)
class ReadList:
    """Read a report's requests from the journal for this client, only the account's own if it has one; then feed
    ListRead."""

    client: bytes
    query: Query
    account: ClientAccount | None = None


@dataclass(frozen=True, slots=True)
class Solve:
    """Answer a plan query in the background; then feed Solved with this number."""

    number: int
    query: PlanQuery


@dataclass(frozen=True, slots=True)
class CountDescriptors:
    """Count the open file descriptors; feed DescriptorsCounted."""


@dataclass(frozen=True, slots=True)
class ResumeAccepting:
    """Accept connections at this listening socket again; if that fails again, feed the event again."""

    socket: str  # "client", "worker", "beat" or "data"


@dataclass(frozen=True, slots=True)
class SetAllowedKeys:
    """Restrict one of the broker's own sockets ("beat" or "data") to peers with one of these keys from now on."""

    socket: str
    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class SetRelayTickets:
    """Restrict the relay to connections with one of these tickets from now on."""

    tickets: frozenset[str]


@dataclass(frozen=True, slots=True)
class ShowOwnSettings:
    """Send this client the effective settings of the broker's process: only the process has all of them."""

    client: bytes


@dataclass(frozen=True, slots=True)
class AskDraft:
    """Send a request to the process of the draft model; the answer arrives as ``DraftMessageReceived``."""

    request: AskProposals


@dataclass(frozen=True, slots=True)
class StopDraft:
    """End the process of the draft model, and do not start it again."""


@dataclass(frozen=True, slots=True)
class WriteLog:
    """Log an event."""

    event: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)  # keys and values of the event


def add_cause(action: Action, cause: str) -> Action:
    """Return the action with the id of the event that caused it, where the id is useful: in log lines, in steps, and in
    orders to workers, which put it into their logs."""
    match action:
        case WriteLog():
            action.fields.setdefault("cause", cause)
            return action
        case Dispatch(step):
            return Dispatch(msgspec.structs.replace(step, cause=cause))
        case SendToWorker(peer, message):
            return SendToWorker(peer, msgspec.structs.replace(message, cause=cause))
        case _:
            return action


Action = (
    SendToClient
    | SendToWorker
    | ConnectPipeline
    | ProbeRoute
    | DisconnectPipeline
    | Dispatch
    | WriteEpoch
    | WriteAcceptance
    | WriteTokens
    | WriteEnd
    | WriteAdapters
    | FinishJournalRewrite
    | ReadRequest
    | ReadList
    | Solve
    | CountDescriptors
    | ResumeAccepting
    | SetAllowedKeys
    | SetRelayTickets
    | ShowOwnSettings
    | AskDraft
    | StopDraft
    | WriteLog
)


class Outbox(list[Action]):
    """Actions in order, collected by the deciding parts. Log entries are queued the same way."""

    def note(self, event: str, level: str = "info", **fields: object) -> None:
        self.append(WriteLog(event, level, fields))
