"""Answers under way: their parts, as they come. Whoever closes one early cancels its request."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace

from swarm.client.stream import PromptStream
from swarm.errors import ClientError
from swarm.gateway.answer import Counts, Part
from swarm.gateway.desk.parts import Parts
from swarm.gateway.errors import Problem, problem_of


class Reading:
    """The answer to one prompt, which has ``num_prompt`` tokens."""

    def __init__(self, stream: PromptStream, parts: Parts, num_prompt: int) -> None:
        self._stream, self._parts, self.num_prompt = stream, parts, num_prompt
        self._ahead: list[Part] = []
        self.num_choices = parts.num_choices

    async def look(self) -> None:
        """Wait for the first parts, and keep them for ``next``. Raises Problem."""
        self._ahead = await self.next()

    async def next(self) -> list[Part]:
        """The parts that are there, at least one; empty at the end. Raises Problem."""
        if self._ahead:
            parts, self._ahead = self._ahead, []
            return parts
        while True:
            try:
                pieces = await self._stream.take_ready()
            except ClientError as error:
                raise problem_of(error) from None
            if not pieces:
                return []
            if parts := [part for piece in pieces for part in self._parts.take(piece)]:
                return parts

    def counts(self) -> Counts:
        """Count the tokens. Only at the end."""
        completion = self._stream.completion
        assert completion is not None  # the end was reached
        return Counts(completion.usage.num_prompt, completion.usage.num_tokens)

    def close(self) -> None:
        self._stream.close()


class Lot:
    """The answers to several prompts as one: the choices of each follow on those of the one before."""

    def __init__(self, readings: Sequence[Reading]) -> None:
        self._readings = readings
        self._queue: asyncio.Queue[list[Part] | Problem | None] = asyncio.Queue(maxsize=len(readings))
        self._tasks: list[asyncio.Task[None]] = []
        self._open = len(readings)
        self._ahead: list[Part] = []
        self.num_choices = sum(reading.num_choices for reading in readings)
        self.num_prompt = sum(reading.num_prompt for reading in readings)

    async def look(self) -> None:
        first = 0
        for reading in self._readings:
            self._tasks.append(asyncio.ensure_future(self._pump(reading, first)))
            first += reading.num_choices
        self._ahead = await self.next()

    async def _pump(self, reading: Reading, first: int) -> None:
        try:
            while parts := await reading.next():
                await self._queue.put([replace(part, choice=part.choice + first) for part in parts])
            await self._queue.put(None)
        except Problem as problem:
            await self._queue.put(problem)

    async def next(self) -> list[Part]:
        if self._ahead:
            parts, self._ahead = self._ahead, []
            return parts
        while self._open:
            news = await self._queue.get()
            if isinstance(news, Problem):
                raise news
            if news is not None:
                return news
            self._open -= 1
        return []

    def counts(self) -> Counts:
        each = [reading.counts() for reading in self._readings]
        return Counts(sum(c.prompt for c in each), sum(c.answer for c in each), sum(c.cached for c in each))

    def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        for reading in self._readings:
            reading.close()
