"""Verification of a row's proposals: which of its draws count, in what order, and what they yield.

A job without proposals has one draw. A job with ``k`` proposals has up to ``k + 1``: draw ``n`` is after the first
``n`` proposals, and is reached if all draws before it equal their proposals and none ends the answer. A draw that is
not reached has no effect, whatever its logits are.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, overload

import numpy as np

from swarm.stage.executor import SampleJob, is_end_token

if TYPE_CHECKING:
    from numpy.typing import DTypeLike, NDArray

    from swarm.stage.engine.sampling import SampledToken


class SharedTokens:
    """Tokens of a history, converted to an array once for all draws that need one."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self.tokens = tokens
        self._array: NDArray[np.int64] | None = None

    @property
    def array(self) -> NDArray[np.int64]:
        if self._array is None:
            self._array = np.asarray(self.tokens, np.int64)
        return self._array


class TokenPrefix(Sequence[int]):
    """The first ``stop`` tokens of a history, without a copy."""

    def __init__(self, shared: SharedTokens, stop: int) -> None:
        self._shared, self._stop = shared, stop

    def __len__(self) -> int:
        return self._stop

    @overload
    def __getitem__(self, index: int) -> int: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[int]: ...

    def __getitem__(self, index: int | slice) -> int | Sequence[int]:
        if isinstance(index, slice):
            return self._shared.tokens[slice(*index.indices(self._stop))]
        return self._shared.tokens[range(self._stop)[index]]

    def __array__(self, dtype: DTypeLike | None = None, copy: bool | None = None) -> NDArray[np.int64]:
        return np.array(self._shared.array[: self._stop], dtype, copy=copy)


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of a job: its row among the logits, and the job without the proposals behind it."""

    verification: Verification
    row: int
    job: SampleJob


@dataclass(slots=True)
class Verification:
    """The draws of one job, in order."""

    job: SampleJob
    sequence: int
    first_row: int  # row of the job's first draw among the logits
    eos_token_ids: Sequence[int]
    tokens: list[SampledToken] = field(default_factory=list)  # drawn so far
    failure: str = ""  # why the next token can't be drawn
    is_late: bool = False  # the first draw waits for the grammar
    is_closed: bool = False  # no further draw is reached
    _proposals: Sequence[int] = ()
    _shared: SharedTokens | None = None

    def __post_init__(self) -> None:
        if self.job.num_proposed:
            self._proposals = self.job.history[self.job.num_certain :]
            self._shared = SharedTokens(self.job.history)

    @property
    def position(self) -> int:
        """Position of the next token to be drawn."""
        return self.job.num_certain + len(self.tokens)

    @property
    def num_accepted(self) -> int:
        """Number of accepted proposals after which a token was drawn, or should have been."""
        return len(self.tokens) if self.failure else max(0, len(self.tokens) - 1)

    def draw(self, number: int) -> Draw:
        """Return the draw after the first ``number`` proposals."""
        job = self.job
        if self._shared is not None:
            history = TokenPrefix(self._shared, job.num_certain + number)
            job = SampleJob(job.row, job.params, job.seed, history, job.num_prompt)
        return Draw(self, self.first_row + number, job)

    def next_draws(self) -> Iterator[Draw]:
        """Yield the draws that can be computed now: with a grammar or thinking only the next one, whose mask depends on
        the accepted tokens; else all, since none depends on another's result."""
        if self.is_closed:
            return
        first = len(self.tokens)
        stop = 1 + (first if self.job.params.has_rules else len(self._proposals))
        yield from (self.draw(number) for number in range(first, stop))

    def add(self, token: SampledToken) -> None:
        """Record the next draw's token."""
        place = len(self.tokens)
        self.tokens.append(token)
        is_accepted = place < len(self._proposals) and token.token == self._proposals[place]
        self.is_closed = not is_accepted or is_end_token(token.token, self.job.params, self.eos_token_ids)

    def fail(self, reason: str) -> None:
        """Record that the next token can't be drawn."""
        self.failure, self.is_closed = reason, True

    def delay(self) -> None:
        """Record that the next token is drawn in a later step."""
        self.is_late = self.is_closed = True
