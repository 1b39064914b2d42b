"""The ``swarm`` program's commands. Each imports what it needs when it is called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from swarm.cli import models
from swarm.cli.batch import command as batch
from swarm.cli.bench import bench
from swarm.cli.demo import demo
from swarm.cli.discover import discover
from swarm.cli.doctor.command import doctor
from swarm.cli.embed import embed
from swarm.cli.generate.chat import chat
from swarm.cli.generate.generate import attach, generate
from swarm.cli.meta import completion
from swarm.cli.meta.show import show
from swarm.cli.models import pull
from swarm.cli.options import GlobalOptions, LogFormat, LogLevel
from swarm.cli.output import EXIT_CODES
from swarm.cli.profile.command import profile
from swarm.cli.run import broker, config_app, gateway, worker
from swarm.cli.sim import sim
from swarm.cli.systemd import command as systemd
from swarm.cli.up.command import up
from swarm.cli.up.manage import down, logs, ps
from swarm.version import __version__

# Commands of similar programs, and what does that here.
_OTHERS_COMMANDS = {
    "run": "swarm up, then swarm chat",
    "serve": "swarm up",
    "start": "swarm up --detach",
    "stop": "swarm down",
    "status": "swarm ps, or swarmctl status",
    "list": "swarm models",
    "ls": "swarm models",
    "show": "swarm models check",
}


class SectionedGroup(TyperGroup):
    """Group whose help lists its commands in sections (``rich_help_panel``, which typer uses only with rich)."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the line names. For one that other programs have, name ours."""
        ours = _OTHERS_COMMANDS.get(args[0])
        if ours is not None and args[0] not in self.commands:
            ctx.fail(f"No such command '{args[0]}': use {ours}.")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        width = max(map(len, self.commands))
        sections: dict[str, list[tuple[str, str]]] = {}
        for name, command in self.commands.items():
            row = (name.ljust(width), command.get_short_help_str(limit=formatter.width))
            sections.setdefault(getattr(command, "rich_help_panel", None) or "Commands", []).append(row)
        for title, rows in sections.items():
            with formatter.section(title):
                formatter.write_dl(rows)


app = typer.Typer(
    cls=SectionedGroup,
    help="Run one language model over several processes and machines; answers continue when some of them die.",
    epilog=f'Try: swarm demo; swarm up --detach; swarm generate "Once upon a time"\n\n{EXIT_CODES}',
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"swarm {__version__}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    log_level: Annotated[
        LogLevel | None, typer.Option("--log-level", help="Lowest level that is logged, to stderr.")
    ] = None,
    log_format: Annotated[
        LogFormat | None, typer.Option("--log-format", help="auto: readable on a terminal, JSON lines elsewhere.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options before the command's name."""
    context.obj = GlobalOptions(log_level, log_format)


_UP = "swarm up --model /models/llama --workers 3 --memory-limit 8GiB"
_BROKER = "swarm broker --port 5700 --min-workers 2"
_WORKER = "swarm worker --url tcp://127.0.0.1:5700 --model /models/llama --name left"
_GATEWAY = "swarm gateway --url tcp://127.0.0.1:5700 --http 8000"
_GENERATE = 'swarm generate "Once upon a time" --max-tokens 60 --temperature 0.8 --seed 7'
_ATTACH = "swarm attach 8c5f1c2e6a94d7b03f5e9a1d2c7b4e60 --from 20"
_CHAT = 'echo "What colour is the cat?" | swarm chat --system "Be brief."'
_EMBED = 'swarm embed "The cat sleeps." "A dog barks." --dimensions 256'
_PROFILE = "swarm profile --model /models/llama --workers 2 --json"
_BENCH = "swarm bench http://127.0.0.1:8000 --sweep --output 64 --html report.html"

_PULL = "swarm pull owner/name:Q4_K_M"

_HERE, _USE, _SERVICES, _CHECK = "On this machine", "Use a swarm", "Services", "Check and measure"


def _add(
    function: Callable[..., None], panel: str, example: str, short_help: str | None = None, name: str | None = None
) -> None:
    app.command(name, short_help=short_help, epilog=f"Example: {example}", rich_help_panel=panel)(function)


_add(demo, _HERE, "swarm demo", "See a worker die and its answer go on.")
_add(up, _HERE, _UP, "Run a broker and workers on this machine.")
_add(ps, _HERE, "swarm ps", "List what swarm up runs here.")
_add(logs, _HERE, "swarm logs --follow", "Print what a swarm up has reported.")
_add(down, _HERE, "swarm down", "End a swarm up.")
_add(pull, _HERE, _PULL, "Download a model from the hub.")
app.add_typer(
    models.app, name="models", short_help="List the models in the hub's cache, or check one.", rich_help_panel=_HERE
)
_add(generate, _USE, _GENERATE)
_add(chat, _USE, _CHAT)
_add(embed, _USE, _EMBED, "Print the embeddings of texts.")
_add(attach, _USE, _ATTACH, "Read the answer to a request made before.")
app.add_typer(batch.app, name="batch", short_help="Run files of requests at a gateway.", rich_help_panel=_USE)
_add(broker, _SERVICES, _BROKER, "Run the broker: queue, plan and health.")
_add(worker, _SERVICES, _WORKER, "Run a worker: one device that computes layers.")
_add(gateway, _SERVICES, _GATEWAY, "Serve HTTP: OpenAI's API and Anthropic's.")
app.add_typer(systemd.app, name="systemd", short_help="Run Swarm by systemd.", rich_help_panel=_SERVICES)
app.add_typer(config_app, name="config", rich_help_panel=_SERVICES)
config_app.command(
    "show",
    short_help="Show each setting's value, and where it comes from.",
    epilog="Example: swarm config show --changed",
)(show)
_add(doctor, _CHECK, "swarm doctor --model DIR", "Check whether this machine is fit.")
_add(discover, _CHECK, "swarm discover", "Find swarms on the local network.")
_add(profile, _CHECK, _PROFILE, "Measure a swarm, phase by phase.")
_add(bench, _CHECK, _BENCH, "Measure any OpenAI-compatible server under load.")
_add(sim, _CHECK, "swarm sim --schedules 1000", "Simulate swarms and faults.")
_add(
    completion.make_command("swarm"),
    _CHECK,
    "swarm completion bash",
    "Print the script that completes command lines.",
    "completion",
)
