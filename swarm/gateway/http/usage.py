"""Records the usage of each answer: for its key's limits, for the metrics, and for a trace if tracing is on."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from swarm.gateway.answer import TokenCounts
from swarm.gateway.completion.service import Caller
from swarm.metrics.http import HttpMetrics, RequestTimer
from swarm.metrics.tracing import SpanExporter

APIS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "completions",
    "/v1/responses": "responses",
    "/v1/messages": "messages",
    "/api/chat": "ollama",
    "/api/generate": "ollama",
    "/api/embed": "ollama",
    "/api/embeddings": "ollama",
    "/v1/embeddings": "embeddings",
    "/v1/rerank": "rerank",
}


def api_of(path: str) -> str:
    """Return the API of a path; "other" for an unknown path."""
    return next((api for route, api in APIS.items() if path == route or path.startswith(route + "/")), "other")


class UsageSink(Protocol):
    """Receives the token counts of each answer, however it ended. Must be quick, and must not raise."""

    def record_usage(self, caller: Caller, counts: TokenCounts) -> None: ...


class UsageRecorder:
    """Usage recorder of a gateway."""

    def __init__(self, metrics: HttpMetrics, sink: UsageSink | None = None, tracer: SpanExporter | None = None) -> None:
        self.metrics, self._sink, self._tracer = metrics, sink, tracer
        self._tasks: set[asyncio.Task[None]] = set()  # bounded by the tracer, which sends few at a time

    def start(
        self, caller: Caller, api: str, model: str, request_id: str, traceparent: str | None, *, traced: bool = True
    ) -> RequestUsage:
        """Start to record an answer. ``traced``: this is the request's first reader, so a trace is sent at its end."""
        return RequestUsage(
            self, self.metrics.start_request(api, model), caller, request_id, traceparent, traced=traced
        )

    def record(self, usage: RequestUsage, outcome: str, counts: TokenCounts) -> None:
        """Record the end of an answer."""
        if self._sink is not None:
            self._sink.record_usage(usage.owner, counts)
        if self._tracer is not None and usage.traced:
            about: dict[str, str | int | float | bool] = {
                "swarm.outcome": outcome,
                "swarm.prompt_tokens": counts.prompt,
                "swarm.answer_tokens": counts.answer,
            }
            for request_id in usage.request_ids:
                sending = self._tracer.export_request(request_id, usage.traceparent, about)
                task = asyncio.ensure_future(sending)
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def aclose(self) -> None:
        """Wait for the traces in progress, and send them."""
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._tracer is not None:
            await self._tracer.close()


class RequestUsage:
    """Usage of one answer."""

    __slots__ = ("_accounts", "_watch", "num_prompt", "owner", "request_ids", "tokens", "traced", "traceparent")

    def __init__(
        self,
        accounts: UsageRecorder,
        watch: RequestTimer,
        owner: Caller,
        request_id: str,
        traceparent: str | None,
        *,
        traced: bool,
    ) -> None:
        self._accounts, self._watch = accounts, watch
        self.tokens = watch.on_tokens  # called with the number of tokens that have come
        self.owner, self.traceparent = owner, traceparent
        self.request_ids: tuple[str, ...] = (request_id,)  # ids at the broker; several for several prompts
        self.traced = traced
        self.num_prompt = 0  # set as soon as it is known

    def close(self, outcome: str, counts: TokenCounts) -> None:
        """Record the end of the answer. ``outcome``: "done", "failed", or "left" by its reader."""
        if not counts.prompt:  # it was left before its first token
            counts = replace(counts, prompt=self.num_prompt)
        self._watch.finish(outcome, counts.prompt, counts.cached, counts.answer)
        self._accounts.record(self, outcome, counts)

    def discard(self) -> None:
        """Drop the record of an answer that never began. The error handler counts it as refused."""
        self._watch.mark_refused()
