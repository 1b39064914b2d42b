"""Answers that nobody reads for a while: who cancels them, and when not."""

from __future__ import annotations

import asyncio
from typing import Any

from swarm.errors import InvalidRequest
from swarm.gateway.desk.keeping import MAX_KEPT, Keeping


class Broker:
    """What the keeping asks of a client."""

    def __init__(self, attached: bool = False, known: bool = True) -> None:
        self.attached, self.known = attached, known
        self.cancelled: list[str] = []

    async def query(self, what: str, *, request_id: str) -> dict[str, Any]:
        """As a broker of before tells, which knows no ``request_id`` here: of all."""
        assert what == "requests"
        assert request_id
        return {"requests": [{"request_id": "a", "attached": self.attached}, {"request_id": "b", "attached": True}]}

    async def cancel(self, request_id: str) -> None:
        if not self.known:
            raise InvalidRequest("nobody knows it", code="unknown")
        self.cancelled.append(request_id)


async def settle(keeping: Keeping, num: int = 0) -> None:
    """Let the loop turn until so many are kept."""
    for _ in range(1000):
        if keeping.num_kept == num:
            return
        await asyncio.sleep(0)
    raise AssertionError(f"{keeping.num_kept} are kept")


async def test_what_nobody_reads_in_time_is_cancelled() -> None:
    broker = Broker()
    keeping = Keeping(broker)  # type: ignore[arg-type]
    keeping.keep("a", 0.0)
    await settle(keeping)
    assert broker.cancelled == ["a"]


async def test_what_somebody_reads_is_left_alone() -> None:
    """Here, or by way of another gateway; and what has gone is no fault."""
    for broker in (Broker(attached=True), Broker(known=False)):
        keeping = Keeping(broker)  # type: ignore[arg-type]
        keeping.keep("a", 0.0)
        await settle(keeping)
        assert broker.cancelled == []
    broker = Broker()
    keeping = Keeping(broker)  # type: ignore[arg-type]
    keeping.keep("a", 60.0)
    keeping.forget("a")
    assert keeping.num_kept == 0
    await keeping.aclose()
    assert broker.cancelled == []


async def test_so_many_are_kept_and_no_more() -> None:
    """One more is cancelled at once."""
    broker = Broker()
    keeping = Keeping(broker)  # type: ignore[arg-type]
    for number in range(MAX_KEPT):
        keeping.keep(f"k{number}", 60.0)
    keeping.keep("a", 60.0)
    await settle(keeping, MAX_KEPT)
    assert broker.cancelled == ["a"]
    await keeping.aclose()
    assert keeping.num_kept == 0
