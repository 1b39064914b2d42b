"""One request over HTTP, with the times of its chunks."""

from __future__ import annotations

import asyncio
import os
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from random import Random
from types import SimpleNamespace, TracebackType
from typing import Self

import aiohttp

from swarm.bench.plan import BenchTarget
from swarm.bench.prompts import BenchRequest
from swarm.bench.protocol import PATHS, AnswerReader, encode_request
from swarm.bench.records import CUT, OK, RequestTiming
from swarm.bench.retry import RETRY_STATUSES, backoff_s, retry_after_s
from swarm.bench.sse import BadStream, SseParser
from swarm.version import __version__

CONNECT_TIMEOUT_S = 30.0
MAX_DETAIL = 300  # characters of an error that are recorded


class HttpRefusal(Exception):
    """The server answered with an error status."""

    def __init__(self, status: int, text: str, retry_after: float | None) -> None:
        super().__init__(f"{status}: {text}")
        self.status = status
        self.retry_after = retry_after


@dataclass(slots=True)
class ChunkMeter:
    """Counter of chunks with text, in bins of the window."""

    opens_at: float  # start of the window, ``time.monotonic()``
    length: float  # length of the window in seconds
    bin_s: float  # width of a bin
    num_pieces: int = 0
    bins: dict[int, int] = field(default_factory=dict)

    def count(self, num: int, now: float) -> int:
        """Count chunks that arrived now; return the number within the window."""
        self.num_pieces += num
        at = now - self.opens_at
        if not 0 <= at <= self.length:
            return 0
        number = int(at / self.bin_s)
        self.bins[number] = self.bins.get(number, 0) + num
        return num


@dataclass(slots=True)
class SendAttempt:
    """One attempt to send a request."""

    on_kept_connection: bool = False  # the connection has served another request before


def _trace_reuse() -> aiohttp.TraceConfig:
    async def on_reuse(_: aiohttp.ClientSession, context: SimpleNamespace, __: object) -> None:
        context.trace_request_ctx.on_kept_connection = True

    config = aiohttp.TraceConfig()
    config.on_connection_reuseconn.append(on_reuse)
    return config


class HttpExchange:
    """Session with one server, with one connection per request in flight."""

    def __init__(self, target: BenchTarget, meter: ChunkMeter) -> None:
        self._target = target
        self._meter = meter
        # No compression: a server that compresses a stream delays tokens.
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        headers["User-Agent"] = f"swarm-bench/{__version__}"
        if target.key_env is not None:
            headers["Authorization"] = f"Bearer {os.environ[target.key_env]}"
        self._session = aiohttp.ClientSession(
            headers=headers,
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=3600),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            trace_configs=[_trace_reuse()],
            read_bufsize=256 * 1024,
        )
        self._url = target.url + PATHS[target.api]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._session.close()

    async def send_request(self, job: BenchRequest, due: float) -> tuple[RequestTiming, list[tuple[float, int]]]:
        """Send a request and read its answer; return its record and the times between its chunks.

        Any error becomes the record's outcome. If the task is cancelled, the outcome is ``cut`` and nothing is raised:
        the task ends right afterwards.
        """
        opens_at = self._meter.opens_at
        now = time.monotonic()
        record = RequestTiming(job.index, due - opens_at, now - opens_at)
        gaps: list[tuple[float, int]] = []
        try:
            async with asyncio.timeout(self._target.timeout_s):
                await self._send_with_retries(
                    encode_request(self._target, job), record, gaps, Random(f"retry:{job.index}")
                )
        except TimeoutError:
            record.outcome, record.detail = "timeout", f"no complete answer within {self._target.timeout_s:g} s"
        except HttpRefusal as error:
            record.outcome, record.detail = f"http_{error.status}", str(error)[:MAX_DETAIL]
        except (BadStream, aiohttp.ClientPayloadError) as error:
            record.outcome, record.detail = "bad_stream", str(error)[:MAX_DETAIL]
        except (aiohttp.ClientError, OSError) as error:
            record.outcome, record.detail = "connection", f"{type(error).__name__}: {error}"[:MAX_DETAIL]
        except asyncio.CancelledError:
            record.outcome = CUT
        record.end = time.monotonic() - opens_at
        return record, gaps if record.outcome == OK else []

    async def _send_with_retries(
        self, data: bytes, record: RequestTiming, gaps: list[tuple[float, int]], chance: Random
    ) -> None:
        while True:
            attempt = SendAttempt()
            try:
                return await self._send_once(data, record, gaps, attempt)
            except (aiohttp.ClientOSError, aiohttp.ServerDisconnectedError):
                if not attempt.on_kept_connection:
                    raise
                continue  # the server had closed an idle connection, which is no answer: clients open another one
            except HttpRefusal as error:
                if error.status not in RETRY_STATUSES or record.num_retries >= self._target.max_retries:
                    raise
                record.num_retries += 1
                wait = backoff_s(record.num_retries, error.retry_after, chance)
                if time.monotonic() - self._meter.opens_at + wait - record.sent > self._target.timeout_s:
                    raise  # it would end as a timeout; the rejection is more informative
            await asyncio.sleep(wait)

    async def _send_once(
        self, data: bytes, record: RequestTiming, gaps: list[tuple[float, int]], attempt: SendAttempt
    ) -> None:
        sending = self._session.post(self._url, data=data, allow_redirects=False, trace_request_ctx=attempt)
        async with sending as response:
            attempt.on_kept_connection = False  # from now on, a lost connection is an error of the answer
            if response.status != 200:
                text = (await response.content.read(4096)).decode("utf-8", "replace")
                after = retry_after_s(response.headers.get("Retry-After"), datetime.now(UTC))
                raise HttpRefusal(response.status, " ".join(text.split()), after)
            reading = AnswerReader()
            try:
                if self._target.stream:
                    await self._read_stream(response, reading, record, gaps)
                else:
                    await self._read_whole(response, reading, record)
            finally:
                record.num_tokens = reading.num_tokens
                record.prompt_tokens = reading.prompt_tokens
                record.has_usage = reading.completion_tokens is not None

    async def _read_stream(
        self,
        response: aiohttp.ClientResponse,
        reading: AnswerReader,
        record: RequestTiming,
        gaps: list[tuple[float, int]],
    ) -> None:
        events, opens_at, last = SseParser(), self._meter.opens_at, 0.0
        content = response.content
        while piece := await content.readany():
            now = time.monotonic()
            num = 0
            for data in events.feed(piece):
                num += reading.read_event(data) == "token"
            if not num:
                continue
            if record.first is None:
                record.first = now - opens_at
                if num > 1:
                    gaps.append((0.0, num - 1))
            else:
                gaps.append((now - last, num))
            last = now
            record.num_pieces += num
            record.pieces_inside += self._meter.count(num, now)
        for data in events.finish():
            reading.read_event(data)
        reading.check_end()

    async def _read_whole(self, response: aiohttp.ClientResponse, reading: AnswerReader, record: RequestTiming) -> None:
        """Read an answer that is not streamed. It counts as one chunk: its tokens arrive together."""
        reading.read_answer(await response.read())
        record.num_pieces = 1
        record.pieces_inside = 1 if self._meter.count(1, time.monotonic()) else 0
