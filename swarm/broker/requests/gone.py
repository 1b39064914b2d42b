"""What became of requests that are not in memory any more, where asking the journal does not tell.

Without a journal what leaves memory is gone, and so is what the journal's bounds have pushed out. While the journal
can't be written, what leaves memory is not in it yet; and if that lasts, tokens are let go, and never will be. Whoever
asks for such a request is told so. Of a broker before this one nothing is known here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from swarm.broker.requests.intake import RETRY_S, Refusal
from swarm.broker.state import Request
from swarm.broker.state.archive import Account, may_see

MAX_ANSWERS = 4096  # requests of which more can be said than that they are not known
MAX_UNWRITTEN = 1 << 16  # sequences; while the journal can't be written nobody is let in, so there are hardly more

SUPERSEDED = Refusal("superseded", "another client has attached to this request and reads it now")
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
        """What is told of a request that is found nowhere, or without its end."""
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
