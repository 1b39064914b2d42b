"""Requests whose answers are known, without an end; whatever is not as known is a violation."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from swarm import AsyncClient, ClientError
from swarm.client.results import Piece
from tests.faults.bench import CASES, Answer, ask

LENGTHS = (3, 16, 40)  # tokens of an answer
PATIENCE_S = 90.0
DEATHS = 3  # at which a request is put aside

Known = dict[tuple[int, int], Answer]


async def known_answers(client: AsyncClient) -> Known:
    """Ask a swarm that nobody harms each request in each length."""
    keys = [(index, length) for index in range(len(CASES)) for length in LENGTHS]
    answers = await asyncio.gather(*(ask(client, index, length) for index, length in keys))
    return dict(zip(keys, answers, strict=True))


@dataclass
class Load:
    """``deaths``: how many workers died, or lost steps, so far; ``violated``: is told what was not as it must be."""

    client: AsyncClient
    known: Known
    seed: int
    deaths: Callable[[], int]
    violated: Callable[[str], None]
    num_answers: int = 0
    num_quarantined: int = 0
    num_left: int = 0
    longest_gap_s: float = 0.0
    _token_at: float = field(default_factory=time.monotonic)

    async def run(self, count: int) -> None:
        """Make so many requests at a time, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(self._ask_for_ever(random.Random(self.seed * 1000 + number)))

    async def _ask_for_ever(self, chance: random.Random) -> None:
        while True:
            key = chance.choice(list(self.known))
            if chance.random() < 0.05:
                await self._ask_and_leave(*key)
            else:
                await self._ask(*key)

    async def _ask(self, index: int, length: int) -> None:
        deaths, began = self.deaths(), time.monotonic()
        what = f"request {index} of {length} tokens"
        try:
            found = await self._read(index, length)
        except ClientError as error:
            await asyncio.sleep(0.2)  # so that the deaths behind it have been noticed
            if "quarantined" in str(error) and self.deaths() - deaths >= DEATHS:
                self.num_quarantined += 1
            else:
                after_s, seen = time.monotonic() - began, self.deaths() - deaths
                self.violated(f"{what} failed after {after_s:.1f} s and {seen} deaths: {error}")
            return
        except StreamBroken as error:
            self.violated(f"{what}: {error}")
            return
        self.num_answers += 1
        if found != self.known[index, length]:
            self.violated(f"{what}: {found} instead of {self.known[index, length]}")

    async def _read(self, index: int, length: int) -> Answer:
        """Piece by piece: each continuation's tokens come in order, none twice, none missing."""
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[Any]] = {}
        reasons: dict[int, str] = {}
        async for piece in self._stream(index, length):
            self._heard()
            got = tokens.setdefault(piece.choice, [])
            if piece.token is None or piece.index != len(got) or piece.choice in reasons:
                raise StreamBroken(f"token {piece.index} of continuation {piece.choice} came after {len(got)} tokens")
            got.append(piece.token)
            if piece.logprobs:
                logprobs.setdefault(piece.choice, []).append(piece.logprobs)
            if piece.finish_reason:
                reasons[piece.choice] = piece.finish_reason
        return [(tuple(tokens[c]), reasons.get(c, ""), tuple(logprobs.get(c, ()))) for c in sorted(tokens)]

    async def _ask_and_leave(self, index: int, length: int) -> None:
        """A client that goes in the middle: nobody may suffer from it."""
        try:
            async for _ in self._stream(index, length):
                break
        except ClientError as error:
            if "quarantined" not in str(error):
                self.violated(f"request {index}, which was left early, failed: {error}")
        self.num_left += 1

    def _stream(self, index: int, length: int) -> Any:
        case = CASES[index]
        return self.client.stream(
            list(case.prompt), max_tokens=length, ignore_eos=True, timeout=PATIENCE_S, **case.options
        )

    def _heard(self) -> None:
        now = time.monotonic()
        self.longest_gap_s = max(self.longest_gap_s, now - self._token_at)
        self._token_at = now


class StreamBroken(Exception):
    """Tokens that are not one after the other."""


__all__ = ["Known", "Load", "Piece", "known_answers"]
