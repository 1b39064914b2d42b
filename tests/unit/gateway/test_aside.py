"""Work beside the loop is bounded."""

from __future__ import annotations

import asyncio
import threading

import pytest

from swarm.gateway.errors import ApiError
from swarm.gateway.thread_pool import BoundedThreadPool


async def test_who_would_be_one_too_many_is_told_to_come_again() -> None:
    aside, gate = BoundedThreadPool("test", 1, max_tasks=2), threading.Event()
    waiting = [asyncio.ensure_future(aside.run(gate.wait, 20.0)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ApiError) as told:
        await aside.run(gate.wait, 20.0)
    assert (told.value.status, told.value.retry_after_s) == (429, 1.0)
    waiting[1].cancel()  # whoever hangs up makes room
    await asyncio.gather(waiting[1], return_exceptions=True)
    third = asyncio.ensure_future(aside.run(int, 3))
    gate.set()
    assert (await waiting[0], await third) == (True, 3)
    aside.close()
