"""Worth of a draft model's proposals: what they cost in time, and how many of their tokens are accepted. Pure.

A sequence that waits for a proposal of k tokens takes a cycle of a request to the draft model, k of its passes and a
step with k more rows; it gains 1 + a + a² + … + a^k tokens, where a is the share of proposed tokens that the stages
draw too. A proposal pays where the tokens per second of this cycle exceed those of a step without it.

The draft model gives the probability of each token. How often tokens of a class of probabilities are accepted is
counted here, so that a proposal ends where its next token is not worth its time: while that token takes ``pass_s +
row_s``, the cycle draws ``rate`` tokens per second anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from swarm.wire.draft_messages import NUM_CLASSES, class_of

MAX_DEPTH = 16  # tokens of a proposal
PRIOR_ACCEPTANCE = 0.75  # assumed until it is measured
PRIOR_WEIGHT = 4.0  # tokens
MEMORY = 256.0  # tokens of a class after which older ones fade
MIN_GAIN = 1.02  # ratio of tokens per second from which proposals are worth asking for
SEQUENCE_WEIGHT = 0.05  # weight of a token in the acceptance of its sequence
_TIME_WEIGHT = 0.2  # weight of the newest request in averages of times
MAX_LEAST = 0.8  # a proposal with this acceptance goes on in any case


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
    """Whether a proposal is worth asking for, and when it ends. ``least`` and ``least_kept``: the probability of
    acceptance below which no further token is drafted, and below which a drafted token is not proposed."""

    gain: float  # tokens per second in relation to a step without a proposal
    least: float
    least_kept: float

    @property
    def is_worthwhile(self) -> bool:
        return self.gain >= MIN_GAIN


@dataclass(slots=True)
class DraftCosts:
    """Measured times and acceptance of a draft model."""

    ask_s: float = 0.0  # time of a request besides the passes
    pass_s: float = 0.0  # time of a pass
    num_measured: int = 0  # requests
    total: _Share = field(default_factory=_Share)
    classes: list[_Share] = field(default_factory=lambda: [_Share() for _ in range(NUM_CLASSES)])

    def record_request(self, passes: int, compute_s: float, round_trip_s: float) -> None:
        """Record the times of a request with at least one pass."""
        self.num_measured += 1
        weight = max(_TIME_WEIGHT, 1 / self.num_measured)
        self.ask_s += weight * (max(0.0, round_trip_s - compute_s) - self.ask_s)
        self.pass_s += weight * (compute_s / passes - self.pass_s)

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

    def expected_s(self, depth: int) -> float:
        """Return the expected time of a request for ``depth`` tokens per sequence; 0 before the first one."""
        return self.ask_s + depth * self.pass_s if self.num_measured else 0.0

    def plan(self, num_rows: int, acceptance: float, most: int, step_s: Callable[[int], float | None]) -> DraftPlan:
        """Return what proposals are worth in steps with this number of sequences. ``step_s``: expected time of a step
        with this number of rows; None: not measured yet."""
        plain_s = step_s(num_rows)
        if not plain_s or not self.num_measured:
            return DraftPlan(MIN_GAIN, 0.0, 0.0)  # measure it
        acceptance = min(0.99, max(0.01, acceptance))
        best_rate, tokens = 0.0, 1.0
        for depth in range(1, min(most, MAX_DEPTH) + 1):
            tokens += acceptance**depth
            whole_s = self.expected_s(depth) + (step_s(num_rows * (1 + depth)) or plain_s)
            best_rate = max(best_rate, tokens / whole_s)
        row_s = max(0.0, (step_s(2 * num_rows) or plain_s) - plain_s)  # one more row of each sequence
        rate = max(best_rate, 1 / plain_s)
        return DraftPlan(
            best_rate * plain_s, min(MAX_LEAST, (self.pass_s + row_s) * rate), min(MAX_LEAST, row_s * rate)
        )
