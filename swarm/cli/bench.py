"""``swarm bench``: the throughput and latency of an OpenAI-compatible server under load."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import JsonOption
from swarm.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, JsonProgress, make_console, print_json
from swarm.errors import InvalidRequest, SwarmError
from swarm.version import install_command

if TYPE_CHECKING:
    from swarm.bench.document import Document, PointResult
    from swarm.bench.lengths import Lengths
    from swarm.bench.processes.pipe_messages import ShareProgress
    from swarm.bench.run import Bench, BenchOptions, BenchView

_DEFAULT_S = 10.0


class Api(StrEnum):
    chat = "chat"
    completions = "completions"


def bench(
    url: Annotated[
        str, typer.Argument(metavar="URL", help="The server: http://host:8000, or with a path that ends in /v1.")
    ],
    *,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="[default: the first one listed]", show_default=False),
    ] = None,
    api: Annotated[Api, typer.Option("--api", help="Endpoint to call.")] = Api.chat,
    stream: Annotated[bool, typer.Option("--stream/--no-stream", help="Get answers token by token, or whole.")] = True,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "-c", "--concurrency", metavar="N", min=1, max=20000, help="Closed loop: N in flight. [default: 8]"
        ),
    ] = None,
    rate: Annotated[
        float | None,
        typer.Option("--rate", metavar="R", min=0.001, max=1e6, help="Open loop: R requests/s, Poisson arrivals."),
    ] = None,
    sweep: Annotated[
        bool, typer.Option("--sweep", help="Double the requests in flight until the server is full.")
    ] = False,
    max_concurrency: Annotated[
        int, typer.Option("--max-concurrency", metavar="N", min=1, max=20000, help="Upper limit of a sweep.")
    ] = 256,
    gain: Annotated[
        float,
        typer.Option("--gain", metavar="PERCENT", min=0.1, max=100, help="End a sweep when doubling gains less."),
    ] = 5.0,
    duration: Annotated[
        str | None, typer.Option("-d", "--duration", metavar="TIME", help="Duration of each load. [default: 10s]")
    ] = None,
    count: Annotated[
        int | None, typer.Option("-n", "--count", metavar="N", min=1, help="Number of requests, instead of a time.")
    ] = None,
    warmup: Annotated[
        str | None,
        typer.Option(
            "--warmup",
            metavar="N|TIME",
            help="Before each load, not measured: requests, or a time such as 5s. [default: as many as are in flight]",
        ),
    ] = None,
    prompt: Annotated[
        str, typer.Option("--prompt", metavar="TOKENS", help="Lengths of prompts: N, uniform:…, lognormal:…, file:….")
    ] = "128",
    output: Annotated[str, typer.Option("--output", metavar="TOKENS", help="Lengths of answers, likewise.")] = "128",
    shared_prefix: Annotated[
        int,
        typer.Option("--shared-prefix", metavar="TOKENS", min=0, max=1_000_000, help="Additional common prefix."),
    ] = 0,
    prefixes: Annotated[
        int, typer.Option("--prefixes", metavar="N", min=1, max=10_000, help="Number of different prefixes.")
    ] = 1,
    token_ids: Annotated[
        str | None,
        typer.Option(
            "--token-ids", metavar="LOW:HIGH", help="Prompts are random ids, lengths exact (--api completions)."
        ),
    ] = None,
    extra: Annotated[
        list[str] | None,
        typer.Option("--extra", metavar="KEY=JSON", help="Add to each request, such as ignore_eos=true. Repeatable."),
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
    ] = None,
    processes: Annotated[
        int, typer.Option("--processes", metavar="N", min=1, max=64, help="Client processes that share the load.")
    ] = 1,
    goodput: Annotated[
        str | None,
        typer.Option("--goodput", metavar="LIMITS", help="Count requests within: ttft=500ms,tpot=50ms,e2e=10s."),
    ] = None,
    retries: Annotated[
        int, typer.Option("--retries", metavar="N", min=0, max=100, help="After 429 or 503, following Retry-After.")
    ] = 3,
    timeout: Annotated[str, typer.Option("--timeout", metavar="TIME", help="Per request, including retries.")] = "120s",
    deadline: Annotated[str, typer.Option("--deadline", metavar="TIME", help="For the whole run.")] = "1h",
    seed: Annotated[int, typer.Option("--seed", help="For prompts, lengths and arrivals.")] = 0,
    ceiling: Annotated[
        bool, typer.Option("--ceiling/--no-ceiling", help="First measure this tool's own limit here.")
    ] = True,
    title: Annotated[str, typer.Option("--title", help="Title of the report.")] = "swarm bench",
    html: Annotated[
        Path | None, typer.Option("--html", metavar="FILE", help="Write the report as one page, with plots.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Put load on any OpenAI-compatible server and measure latencies, tokens per second and errors.

    The report goes to stdout, progress to stderr: live on a terminal, JSON lines elsewhere. The first Ctrl-C ends the
    run with a report of the measurements so far and exit code 130; a second one ends it immediately. Exit code 1 if no
    request succeeded or the deadline passed. Needs the extra bench.
    """
    _need_aiohttp()
    from swarm.bench.plan import (
        BenchTarget,
        LatencyLimits,
        LoadPoint,
        RequestShape,
        base_url,
        parse_extras,
        parse_limits,
        parse_seconds,
    )
    from swarm.bench.run import BenchOptions, SweepOptions

    if rate is not None and (sweep or concurrency is not None):
        raise typer.BadParameter("--rate is an open loop; --concurrency and --sweep are closed ones: choose one")
    if duration is not None and count is not None:
        raise typer.BadParameter("--duration or --count: give one of them")
    ids = _parse_token_ids(token_ids, api) if token_ids is not None else None
    shape = RequestShape(
        _parse_lengths(prompt, "--prompt"), _parse_lengths(output, "--output"), seed, shared_prefix, prefixes, ids
    )
    limits = parse_limits(goodput) if goodput else LatencyLimits()
    warm_s, warm_count = _parse_warm_up(warmup)
    point = LoadPoint(
        concurrency=None if rate is not None else concurrency or (1 if sweep else 8),
        rate=rate,
        duration_s=parse_seconds(duration, "--duration") if duration else None if count else _DEFAULT_S,
        count=count,
        warmup_s=warm_s,
        warmup_count=warm_count,
    )
    target = BenchTarget(
        url=base_url(url),
        model=model or "",
        api=api.value,
        stream=stream,
        key_env=_key_variable(api_key_env),
        extra=parse_extras(extra or []),
        timeout_s=parse_seconds(timeout, "--timeout"),
        max_retries=retries,
    )
    given = _given_options(
        prompt=prompt, output=output, shared_prefix=shared_prefix, prefixes=prefixes, token_ids=token_ids,
        concurrency=point.concurrency, rate=rate, sweep=sweep, duration=_seconds(point.duration_s), count=count,
        warmup=warmup,
        extra=target.extra, goodput=goodput, retries=retries, timeout=_seconds(target.timeout_s), seed=seed,
    )  # fmt: skip
    _check_page(html)
    wanted = BenchOptions(
        title=title,
        target=target,
        shape=shape,
        point=point,
        sweep=SweepOptions(point.concurrency or 1, max(max_concurrency, point.concurrency or 1), gain / 100)
        if sweep
        else None,
        limits=limits,
        num_processes=processes,
        measures_ceiling=ceiling,
        deadline_s=parse_seconds(deadline, "--deadline"),
        asked=given,
    )
    document = asyncio.run(_run(wanted))
    _report(document, html, as_json)
    if document.ended == "interrupted":
        raise typer.Exit(EXIT_INTERRUPTED)
    if document.ended == "deadline" or not any(point.figures.succeeded for point in document.points):
        raise typer.Exit(EXIT_FAILED)


def _seconds(value: float | None) -> str | None:
    return None if value is None else f"{value:g} s"


def _need_aiohttp() -> None:
    try:
        import aiohttp  # noqa: F401
    except ModuleNotFoundError:
        command = install_command("bench")
        raise SwarmError(f"swarm bench needs aiohttp, which is not installed: {command}") from None


def _given_options(**options: object) -> dict[str, object]:
    """Return the options that were given, without the ones that were not."""
    return {name: value for name, value in options.items() if value not in (None, False, {}, 0) or name == "seed"}


def _parse_token_ids(text: str, api: Api) -> tuple[int, int]:
    if api is not Api.completions:
        raise typer.BadParameter("--token-ids needs --api completions: chats are text")
    low, _, high = text.partition(":")
    if not (low.isdecimal() and high.isdecimal() and int(low) <= int(high) < 10_000_000):
        raise typer.BadParameter(f"--token-ids {text!r}: give the smallest and the largest id, such as 100:30000")
    return int(low), int(high)


def _parse_lengths(text: str, option: str) -> Lengths:
    from swarm.bench.lengths import parse_lengths

    def read_file(path: str) -> str:
        try:
            return Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{option}: {path!r} can't be read: {error}") from None

    try:
        return parse_lengths(text, read_file)
    except InvalidRequest as error:
        raise typer.BadParameter(f"{option}: {error}") from None


def _parse_warm_up(text: str | None) -> tuple[float, int | None]:
    """Parse a warm-up: a plain number is a number of requests, a number with a unit is a time."""
    from swarm.bench.plan import parse_seconds

    if text is None:
        return 0.0, None
    if text.isdecimal():
        return 0.0, min(int(text), 1_000_000)
    return parse_seconds(text, "--warmup"), 0


def _key_variable(name: str | None) -> str | None:
    if name is not None and not os.environ.get(name):
        raise typer.BadParameter(f"--api-key-env {name}: there is no such variable in the environment, or it is empty")
    return name


def _check_page(path: Path | None) -> None:
    """Check before the run that the report can be written, because a run may take an hour."""
    if path is None:
        return
    try:
        with path.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise InvalidRequest(f"--html {path}: can't be written: {error.strerror}") from None


async def _run(wanted: BenchOptions) -> Document:
    from dataclasses import replace

    from swarm.bench.processes.probe import first_model
    from swarm.bench.run import Bench

    if not wanted.target.model:
        key = os.environ.get(wanted.target.key_env) if wanted.target.key_env else None
        model = await first_model(wanted.target.url, key)
        wanted = replace(wanted, target=replace(wanted.target, model=model))
    view, shown = _view()
    bench = Bench(wanted, view)
    with shown:
        return await _interruptible(bench)


async def _interruptible(bench: Bench) -> Document:
    """Run the benchmark; the first Ctrl-C (or SIGTERM) stops it in order, a second one cancels it."""
    loop, task = asyncio.get_running_loop(), asyncio.create_task(bench.run())
    interrupts: list[int] = []

    def interrupt() -> None:
        interrupts.append(1)
        if len(interrupts) == 1:
            bench.stop()
        else:
            task.cancel()

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, interrupt)
    try:
        return await task
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(number)


def _view() -> tuple[BenchView, AbstractContextManager[object]]:
    """Return the display of progress: live on a terminal, JSON lines elsewhere."""
    if not sys.stderr.isatty():
        return JsonLinesView(JsonProgress(sys.stderr).report), nullcontext()
    from rich.console import Console

    from swarm.bench.report.live import LiveView

    live = LiveView(Console(stderr=True, highlight=False))
    return live, live


class JsonLinesView:
    """Progress for programs: a JSON object per line, at most one per second while a load is held."""

    def __init__(self, report: Callable[[tuple[str, ...], dict[str, object]], None]) -> None:
        self._report = report
        self._last = 0.0  # time of the last progress line

    def stage(self, text: str) -> None:
        self._report((), {"event": "note", "text": text})

    def begin(self, load: str, seconds: float | None, count: int | None) -> None:
        self._report((), {"event": "load", "load": load})

    def progress(self, progress: ShareProgress) -> None:
        import time

        now = time.monotonic()
        if now - self._last < 1.0:
            return
        self._last = now
        counts = {"num_ok": progress.num_ok, "num_failed": progress.num_failed, "num_in_flight": progress.num_in_flight}
        self._report((), {"event": "progress", **counts, "num_pieces": progress.num_pieces})

    def on_point_measured(self, result: PointResult) -> None:
        from swarm.bench.report.table import summarise_point

        self._report((), {"event": "point", "text": summarise_point(result)})


def _report(document: Document, html: Path | None, as_json: bool) -> None:
    from swarm.bench.document import without_series
    from swarm.bench.report.table import render_table

    if html is not None:
        from swarm.bench.report.page import render_page

        try:
            html.write_text(render_page(document), encoding="utf-8")
        except OSError as error:
            print(f"swarm bench: {html} can't be written: {error.strerror}", file=sys.stderr)
    if as_json:
        print_json(without_series(document))
    else:
        make_console().print(render_table(document))
