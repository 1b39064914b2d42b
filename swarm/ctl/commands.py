"""The commands of ``swarmctl``: inspect and administer a running swarm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from swarm.cli.confirm import YesOption, confirm_or_exit
from swarm.cli.meta import completion
from swarm.cli.meta.completion import worker_names
from swarm.cli.options import JoinOption, JsonOption, UrlOption, check_device, open_client, read_size
from swarm.cli.output import EXIT_CODES
from swarm.ctl.adapters import adapters_app
from swarm.ctl.inspect.doctor import doctor
from swarm.ctl.inspect.follow import events
from swarm.ctl.inspect.settings import config_app
from swarm.ctl.inspect.version import version
from swarm.ctl.invite import invite
from swarm.ctl.keys import keys_app
from swarm.ctl.top.command import top
from swarm.ctl.upgrade import upgrade

if TYPE_CHECKING:
    from rich.console import RenderableType

    from swarm.client.admin import ReportName
    from swarm.client.blocking import Client
    from swarm.wire.messages import Json

app = typer.Typer(
    help="Inspect and administer a running swarm: status, plans, workers, keys.",
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
class CommonOptions:
    """Options that may precede or follow a command's name."""

    url: str | None
    as_json: bool


@app.callback()
def common(context: typer.Context, url: UrlOption = None, join: JoinOption = None, as_json: JsonOption = False) -> None:
    """Handle the options before the command's name."""
    if join is not None:
        from swarm.cli.joining import enrol_client

        enrol_client(join)
    context.obj = CommonOptions(url, as_json)


def _add_report_command(what: ReportName, help: str) -> None:
    """Define a command that queries one report and displays it with the ``render`` function of the same name."""

    def command(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
        from swarm.ctl import render

        _run_query(context, CommonOptions(url, as_json), lambda client: client.query(what), getattr(render, what))

    app.command(what, help=help, epilog=f"Example: swarmctl {what} --json")(command)


_add_report_command("status", "Show whether the swarm serves, and what it waits for.")
_add_report_command("nodes", "List the workers, their layers and their health.")


@app.command(
    short_help="Show which worker holds which layers, and why.", epilog="Example: swarmctl plan --dry-run --without w1"
)
def plan(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Show the plan that would be made now; change nothing.")
    ] = False,
    without: Annotated[
        list[str] | None,
        typer.Option(
            "--without",
            help="Plan without this worker (may be repeated).",
            show_default=False,
            autocompletion=worker_names,
        ),
    ] = None,
    objective: Annotated[
        str, typer.Option("--objective", help="Plan for this objective: throughput or latency.", show_default=False)
    ] = "",
    more: Annotated[
        int, typer.Option("--with", min=0, max=64, help="Plan with this many more workers, on machines of their own.")
    ] = 0,
    like: Annotated[
        str, typer.Option("--like", help="The worker that they resemble (default: the first of the plan).")
    ] = "",
    pin: Annotated[
        list[str] | None,
        typer.Option(
            "--pin", metavar="WORKER=FIRST-LAST", help="Give a worker exactly these layers (may be repeated)."
        ),
    ] = None,
    cap: Annotated[
        list[str] | None,
        typer.Option("--cap", metavar="WORKER=N", help="Give a worker at most N layers (may be repeated)."),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option(
            "--exclude",
            metavar="WORKER",
            help="Give a worker no layers (may be repeated).",
            autocompletion=worker_names,
        ),
    ] = None,
    apply: Annotated[
        bool,
        typer.Option(
            "--apply",
            help="Apply --pin, --cap, --exclude and --objective from now on, replacing those applied before (none "
            "given: back to the settings), until the broker restarts.",
        ),
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show which worker holds which layers, and why; predicted and measured times.

    With --dry-run, --pin, --cap, --exclude or --objective, show what the plan would be; with --apply, change it.
    """
    from swarm.ctl import render
    from swarm.ctl.plan_options import override_command, plan_preview

    own = CommonOptions(url, as_json)
    supposes = bool(without or more or like)
    if apply or pin or cap or exclude or (objective and not dry_run and not supposes):
        if supposes or (apply and dry_run):
            raise typer.BadParameter(
                "--without, --with and --like only preview, and --dry-run changes nothing: not with --pin … --apply"
            )
        steer = override_command(pin or [], cap or [], exclude or [], objective, dry_run=not apply)
        _run_query(context, own, lambda client: client.steer(steer), render.plan)
        return
    if dry_run:
        suppose = plan_preview(without or [], objective, more, like)
        _run_query(context, own, lambda client: client.suppose_plan(suppose), render.plan)
        return
    if supposes:
        raise typer.BadParameter("--without, --with and --like only preview: add --dry-run")
    _run_query(context, own, lambda client: client.query("plan"), render.plan)


@app.command(short_help="Show load, speed and losses; --all: all figures.", epilog="Example: swarmctl stats --watch 2")
def stats(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    watch: Annotated[
        float | None,
        typer.Option(
            "--watch",
            metavar="SECONDS",
            min=0.1,
            max=3600,
            help="Refresh every SECONDS until Ctrl-C; with --json, print one line each time.",
            show_default=False,
        ),
    ] = None,
    prometheus: Annotated[
        bool,
        typer.Option(
            "--prometheus",
            help="Print in Prometheus' text format (docs/reference/metrics.md), for a textfile collector.",
        ),
    ] = False,
    all: Annotated[
        bool, typer.Option("--all", help="Show all figures, those of each stage too. --json always has all.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the swarm's load, speed and losses, or all counters, sizes and times of the pipeline and its stages."""
    from swarm.ctl.stats import print_metrics, render_stats, watch_stats
    from swarm.ctl.stats_summary import render_summary

    render = render_stats if all else render_summary
    outer: CommonOptions = context.obj
    if prometheus:
        if watch is not None or as_json or outer.as_json or all:
            raise typer.BadParameter(
                "--prometheus prints all, once, in a form of its own: without --watch, --json and --all"
            )
        print_metrics(lambda: open_client(context, url or outer.url))
    elif watch is None:
        _run_query(context, CommonOptions(url, as_json), lambda client: client.query("stats"), render)
    else:
        watch_stats(open_client(context, url or outer.url), watch, render=render, as_json=as_json or outer.as_json)


@app.command(short_help="Show where each token's time went.", epilog="Example: swarmctl trace, or swarmctl trace 3f2a")
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
    """Show where each token's time went: queue, wire, compute, sampling, broker, and every stage."""
    from swarm.admin.orders import parse_request_id
    from swarm.ctl import render_trace

    _run_query(
        context, CommonOptions(url, as_json), lambda client: client.trace(parse_request_id(request)), render_trace.trace
    )


@app.command(short_help="List active requests, and those that ended last.", epilog="Example: swarmctl requests --all")
def requests(
    context: typer.Context,
    all: Annotated[
        bool, typer.Option("--all", help="Include requests that have ended and are in the journal; 1000 at most.")
    ] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """List active requests, and those that ended last (if the broker has a journal), the latest first."""
    from swarm.ctl import render

    _run_query(context, CommonOptions(url, as_json), lambda client: client.query("requests", all=all), render.requests)


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
    """End any client's request. A request that has ended stays as it is."""
    from swarm.ctl import render

    confirm_or_exit(f"End the request {request}?", yes=yes)

    def end(client: Client) -> Json:
        client.cancel(request)
        return {"request_id": request, "state": "ended"}

    _run_query(context, CommonOptions(url, as_json), end, render.fields)


_add_report_command(
    "recoveries", "List recoveries: what was lost, and what continued. Durations are measured and predicted."
)
app.command(
    short_help="Show events: workers, recoveries, plans, problems.", epilog="Example: swarmctl events --follow"
)(events)
app.command(short_help="Show the swarm live, on the whole terminal.", epilog="Example: swarmctl top --every 2")(top)
app.command(short_help="Check the swarm: list problems with remedies.", epilog="Example: swarmctl doctor")(doctor)


@app.command(
    short_help="Start more workers on a running `swarm up`.",
    epilog="Example: swarmctl join --count 2 --device cuda:1 --memory-limit 4GiB",
)
def join(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    count: Annotated[int, typer.Option("--count", min=1, max=64, help="How many workers to start.")] = 1,
    memory_limit: Annotated[
        str | None,
        typer.Option(
            "--memory-limit", help="Memory of each one's whole process, like 8GiB or 500MB.", show_default=False
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="cpu, cuda, cuda:N, mps or auto. [default: that of the `swarm up`]",
            show_default=False,
        ),
    ] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Start more workers on a running `swarm up`. Without one, show the command that starts a worker."""
    from swarm.ctl import render

    limit = None if memory_limit is None else read_size(memory_limit)
    name = device and check_device(device)
    _run_query(context, CommonOptions(url, as_json), lambda client: client.join(count, limit, name), render.fields)


@app.command(epilog="Example: swarmctl stop w1")
def stop(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    worker: WorkerArgument,
    force: Annotated[bool, typer.Option("--force", help="Even if the swarm can't serve without this worker.")] = False,
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Stop a worker after it has handed over its layers."""
    from swarm.ctl import render

    confirm_or_exit(
        f"Stop worker {worker}{', whether or not the swarm can serve without it' if force else ''}?", yes=yes
    )
    _run_query(
        context, CommonOptions(url, as_json), lambda client: client.stop_worker(worker, force=force), render.fields
    )


def _add_placement_command(verb: Literal["cordon", "uncordon"], help: str) -> None:
    """Define a command that controls whether a worker gets layers."""

    def command(
        context: typer.Context, worker: WorkerArgument, url: UrlOption = None, as_json: JsonOption = False
    ) -> None:
        from swarm.ctl import render
        from swarm.ctl.plan_options import worker_command

        steer = worker_command(verb, worker)
        _run_query(context, CommonOptions(url, as_json), lambda client: client.steer(steer), render.fields)

    app.command(verb, help=help, epilog=f"Example: swarmctl {verb} w1")(command)


_add_placement_command(
    "cordon", "Give a worker no new layers; it keeps those it has. Applies to its name, until the broker restarts."
)
_add_placement_command("uncordon", "Allow a worker to get layers again.")


@app.command(short_help="Move a worker's layers to others.", epilog="Example: swarmctl drain w1")
def drain(
    context: typer.Context,
    worker: WorkerArgument,
    yes: YesOption = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Move a worker's layers to others, and give it no new ones until uncordon. Its process continues (stop ends it,
    too)."""
    from swarm.ctl import render
    from swarm.ctl.plan_options import worker_command

    steer = worker_command("drain", worker)
    confirm_or_exit(f"Drain worker {worker}?", yes=yes)
    _run_query(context, CommonOptions(url, as_json), lambda client: client.steer(steer), render.fields)


@app.command(short_help="Switch to the best plan now.", epilog="Example: swarmctl rebalance")
def rebalance(
    context: typer.Context,
    force: Annotated[bool, typer.Option("--force", help="Even if the best plan is not faster than this one.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Switch to the best plan now if it is faster at all, even if by less than plan.margin."""
    from swarm.ctl import render
    from swarm.wire.messages import PlanCommand

    steer = PlanCommand(verb="rebalance", force=force)
    _run_query(context, CommonOptions(url, as_json), lambda client: client.steer(steer), render.plan)


@app.command(short_help="Show which workers keep which layers warm.", epilog="Example: swarmctl standby --json")
def standby(context: typer.Context, url: UrlOption = None, as_json: JsonOption = False) -> None:
    """Show which workers keep which layers warm as standbys, and which layers have no standby."""
    from swarm.admin.orders import standby_report
    from swarm.ctl import render

    _run_query(
        context, CommonOptions(url, as_json), lambda client: standby_report(client.query("nodes")), render.standby
    )


def _run_query(
    context: typer.Context, own: CommonOptions, query: Callable[[Client], Json], show: Callable[[Json], RenderableType]
) -> None:
    """Send a query and print the answer, for people or as JSON."""
    from swarm.cli.output import make_console, print_json

    outer: CommonOptions = context.obj
    with open_client(context, own.url or outer.url) as client:
        body = query(client)
    if own.as_json or outer.as_json:
        print_json(body)
    else:
        make_console().print(show(body))


app.command(
    short_help="Show the build of every process.", epilog="Example: swarmctl version --gateway http://127.0.0.1:8000"
)(version)
app.command(short_help="Restart workers with the installed version.", epilog="Example: swarmctl upgrade --rolling")(
    upgrade
)
app.command(short_help="Let another machine join.", epilog="Example: swarmctl invite --role worker --for 1h")(invite)
app.add_typer(keys_app, name="keys", short_help="API keys, and keys of machines.")
app.add_typer(adapters_app, name="adapters", short_help="LoRA adapters: list, load and drop them.")
app.add_typer(config_app, name="config")
app.command(
    "completion",
    short_help="Print the script that completes command lines.",
    epilog="Example: swarmctl completion bash",
)(completion.make_command("swarmctl"))
