"""Traces for OpenTelemetry: spans that show where a request's time went (OTLP over HTTP).

Off unless an endpoint is set: then OpenTelemetry is not even imported. While a request runs, nothing is done for its
trace. When it has ended, the broker is asked for its own record of the request, and spans are made from it:

    swarm.request        from its arrival at the broker to its end there
    └── swarm.step       one per token: from the dispatch of its step to the answer (the chunks of a prompt are one)
        └── swarm.stage  one per stage: waiting, computing and drawing there

Machines' clocks are not compared: a step's beginning and end are the broker's, the stages within it have their own
durations, in their order, and the rest of the step (the wire) is divided equally between them.

A request with a ``traceparent`` belongs to its sender's trace, and is left out if the sender does not sample it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from swarm.errors import ConfigError, SwarmError
from swarm.version import install_command

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

MAX_TOKENS = 128  # per continuation: the first tokens, which are the most informative
MAX_OPEN_QUESTIONS = 8  # simultaneous questions to the broker; further requests stay without a trace
DEADLINE_S = 2.0
MAX_WAITING = 8192  # spans that wait for the collector; beyond, the newest are dropped
EXPORT_TIMEOUT_S = 5.0

GetTrace = Callable[[str], Awaitable[dict[str, Any]]]
Attributes = Mapping[str, str | int | float | bool]


def make_span_exporter(
    endpoint: str | None, get_trace: GetTrace, *, share: float = 1.0, wall_clock: Callable[[], float] = time.time
) -> SpanExporter | None:
    """Return an exporter that sends spans to the collector at ``endpoint``, such as ``http://host:4318``; None without
    an endpoint.

    ``get_trace`` is ``AsyncClient.trace``. ``share``: fraction of the requests without a ``traceparent`` that are
    traced. Raises ConfigError if the endpoint is invalid or OpenTelemetry is not installed.
    """
    if not endpoint:
        return None
    address = urlsplit(endpoint)
    if address.scheme not in ("http", "https") or not address.hostname:
        raise ConfigError(f"the traces' endpoint {endpoint!r} is not an address like http://127.0.0.1:4318")
    if address.path in ("", "/"):
        endpoint = f"{endpoint.rstrip('/')}/v1/traces"
    return SpanExporter(_provider(endpoint), get_trace, share, wall_clock)


def _provider(endpoint: str) -> TracerProvider:
    """Return a tracer provider that exports spans from its own thread, with a bounded queue."""
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter  # noqa: PLC0415 (an extra)
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource  # noqa: PLC0415
        from opentelemetry.sdk.trace import TracerProvider  # noqa: PLC0415
        from opentelemetry.sdk.trace.export import BatchSpanProcessor  # noqa: PLC0415
    except ImportError as error:
        raise ConfigError(
            f"traces need packages that are not installed ({error.name}): {install_command('tracing')}"
        ) from error
    provider = TracerProvider(resource=Resource.create({SERVICE_NAME: "swarm"}), shutdown_on_exit=False)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S)
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
    return provider


class SpanExporter:
    """Exporter that turns the broker's records of finished requests into OpenTelemetry spans."""

    def __init__(
        self, provider: TracerProvider, get_trace: GetTrace, share: float, wall_clock: Callable[[], float]
    ) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("swarm")
        self._get_trace = get_trace
        self._share = share
        self._wall_clock = wall_clock
        self._num_open_questions = 0
        # requests without a trace: the broker had none or did not answer, or too many queries were open
        self.num_missing = 0

    async def export_request(self, request_id: str, traceparent: str | None, attributes: Attributes) -> None:
        """Fetch the trace of a finished request from the broker and export it as spans.

        ``traceparent``: value of the request's header, None without one. ``attributes``: attributes of the request's
        span. A failure to get the trace is only counted in ``num_missing``. Takes at most ``DEADLINE_S``; callers that
        must not wait run it as a task.
        """
        parent = self._parent_context(traceparent)
        if parent is None:
            return
        if self._num_open_questions >= MAX_OPEN_QUESTIONS:
            self.num_missing += 1
            return
        self._num_open_questions += 1
        try:
            async with asyncio.timeout(DEADLINE_S):
                trace = await self._get_trace(request_id)
        except (SwarmError, TimeoutError, OSError):
            self.num_missing += 1
            return
        finally:
            self._num_open_questions -= 1
        # in a thread: 20 µs per span
        await asyncio.to_thread(self._make_spans, trace, self._wall_clock(), parent, attributes)

    async def close(self) -> None:
        """Export the spans in the queue, and shut down."""
        await asyncio.to_thread(self._provider.shutdown)

    def _parent_context(self, traceparent: str | None) -> Context | None:
        """Return the parent context of the request's span: from the ``traceparent``, or empty without a valid one. None
        if the request is not sampled."""
        from opentelemetry.context import Context  # noqa: PLC0415 (an extra)
        from opentelemetry.trace import get_current_span  # noqa: PLC0415
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator  # noqa: PLC0415

        context = Context()
        if traceparent is not None:
            context = TraceContextTextMapPropagator().extract({"traceparent": traceparent}, context)
        sender = get_current_span(context).get_span_context()
        is_wanted = sender.trace_flags.sampled if sender.is_valid else random.random() < self._share
        return context if is_wanted else None

    def _make_spans(self, trace: Mapping[str, Any], now: float, parent: Context, attributes: Attributes) -> None:
        """Create the spans of one request from the broker's record.

        ``now``: wall-clock time at which the record arrived. The record has only ages, so all times are computed back
        from it.
        """
        if trace.get("age_s") is None:
            self.num_missing += 1
            return
        arrived = now - trace["age_s"]
        ended = now - (trace.get("ended_age_s") or 0.0)
        about = {"swarm.request_id": str(trace["request_id"]), **attributes}
        request = self._span("swarm.request", arrived, parent, about)
        for sequence in trace["sequences"]:
            for token in sequence.get("tokens", ())[:MAX_TOKENS]:
                self._make_step_spans(arrived, token, request, {"swarm.choice": sequence["index"]})
        request[0].end(_ns(ended))

    def _make_step_spans(
        self, arrived: float, token: Mapping[str, Any], parent: tuple[Any, Context], of: Attributes
    ) -> None:
        """Create the span of one token, and within it one span per stage.

        The token's span excludes the queue time before the dispatch and the broker's time after the result (journal,
        delivery); both durations are attributes of the span.
        """
        began = arrived + token["began_s"] + token["queue_s"]
        ended = arrived + token["began_s"] + token["total_s"] - token["broker_s"]
        about = {**of, "swarm.token": token["index"], "swarm.steps": token["num_steps"]}
        about |= {f"swarm.{part}": token[part] for part in ("queue_s", "wire_s", "broker_s")}
        step = self._span("swarm.step", began, parent[1], about)
        for stage, start, stop in place_stages(token["stages"], began, ended):
            first, after = stage["layers"]
            named = {"swarm.worker": stage["worker"], "swarm.layers": f"{first}-{after - 1}"}
            named |= {f"swarm.{part}": stage[part] for part in ("wait_s", "compute_s", "sample_s", "wire_bytes")}
            self._span("swarm.stage", start, step[1], named)[0].end(_ns(stop))
        step[0].end(_ns(ended))

    def _span(self, name: str, start: float, parent: Context, attributes: Attributes) -> tuple[Any, Context]:
        """Start a span; return it with the context of its children."""
        from opentelemetry.trace import set_span_in_context  # noqa: PLC0415 (an extra)

        span = self._tracer.start_span(name, context=parent, start_time=_ns(start), attributes=dict(attributes))
        return span, set_span_in_context(span, parent)


def place_stages(
    stages: list[Mapping[str, Any]], began: float, ended: float
) -> Iterator[tuple[Mapping[str, Any], float, float]]:
    """Yield the stages of a step with start and end, the rest of the step's time divided before, between and after
    them."""
    durations = [stage["wait_s"] + stage["compute_s"] + stage["sample_s"] for stage in stages]
    gap = max(0.0, ended - began - sum(durations)) / (len(stages) + 1)
    at = began
    for stage, duration in zip(stages, durations, strict=True):
        start = min(ended, at + gap)
        at = min(ended, start + duration)
        yield stage, start, at


def _ns(moment: float) -> int:
    return int(moment * 1e9)
