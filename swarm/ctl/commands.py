"""``swarmctl``: ask a running swarm how it is, and tell it what to do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swarm.cli.about import completion
from swarm.cli.about.completion import worker_names
from swarm.cli.asking import YesOption, ask_first
from swarm.cli.options import JoinOption, JsonOption, UrlOption, open_client, read_size
from swarm.cli.output import EXIT_CODES
from swarm.ctl.invite import invite
from swarm.ctl.keys import keys_app
from swarm.ctl.look.doctor import doctor
from swarm.ctl.look.follow import events
from swarm.ctl.look.settings import config_app
from swarm.ctl.look.version import version
from swarm.ctl.top.command import top
from swarm.ctl.upgrade import upgrade

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.client.blocking import Client
    from swarm.client.governing import What
    from swarm.wire.messages import Json

app = typer.Typer(
    help="Govern a running swarm: ask how it is, add workers, let workers go.",
    epilog=f"Try: swarmctl status, then swarmctl nodes.\n\n{EXIT_CODES}",
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


WorkerArgument = Annotated[
    str,
    typer.Argument(
        help="The worker's name, as `swarmctl nodes` shows it.", show_default=False, autocompletion=worker_names
    ),
]


@dataclass(frozen=True, slots=True)
class Common:
    """Options that may stand before or behind a command's name."""

    url: str | None
    as_json: bool


@app.callback()
def common(context: typer.Context, url: UrlOption = None, join: JoinOption = None, as_json: JsonOption = False) -> None:
    """What stands before the command's name."""
    if join is not None:
        from swarm.cli.joining import join_here

        join_here(join)
    context.obj = Common(url, as_json)


def _report(what: What, help: str) -> None:
    """Make a command that asks for one report and shows it as ``render`` knows how to."""

    def command(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
        from swarm.ctl import render

        _answer(context, Common(url, as_json), lambda client: client.query(what), getattr(render, what))

    app.command(what, help=help, epilog=f"Example: swarmctl {what} --json")(command)


_report("status", "Whether it serves, and what it waits for.")
_report("nodes", "The workers, their layers and their health.")


@app.command(epilog="Example: swarmctl plan --dry-run --without w1")
def plan(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan that would be made now; change nothing.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            help="Suppose that this worker were gone (may be repeated).",
            show_default=False,
            autocompletion=worker_names,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="By this objective: throughput or latency.", show_default=False)
    ] = "",
    more: Annotated[
        int, typer.Option("--with", min=0, max=64, help="Suppose so many more workers, on machines of their own.")
    ] = 0,
    like: Annotated[
        str, typer.Option("--like", help="What those are like: a worker's name (default: the first of the plan).")
    ] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option("--pin", metavar="WORKER=FIRST-LAST", help="Give a worker just these layers (may be repeated)."),
    ] = None,
    cap: Annotated[
        list[str] | None,
        typer.Option("--cap", metavar="WORKER=N", help="Give a worker at most so many layers (may be repeated)."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude", metavar="WORKER", help="Give it none (may be repeated).", autocompletion=worker_names
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="Let --pin, --cap, --exclude and --objective count from now on, in the place of what was applied "
            "before (none of them: the settings alone), until the broker is started again.",
        ),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Who holds which layers, and why; predicted beside measured. With --dry-run, --pin, --cap, --exclude or
    --objective, what the plan would be; with --apply, it is made so."""
    from swarm.ctl import render
    from swarm.ctl.steering import by_hand, supposition

    own = Common(url, as_json)
    supposes = bool(without or more or like)
    if apply or pin or cap or exclude or (objective and not dry_run and not supposes):
        if supposes or (apply and dry_run):
            raise typer.BadParameter(
                "--without, --with and --like only suppose, and --dry-run changes nothing: not with --pin … --apply"
            )
        steer = by_hand(pin or [], cap or [], exclude or [], objective, dry_run=not apply)
        _answer(context, own, lambda client: client.steer(steer), render.plan)
        return
    if dry_run:
        suppose = supposition(without or [], objective, more, like)
        _answer(context, own, lambda client: client.suppose_plan(suppose), render.plan)
        return
    if supposes:
        raise typer.BadParameter("--without, --with and --like only suppose: add --dry-run")
    _answer(context, own, lambda client: client.query("plan"), render.plan)


@app.command(epilog="Example: swarmctl stats --watch 2")
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
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus", help="Print it for Prometheus (docs/reference/metrics.md), for a textfile collector."
        ),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Counters, sizes and times of the pipeline and its stages."""
    from swarm.ctl import render_stats
    from swarm.ctl.prometheus import print_metrics
    from swarm.ctl.watch import watch_stats

    outer: Common = context.obj
    if prometheus:
        if watch is not None or as_json or outer.as_json:
            raise typer.BadParameter("--prometheus prints once, in a form of its own: without --watch and --json")
        print_metrics(lambda: open_client(context, url or outer.url))
    elif watch is None:
        _answer(context, Common(url, as_json), lambda client: client.query("stats"), render_stats.stats)
    else:
        watch_stats(open_client(context, url or outer.url), watch, as_json=as_json or outer.as_json)


@app.command(epilog="Example: swarmctl trace, or swarmctl trace 3f2a")
def trace(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="[REQUEST]",
            help="The request's id, as `swarmctl requests` and the log show it, or an answer's over HTTP; "
            "its beginning suffices. "
            "[default: the newest]",
            show_default=False,
        ),
    ] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Where each token's time went: queue, wire, compute, sampling, broker, and every stage."""
    from swarm.ctl import render_trace
    from swarm.govern.orders import plain_id

    _answer(context, Common(url, as_json), lambda client: client.trace(plain_id(request)), render_trace.trace)


@app.command(epilog="Example: swarmctl requests --all")
def requests(
    context: typer.Context,
    all: Annotated[
        bool, typer.Option("--all", help="Also all that have ended, as far as the journal has them; 1000 at most.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """The requests under way, and those that ended last, the latest first, if the broker has a journal."""
    from swarm.ctl import render

    _answer(context, Common(url, as_json), lambda client: client.query("requests", all=all), render.requests)


@app.command(epilog="Example: swarmctl cancel 8c5f1c2e6a94d7b03f5e9a1d2c7b4e60")
def cancel(
    context: typer.Context,
    request: Annotated[
        str,
        typer.Argument(
            metavar="REQUEST", help="The request's id, as `swarmctl requests` shows it.", show_default=False
        ),
    ],
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """End a request, whoever made it. One that has ended stays as it is."""
    from swarm.ctl import render

    ask_first(f"End the request {request}?", yes=yes)

    def end(client: Client) -> Json:
        client.cancel(request)
        return {"request_id": request, "state": "ended"}

    _answer(context, Common(url, as_json), end, render.fields)


_report("recoveries", "What was lost, how sequences went on, and how long each part took, beside what was predicted.")
app.command(epilog="Example: swarmctl events --follow")(events)
app.command(epilog="Example: swarmctl top --every 2")(top)
app.command(short_help="What it suffers from, and what to do.", epilog="Example: swarmctl doctor")(doctor)


@app.command(epilog="Example: swarmctl join --count 2 --memory-limit 4GiB")
def join(
    context: typer.Context,
    count: Annotated[int, typer.Option("--count", min=1, max=64, help="How many workers to start.")] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit", help="Memory of each one's whole process, like 8GiB or 500MB.", show_default=False
        ),
    ] = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a running `swarm up` start more workers."""
    from swarm.ctl import render

    limit = None if memory_limit is None else read_size(memory_limit)
    _answer(context, Common(url, as_json), lambda client: client.join(count, limit), render.fields)


@app.command(epilog="Example: swarmctl stop w1")
def stop(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    worker: WorkerArgument,
    force: Annotated[bool, typer.Option("--force", help="Even if the swarm can't serve without it.")] = False,
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a worker hand over and leave."""
    from swarm.ctl import render

    ask_first(f"Stop worker {worker}{', whether or not the swarm can serve without it' if force else ''}?", yes=yes)
    _answer(context, Common(url, as_json), lambda client: client.stop_worker(worker, force=force), render.fields)


def _steering(verb: Literal["cordon", "uncordon"], help: str) -> None:
    """Make a command that says of one worker whether it gets layers."""

    def command(
        context: typer.Context, worker: WorkerArgument, url: UrlOption = None, as_json: JsonOption = False
    ) -> None:
        from swarm.ctl import render
        from swarm.ctl.steering import of_worker

        steer = of_worker(verb, worker)
        _answer(context, Common(url, as_json), lambda client: client.steer(steer), render.fields)

    app.command(verb, help=help, epilog=f"Example: swarmctl {verb} w1")(command)


_steering("cordon", "Give a worker no new layers; what it has it serves on. Holds for its name, until the broker ends.")
_steering("uncordon", "Let a worker have layers again.")


@app.command(epilog="Example: swarmctl drain w1")
def drain(
    context: typer.Context,
    worker: WorkerArgument,
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Have a worker hand over its layers and get no new ones until uncordon; its process stays (stop ends it, too)."""
    from swarm.ctl import render
    from swarm.ctl.steering import of_worker

    steer = of_worker("drain", worker)
    ask_first(f"Drain worker {worker}?", yes=yes)
    _answer(context, Common(url, as_json), lambda client: client.steer(steer), render.fields)


@app.command(epilog="Example: swarmctl rebalance")
def rebalance(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Even if the best plan is no quicker than this one.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make the best plan now if it is quicker at all, without waiting until it is by more than plan.margin."""
    from swarm.ctl import render
    from swarm.wire.messages import Steer

    steer = Steer(verb="rebalance", force=force)
    _answer(context, Common(url, as_json), lambda client: client.steer(steer), render.plan)


@app.command(epilog="Example: swarmctl standby --json")
def standby(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Who keeps which layers warm for others, and which layers nobody does."""
    from swarm.ctl import render
    from swarm.govern.orders import kept

    _answer(context, Common(url, as_json), lambda client: kept(client.query("nodes")), render.standby)


def _answer(
    context: typer.Context, own: Common, ask: Callable[[Client], Json], show: Callable[[Json], RenderableType]
) -> None:
    """Ask, and print the answer for people or for programs."""
    from swarm.cli.output import console, print_json

    outer: Common = context.obj
    with open_client(context, own.url or outer.url) as client:
        body = ask(client)
    if own.as_json or outer.as_json:
        print_json(body)
    else:
        console().print(show(body))


app.command(epilog="Example: swarmctl version --gateway http://127.0.0.1:8000")(version)
app.command(epilog="Example: swarmctl upgrade --rolling")(upgrade)
app.command(epilog="Example: swarmctl invite --role worker --for 1h")(invite)
app.add_typer(keys_app, name="keys")
app.add_typer(config_app, name="config")
app.command("completion", epilog="Example: swarmctl completion bash")(completion.command("swarmctl"))
