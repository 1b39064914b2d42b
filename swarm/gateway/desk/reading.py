"""Answers in progress: streams of their parts. Closing one early cancels its request, or leaves it to the broker for
``keep_s``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import accumulate

from swarm.client.stream import PromptStream
from swarm.errors import ClientError
from swarm.gateway.answer import Counts, Part
from swarm.gateway.desk.parts import Parts
from swarm.gateway.errors import problem_of


class Reading:
    """Stream of the answer to one prompt of ``num_prompt`` tokens. ``cancels``: closing it before its end cancels even
    a request that was made elsewhere."""

    def __init__(
        self,
        stream: PromptStream,
        parts: Parts,
        *,
        num_prompt: int = 0,
        cancels: bool = False,
        told: Callable[[int], None] | None = None,
    ) -> None:
        self._stream, self._parts, self._cancels, self._told = stream, parts, cancels, told
        self.num_prompt, self._num_tokens = num_prompt, 0
        self._ahead: list[Part] = []  # parts read by look(), for the next call of next()
        self._failed = False
        self.num_choices = parts.num_choices

    async def look(self) -> None:
        """Wait for the first parts, and keep them for ``next``. Raises ApiError."""
        self._ahead = await self.next()

    async def next(self) -> list[Part]:
        """Return the parts that are available, at least one; empty at the end. Raises ApiError."""
        if self._ahead:
            parts, self._ahead = self._ahead, []
            return parts
        while True:
            try:
                pieces = await self._stream.take_ready()
            except ClientError as error:
                self._failed = True
                raise problem_of(error) from None
            if not pieces:
                return []
            self._count(sum(piece.token is not None for piece in pieces))
            if parts := [part for piece in pieces for part in self._parts.take(piece)]:
                return parts

    def _count(self, num_tokens: int) -> None:
        self._num_tokens += num_tokens
        if num_tokens and self._told is not None:
            self._told(num_tokens)

    @property
    def outcome(self) -> str:
        """How the answer ended: "done", "failed", or "left" by its reader before its end."""
        if self._stream.completion is not None:
            return "done"
        return "failed" if self._failed else "left"

    def counts(self) -> Counts:
        """Return the token counts of the answer. Only valid at its end."""
        completion = self._stream.completion
        assert completion is not None  # the end was reached
        usage = completion.usage
        return Counts(usage.num_prompt, usage.num_tokens, usage.num_cached)

    def so_far(self) -> Counts:
        """Return the token counts of the answer so far. Valid at any time."""
        if self._stream.completion is not None:
            return self.counts()
        return Counts(self.num_prompt, self._num_tokens)

    def close(self) -> None:
        """Stop reading."""
        self._stream.close(cancel=self._cancels)


class Lot:
    """The answers to several prompts merged into one: the choices of each prompt follow those of the previous one."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings
        # pending reads, and the index of the answer that each belongs to
        self._waiting: dict[asyncio.Future[list[Part]], int] | None = None
        self._ahead: list[Part] = []  # parts read by look(), for the next call of next()
        # each answer's first choice in the merged answer
        self._firsts = list(accumulate((reading.num_choices for reading in readings), initial=0))
        self.num_choices = self._firsts.pop()
        self.num_prompt = sum(reading.num_prompt for reading in readings)

    async def look(self) -> None:
        """Wait for the first parts of any answer, and keep them for ``next``. Raises ApiError."""
        self._ahead = await self.next()

    async def next(self) -> list[Part]:
        """Return the parts that are available, at least one; empty at the end of all answers. Raises ApiError."""
        if self._ahead:
            parts, self._ahead = self._ahead, []
            return parts
        if self._waiting is None:
            self._waiting = {self._ask(index): index for index in range(len(self._readings))}
        while self._waiting:
            done, _ = await asyncio.wait(self._waiting, return_when=asyncio.FIRST_COMPLETED)
            if parts := [part for future in done for part in self._take(future, self._waiting)]:
                return parts
        return []

    def _ask(self, index: int) -> asyncio.Future[list[Part]]:
        return asyncio.ensure_future(self._readings[index].next())

    def _take(self, future: asyncio.Future[list[Part]], waiting: dict[asyncio.Future[list[Part]], int]) -> list[Part]:
        index, parts = waiting.pop(future), future.result()
        if parts:
            waiting[self._ask(index)] = index
        return [replace(part, choice=part.choice + self._firsts[index]) for part in parts]

    def counts(self) -> Counts:
        """Return the token counts of all answers. Only valid at the end."""
        return _sum([reading.counts() for reading in self._readings])

    def so_far(self) -> Counts:
        """Return the token counts of all answers so far. Valid at any time."""
        return _sum([reading.so_far() for reading in self._readings])

    @property
    def outcome(self) -> str:
        """The worst outcome of the answers."""
        outcomes = {reading.outcome for reading in self._readings}
        return next(outcome for outcome in ("failed", "left", "done") if outcome in outcomes)

    def close(self) -> None:
        for future in self._waiting or ():
            future.cancel()
        for reading in self._readings:
            reading.close()


def _sum(each: Sequence[Counts]) -> Counts:
    return Counts(sum(c.prompt for c in each), sum(c.answer for c in each), sum(c.cached for c in each))
