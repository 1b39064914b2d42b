"""The ``swarm`` program's commands. Each imports what it needs when it is called."""

from __future__ import annotations

from typing import Annotated

import typer

from swarm.cli.batch import command as batch
from swarm.cli.bench import bench
from swarm.cli.discover import discover
from swarm.cli.doctor.command import doctor
from swarm.cli.embed import embed
from swarm.cli.generate.chat import chat
from swarm.cli.generate.generate import attach, generate
from swarm.cli.meta import completion
from swarm.cli.meta.show import show
from swarm.cli.options import GlobalOptions, LogFormat, LogLevel
from swarm.cli.output import EXIT_CODES
from swarm.cli.profile.command import profile
from swarm.cli.run import broker, config_app, gateway, worker
from swarm.cli.sim import sim
from swarm.cli.systemd import command as systemd
from swarm.cli.up.command import up
from swarm.version import __version__

app = typer.Typer(
    help="Run one language model over several processes and machines; answers continue when some of them die.",
    epilog=f'Try: swarm up, and in another terminal: swarm generate "Once upon a time"\n\n{EXIT_CODES}',
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

app.command(short_help="Run a broker and workers on this machine.", epilog=f"Example: {_UP}")(up)
app.command(short_help="Run the broker: queue, plan and health.", epilog=f"Example: {_BROKER}")(broker)
app.command(short_help="Run a worker: one device that computes layers.", epilog=f"Example: {_WORKER}")(worker)
app.command(short_help="Serve HTTP: OpenAI's API and Anthropic's.", epilog=f"Example: {_GATEWAY}")(gateway)
app.command(epilog=f"Example: {_GENERATE}")(generate)
app.command(short_help="Read the answer to a request made before.", epilog=f"Example: {_ATTACH}")(attach)
app.command(epilog=f"Example: {_CHAT}")(chat)
app.command(short_help="Print the embeddings of texts.", epilog=f"Example: {_EMBED}")(embed)
app.command(short_help="Measure a swarm, phase by phase.", epilog=f"Example: {_PROFILE}")(profile)
app.command(short_help="Measure any OpenAI-compatible server under load.", epilog=f"Example: {_BENCH}")(bench)
app.command(short_help="Find swarms on the local network.", epilog="Example: swarm discover")(discover)
app.command(short_help="Check whether this machine is fit.", epilog="Example: swarm doctor --model DIR")(doctor)
app.command(short_help="Simulate swarms and faults.", epilog="Example: swarm sim --schedules 1000")(sim)
config_app.command(
    "show",
    short_help="Show each setting's value, and where it comes from.",
    epilog="Example: swarm config show --changed",
)(show)
app.add_typer(config_app, name="config")
app.add_typer(batch.app, name="batch", short_help="Run files of requests at a gateway.")
app.add_typer(systemd.app, name="systemd", short_help="Run Swarm by systemd.")
app.command(
    "completion", short_help="Print the script that completes command lines.", epilog="Example: swarm completion bash"
)(completion.make_command("swarm"))
