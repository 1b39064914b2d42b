"""Traces of a real swarm, as a collector gets them: request, steps, stages, with the times that they took."""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from swarm import AsyncClient
from swarm.metrics.tracing import MAX_TOKENS, SpanExporter, make_span_exporter
from tests.faults.zygote import Zygote
from tests.integration.processes import Processes

pytest.importorskip("opentelemetry.sdk", reason="needs the extra swarm-llm[tracing]")

SENDER = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
AROUND_S = 0.25  # the way of the broker's answer, on a busy machine: what absolute times may be wrong by


class Collector(ThreadingHTTPServer):
    """Takes spans as OTLP over HTTP brings them."""

    daemon_threads = True

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, str]] = []
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.resources.append({a.key: a.value.string_value for a in resource.resource.attributes})
            for scope in resource.scope_spans:
                self.server.spans.extend(scope.spans)
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *arguments: object) -> None:
        """Say nothing."""


@pytest.fixture
def collector() -> Iterator[Collector]:
    with Collector() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture(scope="module")
def swarm(random_llama: Path, zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    halves = {"SWARM_PLAN__PINS": '{"w0": "0-3", "w1": "4-7"}'}  # else the split follows measured speeds
    with Processes(random_llama, tmp_path_factory.mktemp("logs"), options=halves, launch=zygote) as processes:
        processes.start(2)
        yield processes


@pytest.fixture
async def client(swarm: Processes) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(swarm.url, connect_timeout_s=60) as client:
        await swarm.until_serving(client, 2)
        yield client


def tracer_for(collector: Collector, client: AsyncClient, **options: Any) -> SpanExporter:
    made = make_span_exporter(collector.url, client.trace, **options)
    assert made is not None
    return made


def attributes(span: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in span.attributes}


def below(spans: list[Any], parent: Any) -> list[Any]:
    """In the order of their beginnings."""
    return sorted((s for s in spans if s.parent_span_id == parent.span_id), key=lambda s: s.start_time_unix_nano)


ROUNDED_NS = 10_000  # each time that the broker tells is rounded to a microsecond, and several are added up


def within(inner: Any, outer: Any) -> bool:
    begins = outer.start_time_unix_nano <= inner.start_time_unix_nano + ROUNDED_NS
    return begins and inner.end_time_unix_nano <= outer.end_time_unix_nano + ROUNDED_NS


async def test_a_request_is_a_tree_with_the_times_that_it_took(client: AsyncClient, collector: Collector) -> None:
    """A step per token, a stage per worker in each, all within what they belong to; durations are the broker's."""
    tracer = tracer_for(collector, client)
    began = time.time()
    done = await client.generate([1, 5, 9], max_tokens=10, ignore_eos=True, request_id="traced", timeout=60)
    ended = time.time()
    await tracer.export_request("traced", None, {"swarm.api": "chat"})
    trace: Any = await client.trace("traced")
    await tracer.close()
    (request,) = [span for span in collector.spans if span.name == "swarm.request"]
    assert request.parent_span_id == b""
    assert attributes(request) == {"swarm.request_id": "traced", "swarm.api": "chat"}
    assert collector.resources[0]["service.name"] == "swarm"
    assert abs(request.start_time_unix_nano / 1e9 - began) < AROUND_S
    assert abs(request.end_time_unix_nano / 1e9 - ended) < AROUND_S
    whole_s = (request.end_time_unix_nano - request.start_time_unix_nano) / 1e9
    assert whole_s == pytest.approx(done.timing.total_s, abs=1e-4)

    (sequence,) = trace["sequences"]
    steps = below(collector.spans, request)
    assert [(s.name, attributes(s)["swarm.token"]) for s in steps] == [("swarm.step", i) for i in range(10)]
    for step, token in zip(steps, sequence["tokens"], strict=True):
        assert within(step, request)
        took_s = (step.end_time_unix_nano - step.start_time_unix_nano) / 1e9
        assert took_s == pytest.approx(token["total_s"] - token["queue_s"] - token["broker_s"], abs=1e-4)
        stages = below(collector.spans, step)
        assert [s.name for s in stages] == ["swarm.stage"] * 2
        assert [attributes(s)["swarm.worker"] for s in stages] == [stage["worker"] for stage in token["stages"]]
        assert [attributes(s)["swarm.layers"] for s in stages] == ["0-3", "4-7"]
        assert all(within(stage, step) for stage in stages)
        assert stages[0].end_time_unix_nano <= stages[1].start_time_unix_nano
        for span, stage in zip(stages, token["stages"], strict=True):
            told_s = stage["wait_s"] + stage["compute_s"] + stage["sample_s"]
            assert (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9 == pytest.approx(told_s, abs=1e-4)
    assert len({span.trace_id for span in collector.spans}) == 1


async def test_a_request_belongs_to_its_senders_trace(client: AsyncClient, collector: Collector) -> None:
    """And is left out if the sender leaves it out, or if the share of those that are traced says so."""
    tracer = tracer_for(collector, client, share=0.0)
    for number, header in enumerate((f"{SENDER}-01", f"{SENDER}-00", None, "nonsense")):
        await client.generate([1, 5, 9], max_tokens=2, request_id=f"sent-{number}", timeout=60)
        await tracer.export_request(f"sent-{number}", header, {})
    await tracer.close()
    (request,) = [span for span in collector.spans if span.name == "swarm.request"]
    assert attributes(request)["swarm.request_id"] == "sent-0"
    assert (request.trace_id.hex(), request.parent_span_id.hex()) == tuple(SENDER.split("-")[1:])


async def test_continuations_stand_side_by_side_and_long_ones_are_cut(
    client: AsyncClient, collector: Collector
) -> None:
    tracer = tracer_for(collector, client)
    await client.generate([1], n=2, max_tokens=MAX_TOKENS + 9, ignore_eos=True, request_id="two", timeout=60)
    await tracer.export_request("two", None, {})
    await tracer.close()
    choices = [attributes(span)["swarm.choice"] for span in collector.spans if span.name == "swarm.step"]
    assert sorted(choices) == [0] * MAX_TOKENS + [1] * MAX_TOKENS


async def test_what_cannot_be_told_is_counted_and_harms_nobody(client: AsyncClient, collector: Collector) -> None:
    """The broker does not know it, or there is no collector."""
    tracer = tracer_for(collector, client)
    await tracer.export_request("nobody-knows-it", None, {})
    await tracer.close()
    assert (tracer.num_missing, collector.spans) == (1, [])
