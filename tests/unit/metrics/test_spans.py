"""Traces are off and free unless somebody wants them; what is asked for is checked."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from swarm.errors import ConfigError, Unavailable
from swarm.metrics.tracing import MAX_OPEN_QUESTIONS, SpanExporter, make_span_exporter, place_stages


async def nothing(request_id: str) -> dict:
    raise AssertionError("nobody asks when traces are off")


@pytest.mark.parametrize("endpoint", [None, ""])
def test_without_an_endpoint_there_is_no_tracer(endpoint: str | None) -> None:
    assert make_span_exporter(endpoint, nothing) is None


def test_nothing_of_opentelemetry_is_imported_when_off() -> None:
    """Who doesn't want traces needs neither the packages nor the time to load them."""
    code = (
        "import sys; from swarm.metrics.tracing import make_span_exporter; "
        "assert make_span_exporter(None, None) is None; "
        "assert not [name for name in sys.modules if name.startswith('opentelemetry')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("endpoint", ["127.0.0.1:4318", "grpc://host:4317", "http://"])
def test_an_endpoint_that_is_none_is_refused_in_one_line(endpoint: str) -> None:
    with pytest.raises(ConfigError, match=r"is not an address like http://127\.0\.0\.1:4318"):
        make_span_exporter(endpoint, nothing)


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install 'swarm-llm\[tracing\]'"):
        make_span_exporter("http://127.0.0.1:1", nothing)


def stage(wait: float, compute: float) -> dict:
    return {"wait_s": wait, "compute_s": compute, "sample_s": 0.0}


def test_stages_lie_in_their_order_with_the_wire_between_them() -> None:
    """Each has its own duration; none begins before the step or ends after it."""
    stages = [stage(0.1, 0.2), stage(0.0, 0.4)]
    laid = [(start, stop) for _, start, stop in place_stages(stages, 10.0, 11.0)]
    assert laid == [(pytest.approx(10.1), pytest.approx(10.4)), (pytest.approx(10.5), pytest.approx(10.9))]
    # Stages that say more than the whole took: clocks of different machines run at different speeds.
    laid = [(start, stop) for _, start, stop in place_stages(stages, 10.0, 10.5)]
    assert laid == [(10.0, pytest.approx(10.3)), (pytest.approx(10.3), 10.5)]


def sdk_tracer(ask) -> SpanExporter:
    """One that sends nothing anywhere."""
    pytest.importorskip("opentelemetry.sdk", reason="needs the extra swarm-llm[tracing]")
    from opentelemetry.sdk.trace import TracerProvider

    return SpanExporter(TracerProvider(shutdown_on_exit=False), ask, 1.0, lambda: 1000.0)


async def test_few_questions_are_asked_at_a_time() -> None:
    """Many requests that end together are not allowed to occupy the broker: those beyond stay without a trace."""
    answer = asyncio.Event()
    asked = []

    async def ask(request_id: str) -> dict:
        asked.append(request_id)
        await answer.wait()
        return {"request_id": request_id, "age_s": 1.0, "ended_age_s": 0.5, "sequences": []}

    tracer = sdk_tracer(ask)
    async with asyncio.TaskGroup() as group:
        for number in range(MAX_OPEN_QUESTIONS + 3):
            group.create_task(tracer.export_request(f"r{number}", None, {}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        answer.set()
    assert (len(asked), tracer.num_missing) == (MAX_OPEN_QUESTIONS, 3)
    await tracer.export_request("later", None, {})
    assert asked[-1] == "later"


@pytest.mark.parametrize("error", [Unavailable("away"), TimeoutError(), OSError("no way")], ids=repr)
async def test_a_broker_that_cannot_tell_harms_nobody(error: Exception) -> None:
    async def ask(request_id: str) -> dict:
        raise error

    tracer = sdk_tracer(ask)
    await tracer.export_request("r", None, {})
    assert tracer.num_missing == 1


async def test_what_is_not_sampled_is_not_even_asked_for() -> None:
    tracer = sdk_tracer(nothing)
    await tracer.export_request("r", "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00", {})
    assert tracer.num_missing == 0
