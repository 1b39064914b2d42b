"""Answers in progress: streams of their parts. Closing one early cancels its request, or leaves it to the broker for
``keep_s``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from swarm.client.stream import PromptStream
from swarm.errors import ClientError
from swarm.gateway.answer import AnswerPart, PromptPart, TokenCounts
from swarm.gateway.completion.assembler import AnswerAssembler
from swarm.gateway.errors import to_api_error


class AnswerStream:
    """Stream of the answer to one prompt of ``num_prompt`` tokens. ``prompt``: these, for their log probabilities.
    ``cancels``: closing it before its end cancels even a request that was made elsewhere."""

    def __init__(
        self,
        stream: PromptStream,
        assembler: AnswerAssembler,
        *,
        num_prompt: int = 0,
        prompt: tuple[int, ...] = (),
        cancels: bool = False,
        on_tokens: Callable[[int], None] | None = None,
    ) -> None:
        self._stream, self._assembler, self._on_tokens = stream, assembler, on_tokens
        if cancels:
            stream.cancel_when_left()
        self.num_prompt, self._num_tokens = num_prompt, 0
        self._prefetched: list[AnswerPart] = []  # parts read by prefetch(), for the next call of next()
        self._prompt = prompt  # empty once its log probabilities were returned
        self._has_failed = False
        self.num_choices = assembler.num_choices

    async def prefetch(self) -> None:
        """Wait for the first parts, and keep them for ``next``. Raises ApiError."""
        self._prefetched = await self.next()

    async def next(self) -> list[AnswerPart]:
        """Return the parts that are available, at least one; empty at the end. Raises ApiError."""
        if self._prefetched:
            parts, self._prefetched = self._prefetched, []
            return parts
        while True:
            try:
                pieces = await self._stream.take_ready()
            except ClientError as error:
                self._has_failed = True
                raise to_api_error(error) from None
            if not pieces:
                return self._end_prompt()
            self._count(sum(piece.token is not None for piece in pieces))
            if parts := [part for piece in pieces for part in self._assembler.add(piece)]:
                return parts

    def _end_prompt(self) -> list[AnswerPart]:
        """Return the prompt's log probabilities at the end, once, if they were requested."""
        completion, (prompt, self._prompt) = self._stream.completion, (self._prompt, ())
        if completion is None or not prompt or not completion.packed_prompt_logprobs:
            return []
        return [PromptPart(choice, prompt, completion) for choice in range(self.num_choices)]

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if num_tokens and self._on_tokens is not None:
            self._on_tokens(num_tokens)

    @property
    def outcome(self) -> str:
        """How the answer ended: "done", "failed", or "left" by its reader before its end."""
        if self._stream.completion is not None:
            return "done"
        return "failed" if self._has_failed else "left"

    def counts(self) -> TokenCounts:
        """Return the token counts of the answer. Only valid at its end."""
        completion = self._stream.completion
        assert completion is not None  # the end was reached
        usage = completion.usage
        timing = completion.timing if completion.choices else None
        return TokenCounts(usage.num_prompt, usage.num_tokens, usage.num_cached, self._assembler.num_reasoning, timing)

    def counts_so_far(self) -> TokenCounts:
        """Return the token counts of the answer so far. Valid at any time."""
        if self._stream.completion is not None:
            return self.counts()
        return TokenCounts(self.num_prompt, self._num_tokens, reasoning=self._assembler.num_reasoning)

    def close(self) -> None:
        """Stop reading."""
        self._stream.close()


class MergedAnswers:
    """The answers to several prompts merged into one, whose choices are numbered prompt by prompt."""

    def __init__(self, answers: Sequence[AnswerStream]) -> None:
        self._answers = answers
        # pending reads, and the index of the answer that each belongs to
        self._pending: dict[asyncio.Future[list[AnswerPart]], int] | None = None
        self._prefetched: list[AnswerPart] = []  # parts read by prefetch(), for the next call of next()
        # each answer's first choice in the merged answer
        self._first_choices = list(accumulate((reading.num_choices for reading in answers), initial=0))
        self.num_choices = self._first_choices.pop()
        self.num_prompt = sum(reading.num_prompt for reading in answers)

    async def prefetch(self) -> None:
        """Wait for the first parts of any answer, and keep them for ``next``. Raises ApiError."""
        self._prefetched = await self.next()

    async def next(self) -> list[AnswerPart]:
        """Return the parts that are available, at least one; empty at the end of all answers. Raises ApiError."""
        if self._prefetched:
            parts, self._prefetched = self._prefetched, []
            return parts
        if self._pending is None:
            self._pending = {self._read_next(index): index for index in range(len(self._answers))}
        while self._pending:
            done, _ = await asyncio.wait(self._pending, return_when=asyncio.FIRST_COMPLETED)
            if parts := [part for future in done for part in self._collect(future, self._pending)]:
                return parts
        return []

    def _read_next(self, index: int) -> asyncio.Future[list[AnswerPart]]:
        return asyncio.ensure_future(self._answers[index].next())

    def _collect(
        self, future: asyncio.Future[list[AnswerPart]], pending: dict[asyncio.Future[list[AnswerPart]], int]
    ) -> list[AnswerPart]:
        index, parts = pending.pop(future), future.result()
        if parts:
            pending[self._read_next(index)] = index
        return [replace(part, choice=part.choice + self._first_choices[index]) for part in parts]

    def counts(self) -> TokenCounts:
        """Return the token counts of all answers. Only valid at the end."""
        return _add_counts([reading.counts() for reading in self._answers])

    def counts_so_far(self) -> TokenCounts:
        """Return the token counts of all answers so far. Valid at any time."""
        return _add_counts([reading.counts_so_far() for reading in self._answers])

    @property
    def outcome(self) -> str:
        """The worst outcome of the answers."""
        outcomes = {reading.outcome for reading in self._answers}
        return next(outcome for outcome in ("failed", "left", "done") if outcome in outcomes)

    def close(self) -> None:
        for future in self._pending or ():
            future.cancel()
        for reading in self._answers:
            reading.close()


def _add_counts(counts: Sequence[TokenCounts]) -> TokenCounts:
    return TokenCounts(
        sum(c.prompt for c in counts),
        sum(c.answer for c in counts),
        sum(c.cached for c in counts),
        sum(c.reasoning for c in counts),
    )
