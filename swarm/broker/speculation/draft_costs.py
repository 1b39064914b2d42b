"""Worth of a draft model's proposals: what they cost in time, and how many of their tokens are accepted. Pure.

A step whose sequences wait for proposals of k tokens takes a request to the draft model, k of its passes and k more
rows for each of these sequences; each gains 1 + a + a² + … + a^k tokens, where a is the share of proposed tokens that
the stages draw too. Proposals pay where the tokens per second of all sequences of the step exceed those of a step
without proposals.

The draft model gives the probability of each token. How often tokens of a class of probabilities are accepted is
counted here, so that a proposal ends where its next token is not worth its time, in which the swarm draws other tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import median

from swarm.wire.draft_messages import NUM_CLASSES, class_of

MAX_DEPTH = 16  # tokens of a proposal
MIN_GAIN = 1.02  # ratio of tokens per second from which proposals are worth asking for
NUM_TIMES = 9  # requests whose median time counts; single slow ones do not
MIN_TIMES = 3  # requests that are measured in any case
PRIOR_ACCEPTANCE = 0.75  # assumed until it is measured
PRIOR_WEIGHT = 4.0  # tokens
MEMORY = 256.0  # tokens of a class after which older ones fade
MAX_LEAST = 0.8  # a proposal with this acceptance goes on in any case

StepTime = Callable[[int], float | None]  # expected time of a step with this number of rows; None: not measured yet


@dataclass(slots=True)
class _Share:
    """Share of accepted tokens, in which older tokens fade."""

    accepted: float = PRIOR_ACCEPTANCE * PRIOR_WEIGHT
    num: float = PRIOR_WEIGHT

    def add(self, *, is_accepted: bool) -> None:
        fade = 1 - 1 / MEMORY
        self.accepted = self.accepted * fade + is_accepted
        self.num = self.num * fade + 1

    @property
    def value(self) -> float:
        return self.accepted / self.num


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """Whether proposals for a step are worth asking for, and when they end. ``least`` and ``least_kept``: the
    probability of acceptance below which no further token is drafted, and below which a drafted one is not proposed."""

    gain: float  # tokens per second in relation to a step without proposals
    least: float = 0.0
    least_kept: float = 0.0

    @property
    def is_worthwhile(self) -> bool:
        return self.gain >= MIN_GAIN


@dataclass(slots=True)
class DraftCosts:
    """Measured times and acceptance of a draft model."""

    total: _Share = field(default_factory=_Share)
    classes: list[_Share] = field(default_factory=lambda: [_Share() for _ in range(NUM_CLASSES)])
    _asks: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))
    _passes: deque[float] = field(default_factory=lambda: deque(maxlen=NUM_TIMES))

    def record_request(self, passes: int, compute_s: float, round_trip_s: float) -> None:
        """Record the times of a request with at least one pass."""
        self._asks.append(max(0.0, round_trip_s - compute_s))
        self._passes.append(compute_s / passes)

    def record_tokens(self, logprobs: Sequence[float], num_accepted: int) -> None:
        """Record which tokens of a proposal were accepted: the first ones, and the next one not."""
        for index, logprob in enumerate(logprobs[: num_accepted + 1]):
            is_accepted = index < num_accepted
            self.total.add(is_accepted=is_accepted)
            self.classes[class_of(logprob)].add(is_accepted=is_accepted)

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Acceptance by class of the log probability."""
        return tuple(share.value for share in self.classes)

    @property
    def ask_s(self) -> float:
        """Usual time of a request besides the passes; 0 before the first one."""
        return median(self._asks) if self._asks else 0.0

    @property
    def pass_s(self) -> float:
        """Usual time of a pass; 0 before the first request."""
        return median(self._passes) if self._passes else 0.0

    def expected_s(self, depth: int) -> float:
        """Return the expected time of a request for ``depth`` tokens per sequence; 0 before the first one."""
        return self.ask_s + depth * self.pass_s

    def plan(self, num_rows: int, num_drafted: int, acceptance: float, step_s: StepTime) -> DraftPlan:
        """Return what proposals for some of a step's sequences are worth; ``acceptance``: the mean of theirs."""
        plain_s = step_s(num_rows)
        if not plain_s or len(self._asks) < MIN_TIMES:
            return DraftPlan(MIN_GAIN)  # measure it
        best_rate, gained, next_gain = 0.0, 0.0, 1.0
        for depth in range(1, MAX_DEPTH + 1):
            next_gain *= acceptance
            gained += next_gain
            seconds = self.expected_s(depth) + (step_s(num_rows + num_drafted * depth) or plain_s)
            best_rate = max(best_rate, (num_rows + num_drafted * gained) / seconds)
        # A pass and a row of each sequence take the time of ``rate`` tokens, and give each sequence one at most.
        row_s = max(0.0, (step_s(num_rows + num_drafted) or plain_s) - plain_s)
        rate = max(best_rate, num_rows / plain_s) / num_drafted
        least, least_kept = (min(MAX_LEAST, seconds * rate) for seconds in (self.pass_s + row_s, row_s))
        return DraftPlan(best_rate * plain_s / num_rows, least, least_kept)
