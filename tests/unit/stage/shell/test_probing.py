"""How a worker measures its way to the broker: over a pretended link whose delay and rate are known."""

from __future__ import annotations

import asyncio

import pytest

from swarm.stage.shell.link_probe import LinkProbe
from swarm.testing import ManualClock
from swarm.wire.messages import Probe

DELAY_S = 0.004
RATE = 1e9


class Echo:
    """Answers every probe after the way there and back, on a clock of its own."""

    def __init__(self, rate: float = RATE, answers: int = 1000, largest: int = 1 << 30) -> None:
        self.clock = ManualClock()
        self.probe = LinkProbe(self._take, self.clock)
        self.sizes: list[int] = []
        self._rate, self._answers, self._largest = rate, answers, largest

    def _take(self, message: Probe, payload: bytes | None) -> None:
        size = 0 if payload is None else len(payload)
        assert (message.payload.num_bytes if message.payload else 0) == size
        self.sizes.append(size)
        if len(self.sizes) > self._answers or size > self._largest:
            return
        self.probe.on_answer(message.ticket - 1)  # late answers to earlier ones mean nothing
        self.clock.advance(DELAY_S + size / self._rate)
        self.probe.on_answer(message.ticket)


async def test_delay_and_rate() -> None:
    """The small messages tell the delay, the large ones what is left of the time for their bytes."""
    found = await Echo().probe.measure()
    assert found is not None
    assert found.round_trip_s == pytest.approx(DELAY_S)
    assert found.bytes_per_s == pytest.approx(RATE, rel=0.01)


async def test_a_slow_link_is_not_filled() -> None:
    """Where the smaller of the large messages took long, the larger one is not sent."""
    echo = Echo(rate=1e6)
    found = await echo.probe.measure()
    assert found is not None
    assert found.bytes_per_s == pytest.approx(1e6, rel=0.01)
    assert max(echo.sizes) == 64 << 10


async def test_a_broker_that_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known then, and nothing is waited for any longer; what comes late is not minded."""
    monkeypatch.setattr("swarm.stage.shell.link_probe._ANSWER_S", 0.01)
    echo = Echo(answers=0)
    async with asyncio.timeout(5.0):
        assert await echo.probe.measure() is None
    echo.probe.on_answer(1)
    assert echo.sizes == [0]


@pytest.mark.parametrize(("largest", "rate"), [(1000, 6_553_600), (100 << 10, RATE)])
async def test_large_messages_that_get_lost(monkeypatch: pytest.MonkeyPatch, largest: int, rate: float) -> None:
    """Not even 64 KiB in time: no more than that passes. Half a mebibyte too much: what is known of the smaller one."""
    monkeypatch.setattr("swarm.stage.shell.link_probe._PATIENCE_S", 0.01)
    async with asyncio.timeout(5.0):
        echo = Echo(largest=largest)
        found = await echo.probe.measure()
    assert found is not None
    assert echo.probe.loses_large is (largest < 64 << 10)
    assert found.round_trip_s == pytest.approx(DELAY_S)
    assert found.bytes_per_s == pytest.approx(rate, rel=0.01)
