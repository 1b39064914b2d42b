"""What became of requests that are not in memory any more, where asking the journal does not tell.

Without a journal what leaves memory is gone, and so is what the journal's bounds have pushed out. While the journal
can't be written, what leaves memory is not in it yet; and if that lasts, tokens are let go, and never will be. Whoever
asks for such a request is told so. Of a broker before this one nothing is known here.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

from swarm.broker.requests.admission import Refusal
from swarm.broker.state import Request

RETRY_S = 5.0  # a disk that is full is made room on by people
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
    """Ids of requests, and what to say of them; the latest ones."""

    _answers: OrderedDict[str, Refusal] = field(default_factory=OrderedDict)
    _unwritten: OrderedDict[int, str] = field(default_factory=OrderedDict)  # by their sequences
    _num_unwritten: Counter[str] = field(default_factory=Counter)

    def read_by_another(self, request_id: str) -> None:
        """Than its submitter, and to its end."""
        self._note(request_id, _READ)

    def dropped(self, request: Request, *, has_journal: bool) -> None:
        """It has left memory, perhaps unread."""
        if not has_journal:
            self._note(request.id, self._answers.get(request.id, _NOT_KEPT))
            return
        for sequence in request.sequences:
            if not sequence.end_written:
                self._unwritten[sequence.id] = request.id
                self._num_unwritten[request.id] += 1
        while len(self._unwritten) > MAX_UNWRITTEN:
            self._settle(next(iter(self._unwritten)))

    def settled(self, sequence: int, *, is_written: bool) -> None:
        """The journal has taken the end of a sequence that is not in memory; or not, for want of its tokens."""
        request_id = self._settle(sequence)
        if request_id is not None and not is_written:
            self._note(request_id, _NOT_WRITTEN)

    def _settle(self, sequence: int) -> str | None:
        request_id = self._unwritten.pop(sequence, None)
        if request_id is not None:
            self._num_unwritten[request_id] -= 1
            if not self._num_unwritten[request_id]:
                del self._num_unwritten[request_id]
        return request_id

    def answer(self, request_id: str, journal_problem: str) -> Refusal:
        """What is told of a request that is found nowhere, or without its end."""
        if request_id in self._num_unwritten:
            why = journal_problem or "it has much to write"
            reason = f"the request has ended, and can be read again once the journal has it: {why}"
            return Refusal("journal", reason, RETRY_S)
        return self._answers.get(request_id, _UNKNOWN)

    def _note(self, request_id: str, answer: Refusal) -> None:
        self._answers[request_id] = answer
        self._answers.move_to_end(request_id)
        while len(self._answers) > MAX_ANSWERS:
            self._answers.popitem(last=False)
