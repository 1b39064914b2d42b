"""``swarmctl``: asks a running swarm how it is, and tells it what to do."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.client.blocking import Client
    from swarm.wire.messages import Json, Suppose

app = typer.Typer(
    help="Govern a running swarm: ask how it is, add workers, let workers go.",
    epilog="Try: swarmctl status, then swarmctl nodes.",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class Common:
    """Options that may stand before or behind a command's name."""

    url: str | None
    as_json: bool


UrlOption = Annotated[
    str | None,
    typer.Option("--url", help="The broker's front door [env: SWARM_URL; default: tcp://127.0.0.1:5700]."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print the answer as JSON, for programs.")]


@app.callback()
def common(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """What stands before the command's name."""
    context.obj = Common(url, as_json)


@app.command()
def status(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Whether it serves, and what it waits for."""
    from swarm.ctl import render

    _answer(context, Common(url, as_json), lambda client: client.query("status"), render.status)


@app.command()
def nodes(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The workers, their layers and their health."""
    from swarm.ctl import render

    _answer(context, Common(url, as_json), lambda client: client.query("nodes"), render.nodes)


@app.command()
def plan(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan that would be made now; change nothing.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option("--without", help="Suppose that this worker were gone (may be repeated).", show_default=False),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="Suppose this objective: throughput or latency.", show_default=False)
    ] = "",
    more: Annotated[
        int, typer.Option("--with", min=0, max=64, help="Suppose so many more workers, on machines of their own.")
    ] = 0,
    like: Annotated[
        str, typer.Option("--like", help="What those are like: a worker's name (default: the first of the plan).")
    ] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who holds which layers, and why; predicted beside measured. With --dry-run, what the plan would be."""
    from swarm.ctl import render

    own = Common(url, as_json)
    if dry_run:
        suppose = _supposition(without or [], objective, more, like)
        _answer(context, own, lambda client: client.suppose_plan(suppose), render.plan)
        return
    if without or objective or more or like:
        raise typer.BadParameter("--without, --objective, --with and --like only suppose: add --dry-run")
    _answer(context, own, lambda client: client.query("plan"), render.plan)


def _supposition(without: list[str], objective: str, more: int, like: str) -> Suppose:
    import msgspec

    from swarm.wire.messages import Suppose

    values = {"without": tuple(without), "objective": objective, "more": more or int(bool(like)), "like": like}
    if objective not in ("", "auto", "throughput", "latency"):
        raise typer.BadParameter(f"--objective takes throughput or latency, not {objective!r}")
    return msgspec.convert(list(values.values()), Suppose)


@app.command()
def stats(
    context: typer.Context,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="SECONDS",
            min=0.1,
            max=3600,
            help="Show it again and again, every so many seconds, until Ctrl-C; with --json, one line each.",
            show_default=False,
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Counters, sizes and times of the pipeline and its stages."""
    from swarm.ctl import render_stats
    from swarm.ctl.watch import watch_stats

    outer: Common = context.obj
    if watch is None:
        _answer(context, Common(url, as_json), lambda client: client.query("stats"), render_stats.stats)
    else:
        watch_stats(url or outer.url, watch, as_json=as_json or outer.as_json)


@app.command()
def trace(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST]",
            help="The request's id, as `swarmctl requests` and the log show it; its beginning suffices. "
            "[default: the newest]",
            show_default=False,
        ),
    ] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where each token's time went: queue, wire, compute, sampling, broker, and every stage."""
    from swarm.ctl import render_trace

    _answer(context, Common(url, as_json), lambda client: client.trace(request), render_trace.trace)


@app.command()
def requests(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """The requests under way."""
    from swarm.ctl import render

    _answer(context, Common(url, as_json), lambda client: client.query("requests"), render.requests)


@app.command()
def join(
    context: typer.Context,
    count: Annotated[int, typer.Option("--count", min=1, max=64, help="How many workers to start.")] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option("--memory-limit", help="Memory of each one's whole process, like 8G or 500M.", show_default=False),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a running `swarm up` start more workers."""
    from swarm.ctl import render

    limit = None if memory_limit is None else parse_bytes(memory_limit)
    _answer(context, Common(url, as_json), lambda client: client.join(count, limit), render.fields)


@app.command()
def stop(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="The worker's name, as `swarmctl nodes` shows it.", show_default=False)],
    force: Annotated[bool, typer.Option("--force", help="Even if the swarm can't serve without it.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a worker hand over and leave."""
    from swarm.ctl import render

    _answer(context, Common(url, as_json), lambda client: client.stop_worker(worker, force=force), render.fields)


def _answer(
    context: typer.Context, own: Common, ask: Callable[[Client], Json], show: Callable[[Json], RenderableType]
) -> None:
    """Ask, and print the answer for people or for programs."""
    from swarm.cli.output import print_json
    from swarm.client.blocking import Client
    from swarm.ctl.render import console

    outer: Common = context.obj
    with Client(own.url or outer.url) as client:
        body = ask(client)
    if own.as_json or outer.as_json:
        print_json(body)
    else:
        console().print(show(body))


def parse_bytes(text: str) -> int:
    """8G → 8 · 2³⁰."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    size = int(float(found[1]) * _UNITS[found[2]]) if found else 0
    if size <= 0:
        raise typer.BadParameter(f"--memory-limit takes a size like 8G or 500M, not {text!r}")
    return size
