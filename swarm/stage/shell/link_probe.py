"""Measurement of latency and bandwidth to the broker, over the worker's own connection. A plan between machines uses
them.

A few small messages measure the round trip, larger ones the bytes per second. The smallest of a few times counts, since
any other activity makes a message slower. If the broker doesn't answer soon, the measurement ends without a result. If
small messages return and large ones don't (where a link on the route has a smaller MTU than the ends assume), the
reported bandwidth is the rate that this timeout implies.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from swarm.clock import Clock
from swarm.wire.messages import LinkCost, Probe
from swarm.wire.tensors import pack_bytes

MTU_REMEDY = (
    "a link on the route has a smaller MTU than both ends assume: lower it here (ip link set dev … mtu 1400), or let "
    "ICMP pass, which reports it"
)
_NUM_SMALL = 5
_NUM_LARGE = 2
_SIZES = (64 << 10, 512 << 10)  # bytes; the larger one is sent only if the smaller one was quick
_QUICK_S = 0.05
_ANSWER_S = 0.5  # timeout of the first answer
_PATIENCE_S = 2.0
_MAX_BYTES_PER_S = 1e12


class LinkProbe:
    """Measurement of the link to the broker. ``send`` takes a message and its payload; answers go to ``on_answer``."""

    def __init__(self, send: Callable[[Probe, bytes | None], None], clock: Clock) -> None:
        self._send, self._clock = send, clock
        self._ticket = 0  # number of the last message
        self._answer: asyncio.Future[None] | None = None  # resolved by the answer to the last message
        self.loses_large = False  # small messages returned, large ones did not

    async def measure(self) -> LinkCost | None:
        """Measure the link to the broker; return None if it doesn't answer in time."""
        try:
            async with asyncio.timeout(_ANSWER_S):
                await self._round_trip(0)
            async with asyncio.timeout(_PATIENCE_S):
                round_trip_s = min([await self._round_trip(0) for _ in range(_NUM_SMALL)])
            return LinkCost(round_trip_s, await self._measure_rate(round_trip_s))
        except TimeoutError:
            return None
        finally:
            self._answer = None

    async def _measure_rate(self, round_trip_s: float) -> float:
        """Return the bytes per second of the largest message that returned in time."""
        rate = _MAX_BYTES_PER_S
        for count, size in enumerate(_SIZES):
            try:
                async with asyncio.timeout(_PATIENCE_S):
                    took = min([await self._round_trip(size) for _ in range(_NUM_LARGE)])
            except TimeoutError:
                self.loses_large = count == 0
                return rate if count else size / _PATIENCE_S
            rate = size / max(took - round_trip_s, size / _MAX_BYTES_PER_S)
            if took > _QUICK_S:
                break
        return rate

    async def _round_trip(self, num_bytes: int) -> float:
        self._ticket += 1
        self._answer = asyncio.get_running_loop().create_future()
        payload = bytes(num_bytes) if num_bytes else None
        probe = Probe(ticket=self._ticket, payload=None if payload is None else pack_bytes(payload))
        began = self._clock.now()
        self._send(probe, payload)
        await self._answer
        return self._clock.now() - began

    def on_answer(self, ticket: int) -> None:
        """Handle an answer; one to an earlier message is ignored."""
        if ticket == self._ticket and self._answer is not None and not self._answer.done():
            self._answer.set_result(None)
