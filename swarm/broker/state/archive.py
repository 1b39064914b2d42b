"""What the broker keeps of requests that have ended, and what it asks the journal for.

With a journal, memory is for those that are being read now: an ended request that is dropped here is read again when
somebody asks for it. Without one, what is dropped is gone. Either way, ended requests hold no more memory than the
bounds below, whatever their clients do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field

from swarm.broker.state.sequences import Request
from swarm.wire.messages import Ack, Attach, Recall, Submit

# Of ended requests, together: as many as a busy minute makes, and some 20 MB (a token takes about 40 bytes, counted as
# one; an alternative of its log-probabilities three times that, a hop eight times).
MAX_KEPT = 1024
MAX_KEPT_WEIGHT = 1 << 19
LOGPROB_WEIGHT = 3
HOP_WEIGHT = 8

MAX_ASKED = 4096  # messages that wait for the journal
MAX_PER_REQUEST = 16  # of them about one request: more readers than that at a time have no business with it
MAX_DROPPED = 4096  # ids; a reader whose request is not among them attaches by itself after a while

About = Submit | Attach | Ack | Recall


def weight_of(request: Request) -> int:
    """The memory that a request takes, in tokens."""
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
        """There is too much; the newest stays in any case."""
        return len(self.weights) > MAX_KEPT or (self.weight > MAX_KEPT_WEIGHT and len(self.weights) > 1)

    def oldest(self) -> Iterator[str]:
        """All but the newest; they may be removed meanwhile."""
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
    _asked: dict[str, list[tuple[bytes, About]]] = field(default_factory=dict)
    _num_asked: int = 0

    def ask(self, client: bytes, message: About) -> bool | None:
        """True: it is the first about this request, which is to be read now; False: it waits with others; None: there
        is no room for it. What the same client said before of the same kind is out of date."""
        request_id = message.request_id
        waiting = self._asked.get(request_id, [])
        for place, (who, earlier) in enumerate(waiting):
            if who == client and type(earlier) is type(message) and _same_part(earlier, message):
                waiting[place] = (client, message)
                return False
        if self._num_asked >= MAX_ASKED or len(waiting) >= MAX_PER_REQUEST:
            return None
        self._asked[request_id] = waiting
        waiting.append((client, message))
        self._num_asked += 1
        return len(waiting) == 1

    def take(self, request_id: str) -> list[tuple[bytes, About]]:
        """The journal has answered."""
        waiting = self._asked.pop(request_id, [])
        self._num_asked -= len(waiting)
        return waiting

    def withdraw(self, client: bytes, request_id: str) -> bool:
        """This client wants nothing of it any more. Whether it had submitted it."""
        waiting = self._asked.get(request_id)
        if waiting is None:
            return False
        mine = [message for who, message in waiting if who == client]
        self._num_asked -= len(mine)
        waiting[:] = [item for item in waiting if item[0] != client]
        return any(isinstance(message, Submit) for message in mine)

    def check(self) -> str | None:
        """Return which rule it breaks, if any."""
        total = sum(map(len, self._asked.values()))
        return None if self._num_asked == total else f"{total} messages wait, and {self._num_asked} are counted"

    def note_dropped(self, request: Request) -> None:
        if request.client is None:
            return
        self.dropped[request.id] = request.client
        while len(self.dropped) > MAX_DROPPED:
            self.dropped.popitem(last=False)


def _same_part(earlier: About, later: About) -> bool:
    return not isinstance(earlier, Ack) or not isinstance(later, Ack) or earlier.index == later.index
