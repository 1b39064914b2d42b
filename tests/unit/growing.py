"""A list that a test's loop can wait for, whichever thread appends to it: no test has to look again and again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
WAIT_S = 30.0  # whoever is waited for has hung


class Growing(list[T]):
    def __init__(self) -> None:
        super().__init__()
        self._loop = asyncio.get_running_loop()
        self._grown = asyncio.Event()

    def append(self, item: T) -> None:
        super().append(item)
        self._loop.call_soon_threadsafe(self._grown.set)

    async def until(self, holds: Callable[[], object]) -> None:
        """Look whether it holds, at once and whenever something was appended."""
        async with asyncio.timeout(WAIT_S):
            while not holds():
                self._grown.clear()
                await self._grown.wait()

    async def has(self, num: int) -> None:
        await self.until(lambda: len(self) >= num)
