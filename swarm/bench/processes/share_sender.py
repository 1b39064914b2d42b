"""Sends one process's share of a point: closed or open loop, with a warm-up, until it ends or is stopped."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from dataclasses import dataclass, field

from swarm.bench.processes.exchange import ChunkMeter, HttpExchange
from swarm.bench.processes.pipe_messages import RunShare, ShareProgress
from swarm.bench.prompts import PromptSource
from swarm.bench.records import CUT, OK, PointRecords, RequestTiming
from swarm.bench.schedule import share_arrivals

MAX_TTFTS = 200  # times to first token in a progress report
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 1.0  # pause of a slot after failures


@dataclass(slots=True)
class ShareSender:
    """A share that is being sent."""

    run: RunShare
    point_records: PointRecords = field(default_factory=PointRecords)  # records so far
    in_flight: int = 0
    num_ok: int = 0
    num_failed: int = 0
    _meter: ChunkMeter = field(init=False)
    _prompts: PromptSource = field(init=False)
    _ttfts: deque[float] = field(default_factory=lambda: deque(maxlen=MAX_TTFTS))
    _marks: list[tuple[float, float]] = field(default_factory=list)  # (time, processor time) at the window's ends

    def __post_init__(self) -> None:
        duration = self.run.share.point.duration_s
        length = math.inf if duration is None else duration
        self._meter = ChunkMeter(self.run.opens_at, length, self.run.bin_s)
        self._prompts = PromptSource(self.run.shape, self.run.scale)

    async def send_all(self) -> None:
        """Send the share and wait for its answers. Cancel the task to stop: requests in flight are recorded as cut."""
        async with HttpExchange(self.run.target, self._meter) as exchange:
            try:
                async with asyncio.TaskGroup() as group:
                    group.create_task(self._mark_processor_time())
                    if self.run.share.point.rate is None:
                        for slot in range(self.run.share.point.concurrency or 1):
                            group.create_task(self._run_slot(exchange, slot))
                    else:
                        group.create_task(self._run_open_loop(exchange, group, self.run.share.point.rate))
            finally:
                self.point_records.pieces = self._meter.bins
                self.point_records.cpu = [self._processor_share()]

    def progress(self) -> ShareProgress:
        ttfts = [round(value, 5) for value in self._ttfts]
        return ShareProgress(self.num_ok, self.num_failed, self.in_flight, self._meter.num_pieces, ttfts)

    @property
    def _begins_at(self) -> float:
        return self.run.opens_at - self.run.share.point.warmup_s

    @property
    def _closes_at(self) -> float:
        return self.run.opens_at + self._meter.length

    async def _run_slot(self, exchange: HttpExchange, slot: int) -> None:
        """Closed loop: send one request after the other. Slots take the share's requests in turn.

        After failures a slot pauses, longer each time: a server that is down does not get ten thousand requests a
        second.
        """
        point, share = self.run.share.point, self.run.share
        number, failures = slot, 0
        await _sleep_until(self._begins_at)
        while (point.count is None or number < point.count) and time.monotonic() < self._closes_at:
            index = self.run.first_index + share.first + number * share.step
            outcome = await self._send_one(exchange, index, None)
            if outcome == CUT:
                return
            failures = 0 if outcome == OK else failures + 1
            if failures:
                await asyncio.sleep(min(MAX_PAUSE_S, FIRST_PAUSE_S * 2 ** min(failures - 1, 10)))
            number += point.concurrency or 1

    async def _run_open_loop(self, exchange: HttpExchange, group: asyncio.TaskGroup, rate: float) -> None:
        """Open loop: send each request at its due time, independent of the others.

        At the limit of requests in flight, the next one is sent late; its latency counts from its due time.
        """
        point, share = self.run.share.point, self.run.share
        room = asyncio.Semaphore(point.max_in_flight)
        num_sent = 0
        for index, at in share_arrivals(rate, self.run.shape.seed, share):
            due = self._begins_at + at
            if due > self._closes_at or (point.count is not None and num_sent >= point.count):
                return
            await _sleep_until(due)
            if due >= self.run.opens_at:
                num_sent += 1
            await room.acquire()
            group.create_task(self._send_bounded(exchange, self.run.first_index + index, due, room))

    async def _send_bounded(self, exchange: HttpExchange, index: int, due: float, room: asyncio.Semaphore) -> None:
        try:
            await self._send_one(exchange, index, due)
        finally:
            room.release()

    async def _send_one(self, exchange: HttpExchange, index: int, due: float | None) -> str:
        """Send one request, record its result, and return its outcome.

        ``due``: None in a closed loop, where a request is due when it is sent.
        """
        job = self._prompts.make_request(index)
        self.in_flight += 1
        record, gaps = await exchange.send_request(job, max(self._begins_at, time.monotonic()) if due is None else due)
        self.in_flight -= 1
        self._record(record, gaps)
        return record.outcome

    def _record(self, record: RequestTiming, gaps: list[tuple[float, int]]) -> None:
        self.point_records.records.append(record)
        if record.is_ok:
            self.num_ok += 1
            if record.ttft is not None:
                self._ttfts.append(record.ttft)
            if 0 <= record.due <= self._meter.length:
                self.point_records.gaps.add_all(gaps)
        elif record.outcome != CUT:
            self.num_failed += 1

    async def _mark_processor_time(self) -> None:
        """Record the used processor time when the window opens and when it closes."""
        await _sleep_until(self.run.opens_at)
        self._marks.append((time.monotonic(), time.process_time()))
        if self._closes_at < math.inf:
            await _sleep_until(self._closes_at)
            self._marks.append((time.monotonic(), time.process_time()))

    def _processor_share(self) -> float:
        """Return the share of one core that this process used while the window was open."""
        if not self._marks:
            return 0.0
        marks = [*self._marks, (time.monotonic(), time.process_time())]
        (begin, used), (end, used_then) = marks[0], marks[1]
        return round((used_then - used) / max(1e-6, end - begin), 3)


async def _sleep_until(at: float) -> None:
    if (ahead := at - time.monotonic()) > 0:
        await asyncio.sleep(ahead)
