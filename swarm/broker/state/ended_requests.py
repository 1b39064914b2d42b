"""Requests that have ended: which ones stay in memory, and messages that wait until the journal has been searched.

With a journal, memory only holds the requests that are being read now; a request that was dropped is read from the
journal when a client asks for it. Without a journal, a dropped request is lost. Either way, ended requests use no more
memory than the bounds below, whatever their clients do.

``ForgottenRequests`` remembers why a request is not available where the journal has no record of it: without a journal,
requests that left memory are lost; the journal's own limits remove requests too. While the journal cannot be written,
requests that leave memory are not in it yet; if that lasts, their tokens are dropped and never will be. A client that
asks for such a request gets this reason. Nothing is remembered from earlier broker processes.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.broker.state.sequences import Request
from swarm.wire.messages import Ack, Attach, GetRequest, LookUp, Submit

# Limits for all ended requests together: as many as arrive in a busy minute, and about 20 MB (a token takes about 40
# bytes and counts as 1; an alternative in its log probabilities takes three times that, a hop eight times).
MAX_ENDED = 1024
MAX_ENDED_WEIGHT = 1 << 19
LOGPROB_WEIGHT = 3
HOP_WEIGHT = 8
BYTES_PER_TOKEN = 40  # of a vector

MAX_WAITING = 4096  # messages that wait for the journal
MAX_PER_REQUEST = 256  # messages that wait for the journal about one request
# seconds until the client of a question is informed that the journal is slow; less than any client waits
JOURNAL_TIMEOUT_S = 5.0
MAX_DROPPED = 4096  # ids; a reader whose request is not among them reattaches by itself after a while

RETRY_S = 5.0  # a full disk is cleared by operators, so retrying sooner is of no use
MAX_ANSWERS = 4096  # requests for which a better reason than "unknown" is remembered
# sequences; no request is admitted while the journal cannot be written, so there are hardly ever more
MAX_UNWRITTEN = 1 << 16

RequestQuestion = GetRequest | LookUp  # messages that only read
RequestMessage = Submit | Attach | Ack | RequestQuestion


@dataclass(frozen=True, slots=True)
class ClientAccount:
    """Account on which an authenticated client acts. The tenant that the client names itself is ignored.

    With ``may_name_tenants`` (a gateway), the client acts for others and has one tenant per name that it gives. Key
    names contain no "/", so the tenants of two keys never overlap.
    """

    tenant: str
    may_name_tenants: bool = False

    def tenant_of(self, named: str) -> str:
        """Return the tenant to charge for a request whose client named the tenant ``named`` (may be empty)."""
        return f"{self.tenant}/{named}" if named and self.may_name_tenants else self.tenant

    def owns(self, tenant: str) -> bool:
        """Whether this account may access requests of the tenant."""
        return tenant == self.tenant or (self.may_name_tenants and tenant.startswith(f"{self.tenant}/"))


def can_see(account: ClientAccount | None, tenant: str) -> bool:
    """Whether the account may see requests of this tenant. Without an account (no authentication), it may see all."""
    return account is None or account.owns(tenant)


WaitingMessage = tuple[bytes, RequestMessage, ClientAccount | None]  # client, message, account of the client


def request_weight(request: Request) -> int:
    """Return the memory that an ended request takes in the cache, expressed as a number of tokens."""
    num_logprobs = request.submit.params.logprobs
    token_weight = 1 + (0 if num_logprobs is None else LOGPROB_WEIGHT * (1 + num_logprobs))
    total = len(request.submit.prompt)
    for sequence in request.sequences:
        total += sequence.num_prompt + (len(sequence.vector) + len(sequence.prompt_logprobs)) // BYTES_PER_TOKEN
        total += token_weight * sequence.num_generated + HOP_WEIGHT * sum(map(len, sequence.hops))
    return total


@dataclass(slots=True)
class EndedRequests:
    """Ended requests in memory, in the order of their ends (or of their return from the journal)."""

    weights: OrderedDict[str, int] = field(default_factory=OrderedDict)  # request id -> weight in tokens
    weight: int = 0

    def add(self, request: Request) -> None:
        self.remove(request.id)
        self.weights[request.id] = request_weight(request)
        self.weight += self.weights[request.id]

    def remove(self, request_id: str) -> None:
        self.weight -= self.weights.pop(request_id, 0)

    @property
    def exceeds_limits(self) -> bool:
        """Whether the limits are exceeded. The newest request stays in any case."""
        return len(self.weights) > MAX_ENDED or (self.weight > MAX_ENDED_WEIGHT and len(self.weights) > 1)

    def iter_oldest(self) -> Iterator[str]:
        """Iterate over all requests except the newest, the oldest first. They may be removed during the iteration."""
        return iter(list(self.weights)[:-1])

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        total = sum(self.weights.values())
        return None if self.weight == total else f"the weight of ended requests is {total}, counted is {self.weight}"


@dataclass(slots=True)
class JournalLookups:
    """Messages about requests that are not in memory, until the journal has been searched."""

    # requests that left memory while a client was reading them -> that client
    dropped_readers: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _waiting: dict[str, list[WaitingMessage]] = field(default_factory=dict)  # by request id, in the order of arrival
    num_waiting: int = 0
    _asked_at: dict[str, float] = field(default_factory=dict)  # time at which the journal was asked, by request id

    def enqueue(
        self, client: bytes, message: RequestMessage, account: ClientAccount | None = None, *, now: float = 0.0
    ) -> bool | None:
        """Queue a message until the journal has been searched for its request.

        Return True if the journal must be asked now (first message about this request), False if the message waits with
        others, and None if there is no capacity. An earlier message of the same kind from the same client is replaced,
        but each question gets its own answer.
        """
        request_id = message.request_id
        waiting = self._waiting.get(request_id, [])
        for place, (sender, earlier, _) in enumerate(waiting):
            if sender == client and _replaces(message, earlier):
                waiting[place] = (client, message, account)
                return False
        if max(self.num_waiting, len(self._waiting)) >= MAX_WAITING or len(waiting) >= MAX_PER_REQUEST:
            return None
        self._waiting[request_id] = waiting
        waiting.append((client, message, account))
        self.num_waiting += 1
        if request_id in self._asked_at:
            return False
        self._asked_at[request_id] = now
        return True

    def has_only_questions(self, request_id: str) -> bool:
        """Whether all messages that wait for this request only read."""
        return all(isinstance(message, RequestQuestion) for _, message, _ in self._waiting.get(request_id, []))

    def take_overdue(self, now: float) -> list[tuple[bytes, RequestQuestion]]:
        """Remove and return the questions that have waited longer than ``JOURNAL_TIMEOUT_S``."""
        late: list[tuple[bytes, RequestQuestion]] = []
        for request_id, asked_at in self._asked_at.items():
            waiting = self._waiting[request_id]
            if now - asked_at >= JOURNAL_TIMEOUT_S and waiting:
                late += [(client, message) for client, message, _ in waiting if isinstance(message, RequestQuestion)]
                waiting[:] = [item for item in waiting if not isinstance(item[1], RequestQuestion)]
        self.num_waiting -= len(late)
        return late

    def shift_deadlines(self, pause_s: float) -> None:
        """Postpone the journal's deadlines by a pause of the broker."""
        self._asked_at = {request_id: at + pause_s for request_id, at in self._asked_at.items()}

    def take(self, request_id: str) -> list[WaitingMessage]:
        """Remove and return the messages that wait for this answer of the journal."""
        waiting = self._waiting.pop(request_id, [])
        self._asked_at.pop(request_id, None)
        self.num_waiting -= len(waiting)
        return waiting

    def withdraw(self, client: bytes, request_id: str) -> bool:
        """Drop this client's submission and attachments; its questions still get an answer. Return whether it had
        submitted."""
        waiting = self._waiting.get(request_id)
        if waiting is None:
            return False
        mine = [item for item in waiting if item[0] == client and not isinstance(item[1], RequestQuestion)]
        self.num_waiting -= len(mine)
        waiting[:] = [item for item in waiting if item not in mine]
        return any(isinstance(message, Submit) for _, message, _ in mine)

    def drop_authenticated(self, client: bytes) -> None:
        """Drop the authenticated messages of a client that has disconnected. A client with another key may reuse its
        routing id and must not receive these answers."""
        for waiting in self._waiting.values():
            left = [item for item in waiting if item[0] != client or item[2] is None]
            self.num_waiting -= len(waiting) - len(left)
            waiting[:] = left

    def check(self) -> str | None:
        """Return the first broken invariant as text, or None."""
        total = sum(map(len, self._waiting.values()))
        return None if self.num_waiting == total else f"{total} messages wait, counted are {self.num_waiting}"

    def record_dropped(self, request: Request) -> None:
        if request.client is None:
            return
        self.dropped_readers[request.id] = request.client
        while len(self.dropped_readers) > MAX_DROPPED:
            self.dropped_readers.popitem(last=False)


def _replaces(later: RequestMessage, earlier: RequestMessage) -> bool:
    """Whether the earlier message of the same client needs no answer any more. A ``LookUp`` repeated after a reconnect
    has the same number. ``GetRequest`` messages have no number, so each is answered."""
    if type(later) is not type(earlier) or isinstance(later, GetRequest):
        return False
    if isinstance(later, Ack) and isinstance(earlier, Ack):
        return earlier.index == later.index
    return later == earlier if isinstance(later, LookUp) else True


# --- reasons for requests that are not available ---------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RequestRefusal:
    """Reason why a request is not available: ``code`` is a stable name for programs, ``reason`` a text for people."""

    code: str
    reason: str
    retry_after_s: float | None = None


SUPERSEDED = RequestRefusal("superseded", "another client reads this answer now")
_UNKNOWN = RequestRefusal("unknown", "this request is not known: its id is wrong, or it ended too long ago to be kept")
_READ_BY_ANOTHER = RequestRefusal(
    "superseded", "another client has attached to this request and read it to its end, and it is not kept any more"
)
_NOT_KEPT = RequestRefusal(
    "unknown",
    "this request has ended and is not kept any more: a broker without a journal keeps only a few in memory; "
    "one with --state-dir keeps them for journal.keep_s",
)
_NOT_WRITTEN = RequestRefusal(
    "unknown",
    "this request has ended, and its tokens are lost: the journal could not be written for too long, and memory was "
    "full; submit it again to compute the same tokens again",
)


@dataclass(slots=True)
class ForgottenRequests:
    """Ids of requests that are not available and the reason for each; only the latest are kept."""

    # request id -> (tenant, reason)
    _answers: OrderedDict[str, tuple[str, RequestRefusal]] = field(default_factory=OrderedDict)
    # sequence -> (request id, tenant): ended, dropped from memory, not in the journal yet
    _unwritten: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)
    # request id -> number of such sequences by tenant
    _num_unwritten: dict[str, Counter[str]] = field(default_factory=dict)

    def record_read_by_another(self, request: Request) -> None:
        """Note that a client other than the submitter has read the request to its end."""
        self._remember(request.id, request.tenant, _READ_BY_ANOTHER)

    def record_dropped(self, request: Request, *, has_journal: bool) -> None:
        """Note that a request has left memory, perhaps unread."""
        if not has_journal:
            _, answer = self._answers.get(request.id, ("", _NOT_KEPT))
            self._remember(request.id, request.tenant, answer)
            return
        for sequence in request.sequences:
            if not sequence.end_written:
                self._unwritten[sequence.id] = (request.id, request.tenant)
                self._num_unwritten.setdefault(request.id, Counter())[request.tenant] += 1
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._take_unwritten(next(iter(self._unwritten)))

    def record_end(self, sequence: int, *, is_written: bool) -> None:
        """Note that the journal has written the end of a sequence that is not in memory, or never will because its
        tokens are lost."""
        owner = self._take_unwritten(sequence)
        if owner is not None and not is_written:
            self._remember(*owner, _NOT_WRITTEN)

    def _take_unwritten(self, sequence: int) -> tuple[str, str] | None:
        owner = self._unwritten.pop(sequence, None)
        if owner is not None:
            request_id, tenant = owner
            of_tenants = self._num_unwritten[request_id]
            of_tenants[tenant] -= 1
            if not any(of_tenants.values()):
                del self._num_unwritten[request_id]
        return owner

    def refusal_for(
        self, request_id: str, journal_problem: str, account: ClientAccount | None = None
    ) -> RequestRefusal:
        """Return the reason for a request that was not found, or was found without its end."""
        of_tenants = self._num_unwritten.get(request_id, Counter())
        if any(num and can_see(account, tenant) for tenant, num in of_tenants.items()):
            why = journal_problem or "it has a backlog of writes"
            reason = f"the request has ended, and can be read again once the journal has it: {why}"
            return RequestRefusal("journal", reason, RETRY_S)
        tenant, answer = self._answers.get(request_id, ("", _UNKNOWN))
        return answer if can_see(account, tenant) else _UNKNOWN

    def _remember(self, request_id: str, tenant: str, answer: RequestRefusal) -> None:
        self._answers[request_id] = (tenant, answer)
        self._answers.move_to_end(request_id)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
