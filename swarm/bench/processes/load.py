"""Sends one process's share of a point: closed or open loop, with a warm-up, until it ends or is stopped."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

from swarm.bench.processes.exchange import Exchange, Meter
from swarm.bench.processes.orders import Progress, Run
from swarm.bench.prompts import Prompts
from swarm.bench.records import CUT, OK, Gathered, Record
from swarm.bench.schedule import own_arrivals

SHOWN_TTFTS = 200  # times to first token in a progress report
FIRST_PAUSE_S, MOST_PAUSE_S = 0.05, 1.0  # pause of a slot after failures


@dataclass(slots=True)
class Load:
    """A share that is being sent."""

    run: Run
    gathered: Gathered = field(default_factory=Gathered)  # records so far
    in_flight: int = 0
    num_ok: int = 0
    num_failed: int = 0
    _meter: Meter = field(init=False)
    _prompts: Prompts = field(init=False)
    _ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=SHOWN_TTFTS))
    _marks: list[tuple[float, float]] = field(default_factory=list)  # (time, processor time) at the window's ends

    def __post_init__(self) -> None:
        duration = self.run.share.point.duration_s
        length = math.inf if duration is None else duration
        self._meter = Meter(self.run.opens_at, length, self.run.bin_s)
        self._prompts = Prompts(self.run.shape, self.run.scale)

    async def send_all(self) -> None:
        """Send the share and wait for its answers. Cancel the task to stop: requests in flight are recorded as cut."""
        async with Exchange(self.run.target, self._meter) as exchange:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._watch_processor())
                    if self.run.share.point.rate is None:
                        for slot in range(self.run.share.point.concurrency or 1):
                            group.create_task(self._slot(exchange, slot))
                    else:
                        group.create_task(self._by_schedule(exchange, group, self.run.share.point.rate))
            finally:
                self.gathered.pieces = self._meter.bins
                self.gathered.cpu = [self._processor_share()]

    def progress(self) -> Progress:
        ttfts = [round(value, 5) for value in self._ttfts]
        return Progress(self.num_ok, self.num_failed, self.in_flight, self._meter.num_pieces, ttfts)

    @property
    def _begins_at(self) -> float:
        return self.run.opens_at - self.run.share.point.warmup_s

    @property
    def _closes_at(self) -> float:
        return self.run.opens_at + self._meter.length

    async def _slot(self, exchange: Exchange, slot: int) -> None:
        """Closed loop: send one request after the other. Slots take the share's requests in turn.

        After failures a slot pauses, longer each time: a server that is down does not get ten thousand requests a
        second.
        """
        point, share = self.run.share.point, self.run.share
        number, failures = slot, 0
        await _until(self._begins_at)
        while (point.count is None or number < point.count) and time.monotonic() < self._closes_at:
            index = self.run.first_index + share.first + number * share.step
            outcome = await self._one(exchange, index, None)
            if outcome == CUT:
                return
            failures = 0 if outcome == OK else failures + 1
            if failures:
                await asyncio.sleep(min(MOST_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))
            number += point.concurrency or 1

    async def _by_schedule(self, exchange: Exchange, group: asyncio.TaskGroup, rate: float) -> None:
        """Open loop: send each request at its time, whatever happens to the others.

        When the bound of requests in flight is reached, the next one waits while its clock runs.
        """
        point, share = self.run.share.point, self.run.share
        room = asyncio.Semaphore(point.max_in_flight)
        num_sent = 0
        for index, at in own_arrivals(rate, self.run.shape.seed, share):
            due = self._begins_at + at
            if due > self._closes_at or (point.count is not None and num_sent >= point.count):
                return
            await _until(due)
            if due >= self.run.opens_at:
                num_sent += 1
            await room.acquire()
            group.create_task(self._in_room(exchange, self.run.first_index + index, due, room))

    async def _in_room(self, exchange: Exchange, index: int, due: float, room: asyncio.Semaphore) -> None:
        try:
            await self._one(exchange, index, due)
        finally:
            room.release()

    async def _one(self, exchange: Exchange, index: int, due: float | None) -> str:
        """Send one request, record its result, and return its outcome.

        ``due``: None in a closed loop, where a request is due when it is sent.
        """
        job = self._prompts.job(index)
        self.in_flight += 1
        record, gaps = await exchange.ask(job, max(self._begins_at, time.monotonic()) if due is None else due)
        self.in_flight -= 1
        self._keep(record, gaps)
        return record.outcome

    def _keep(self, record: Record, gaps: list[float]) -> None:
        self.gathered.records.append(record)
        if record.is_ok:
            self.num_ok += 1
            if record.ttft is not None:
                self._ttfts.append(record.ttft)
            if 0 <= record.due <= self._meter.length:
                self.gathered.gaps.add_all(gaps)
        elif record.outcome != CUT:
            self.num_failed += 1

    async def _watch_processor(self) -> None:
        """Record the used processor time when the window opens and when it closes."""
        await _until(self.run.opens_at)
        self._marks.append((time.monotonic(), time.process_time()))
        if self._closes_at < math.inf:
            await _until(self._closes_at)
            self._marks.append((time.monotonic(), time.process_time()))

    def _processor_share(self) -> float:
        """Return the share of one core that this process used while the window was open."""
        if not self._marks:
            return 0.0
        marks = [*self._marks, (time.monotonic(), time.process_time())]
        (begin, used), (end, used_then) = marks[0], marks[1]
        return round((used_then - used) / max(1e-6, end - begin), 3)


async def _until(at: float) -> None:
    if (ahead := at - time.monotonic()) > 0:
        await asyncio.sleep(ahead)
