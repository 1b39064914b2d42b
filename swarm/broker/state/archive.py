"""What the broker keeps of requests that have ended, and what it asks the journal for.

With a journal, memory is for those that are being read now: an ended request that is dropped here is read again when
somebody asks for it. Without one, what is dropped is gone. Either way, ended requests hold no more memory than the
bounds below, whatever their clients do.

``Gone`` knows what became of requests that are not in memory any more, where asking the journal does not tell. Without
a journal what leaves memory is gone, and so is what the journal's bounds have pushed out. While the journal can't be
written, what leaves memory is not in it yet; and if that lasts, tokens are let go, and never will be. Whoever asks for
such a request is told so. Of a broker before this one nothing is known here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.broker.state.sequences import Request
from swarm.wire.messages import Ack, Attach, LookUp, Recall, Submit

# Of ended requests, together: as many as a busy minute makes, and some 20 MB (a token takes about 40 bytes, counted as
# one; an alternative of its log-probabilities three times that, a hop eight times).
MAX_KEPT = 1024
MAX_KEPT_WEIGHT = 1 << 19
LOGPROB_WEIGHT = 3
HOP_WEIGHT = 8

MAX_ASKED = 4096  # messages that wait for the journal
MAX_PER_REQUEST = 256  # of them about one request
PATIENCE_S = 5.0  # for the journal, until a question is told that it is slow: less than any client waits
MAX_DROPPED = 4096  # ids; a reader whose request is not among them attaches by itself after a while

RETRY_S = 5.0  # a disk that is full is made room on by people
MAX_ANSWERS = 4096  # requests of which more can be said than that they are not known
MAX_UNWRITTEN = 1 << 16  # sequences; while the journal can't be written nobody is let in, so there are hardly more

Question = Recall | LookUp  # these only read
About = Submit | Attach | Ack | Question


@dataclass(frozen=True, slots=True)
class Account:
    """On whose account a client speaks, where doors go by keys: what it says of itself does not count.
    ``may_name_tenants``: it speaks for others, and has one tenant for each name that it gives (a gateway). No key's
    name has a "/" in it, so nobody else's tenant can begin like one of its own."""

    tenant: str
    may_name_tenants: bool = False

    def tenant_of(self, named: str) -> str:
        """On whose account a request is computed whose client named this tenant, or none."""
        return f"{self.tenant}/{named}" if named and self.may_name_tenants else self.tenant

    def owns(self, tenant: str) -> bool:
        """Whether what is on this tenant's account is its own."""
        return tenant == self.tenant or (self.may_name_tenants and tenant.startswith(f"{self.tenant}/"))


def may_see(account: Account | None, tenant: str) -> bool:
    """Whether a request of this tenant exists for who speaks on this account; without one, all do."""
    return account is None or account.owns(tenant)


Asked = tuple[bytes, About, Account | None]  # who said what, on whose account


def weight_of(request: Request) -> int:
    """Weigh a request by the memory that it takes, in tokens."""
    wanted = request.submit.params.logprobs
    each = 1 + (0 if wanted is None else LOGPROB_WEIGHT * (1 + wanted))
    total = len(request.submit.prompt)
    for sequence in request.sequences:
        total += sequence.num_prompt + each * sequence.num_generated + HOP_WEIGHT * sum(map(len, sequence.hops))
    return total


@dataclass(slots=True)
class Shelf:
    """Ended requests in memory, in the order of their ends (or of their return)."""

    weights: OrderedDict[str, int] = field(default_factory=OrderedDict)
    weight: int = 0

    def add(self, request: Request) -> None:
        self.remove(request.id)
        self.weights[request.id] = weight_of(request)
        self.weight += self.weights[request.id]

    def remove(self, request_id: str) -> None:
        self.weight -= self.weights.pop(request_id, 0)

    @property
    def is_over(self) -> bool:
        """Is there too much? The newest stays in any case."""
        return len(self.weights) > MAX_KEPT or (self.weight > MAX_KEPT_WEIGHT and len(self.weights) > 1)

    def oldest(self) -> Iterator[str]:
        """Yield all but the newest, the oldest first; they may be removed meanwhile."""
        return iter(list(self.weights)[:-1])

    def check(self) -> str | None:
        """Return which rule it breaks, if any."""
        total = sum(self.weights.values())
        return None if self.weight == total else f"ended requests weigh {total}, and {self.weight} is counted"


@dataclass(slots=True)
class Archive:
    """Messages about requests that are not in memory, until the journal was asked. ``dropped``: which requests left
    memory while somebody was reading them, and at which reader."""

    dropped: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    _asked: dict[str, list[Asked]] = field(default_factory=dict)
    num_asked: int = 0
    _asked_at: dict[str, float] = field(default_factory=dict)  # when the journal was asked

    def ask(self, client: bytes, message: About, account: Account | None = None, *, now: float = 0.0) -> bool | None:
        """True: it is the first about this request, which is to be read now; False: it waits with others; None: there
        is no room for it. What the same client said before of the same kind is out of date. But each question gets an
        answer of its own."""
        request_id = message.request_id
        waiting = self._asked.get(request_id, [])
        for place, (who, earlier, _) in enumerate(waiting):
            if who == client and _replaces(message, earlier):
                waiting[place] = (client, message, account)
                return False
        if max(self.num_asked, len(self._asked)) >= MAX_ASKED or len(waiting) >= MAX_PER_REQUEST:
            return None
        self._asked[request_id] = waiting
        waiting.append((client, message, account))
        self.num_asked += 1
        if request_id in self._asked_at:
            return False
        self._asked_at[request_id] = now
        return True

    def only_questions(self, request_id: str) -> bool:
        """Whether nobody waits for the journal but to read."""
        return all(isinstance(message, Question) for _, message, _ in self._asked.get(request_id, []))

    def overdue(self, now: float) -> list[tuple[bytes, Question]]:
        """Hand over the questions about requests that the journal is too slow to find."""
        late: list[tuple[bytes, Question]] = []
        for request_id, asked_at in self._asked_at.items():
            waiting = self._asked[request_id]
            if now - asked_at >= PATIENCE_S and waiting:
                late += [(client, message) for client, message, _ in waiting if isinstance(message, Question)]
                waiting[:] = [item for item in waiting if not isinstance(item[1], Question)]
        self.num_asked -= len(late)
        return late

    def forgive(self, pause_s: float) -> None:
        """Give the journal more time, by a pause of the broker."""
        self._asked_at = {request_id: at + pause_s for request_id, at in self._asked_at.items()}

    def take(self, request_id: str) -> list[Asked]:
        """Hand over who waits for this answer of the journal."""
        waiting = self._asked.pop(request_id, [])
        self._asked_at.pop(request_id, None)
        self.num_asked -= len(waiting)
        return waiting

    def withdraw(self, client: bytes, request_id: str) -> bool:
        """Forget that this client wants to submit or to read it; whoever asked through the same client still gets an
        answer. Returns whether it had submitted it."""
        waiting = self._asked.get(request_id)
        if waiting is None:
            return False
        mine = [item for item in waiting if item[0] == client and not isinstance(item[1], Question)]
        self.num_asked -= len(mine)
        waiting[:] = [item for item in waiting if item not in mine]
        return any(isinstance(message, Submit) for _, message, _ in mine)

    def withdraw_keyed(self, client: bytes) -> None:
        """This client is gone, and somebody with another key may come by its routing id: what it asked for on an
        account is not told to that one."""
        for waiting in self._asked.values():
            left = [item for item in waiting if item[0] != client or item[2] is None]
            self.num_asked -= len(waiting) - len(left)
            waiting[:] = left

    def check(self) -> str | None:
        """Return which rule it breaks, if any."""
        total = sum(map(len, self._asked.values()))
        return None if self.num_asked == total else f"{total} messages wait, and {self.num_asked} are counted"

    def note_dropped(self, request: Request) -> None:
        if request.client is None:
            return
        self.dropped[request.id] = request.client
        while len(self.dropped) > MAX_DROPPED:
            self.dropped.popitem(last=False)


def _replaces(later: About, earlier: About) -> bool:
    """Whether the earlier message of the same client needs no answer any more. A look-up that is said again, after the
    connection broke, has the same number; recalls have none, so each is answered."""
    if type(later) is not type(earlier) or isinstance(later, Recall):
        return False
    if isinstance(later, Ack) and isinstance(earlier, Ack):
        return earlier.index == later.index
    return later == earlier if isinstance(later, LookUp) else True


# --- what is told of those that are nowhere --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Refusal:
    """``code`` is a stable name for programs, ``reason`` a sentence for people."""

    code: str
    reason: str
    retry_after_s: float | None = None


SUPERSEDED = Refusal("superseded", "somebody else reads this answer now")
_UNKNOWN = Refusal("unknown", "this request is not known: its id is wrong, or it ended too long ago to be kept")
_READ = Refusal(
    "superseded", "another client has attached to this request and read it to its end, and it is not kept any more"
)
_NOT_KEPT = Refusal(
    "unknown",
    "this request has ended and is not kept any more: a broker without a journal has room for a few in memory only; "
    "one with --state-dir keeps them for journal.keep_s",
)
_NOT_WRITTEN = Refusal(
    "unknown",
    "this request has ended, and its tokens are lost: for too long the journal could not be written, and memory had no "
    "more room for them; submit it again, and the same are computed again",
)


@dataclass(slots=True)
class Gone:
    """Ids of requests, and what to say of them to whom they are known; the latest ones."""

    _answers: OrderedDict[str, tuple[str, Refusal]] = field(default_factory=OrderedDict)  # with the tenant
    _unwritten: OrderedDict[int, tuple[str, str]] = field(default_factory=OrderedDict)  # id and tenant by sequence
    _num_unwritten: dict[str, Counter[str]] = field(default_factory=dict)  # by id and tenant

    def read_by_another(self, request: Request) -> None:
        """Than its submitter, and to its end."""
        self._note(request.id, request.tenant, _READ)

    def dropped(self, request: Request, *, has_journal: bool) -> None:
        """Note what has left memory, perhaps unread."""
        if not has_journal:
            _, answer = self._answers.get(request.id, ("", _NOT_KEPT))
            self._note(request.id, request.tenant, answer)
            return
        for sequence in request.sequences:
            if not sequence.end_written:
                self._unwritten[sequence.id] = (request.id, request.tenant)
                self._num_unwritten.setdefault(request.id, Counter())[request.tenant] += 1
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._settle(next(iter(self._unwritten)))

    def settled(self, sequence: int, *, is_written: bool) -> None:
        """The journal has taken the end of a sequence that is not in memory; or not, for want of its tokens."""
        whose = self._settle(sequence)
        if whose is not None and not is_written:
            self._note(*whose, _NOT_WRITTEN)

    def _settle(self, sequence: int) -> tuple[str, str] | None:
        whose = self._unwritten.pop(sequence, None)
        if whose is not None:
            request_id, tenant = whose
            of_tenants = self._num_unwritten[request_id]
            of_tenants[tenant] -= 1
            if not any(of_tenants.values()):
                del self._num_unwritten[request_id]
        return whose

    def answer(self, request_id: str, journal_problem: str, account: Account | None = None) -> Refusal:
        """Say what is told of a request that is found nowhere, or without its end."""
        of_tenants = self._num_unwritten.get(request_id, Counter())
        if any(num and may_see(account, tenant) for tenant, num in of_tenants.items()):
            why = journal_problem or "it has much to write"
            reason = f"the request has ended, and can be read again once the journal has it: {why}"
            return Refusal("journal", reason, RETRY_S)
        tenant, answer = self._answers.get(request_id, ("", _UNKNOWN))
        return answer if may_see(account, tenant) else _UNKNOWN

    def _note(self, request_id: str, tenant: str, answer: Refusal) -> None:
        self._answers[request_id] = (tenant, answer)
        self._answers.move_to_end(request_id)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
