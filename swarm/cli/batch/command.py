"""``swarm batch run | list | show | cancel``."""

from __future__ import annotations

import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import JsonOption
from swarm.cli.output import EXIT_FAILED, EXIT_INTERRUPTED, ConsoleProgress, print_error, print_json, print_table
from swarm.errors import InvalidRequest

if TYPE_CHECKING:
    from swarm.cli.batch.http import GatewayClient, Json

app = typer.Typer(
    help="Run files of requests at a gateway, with the lowest priority.",
    epilog="Example: swarm batch run requests.jsonl --output answers.jsonl",
)

GatewayOption = Annotated[str, typer.Option("--gateway", metavar="URL", help="The gateway.")]
KeyOption = Annotated[
    str | None, typer.Option("--api-key-env", metavar="NAME", help="Environment variable that holds the API key.")
]
GATEWAY = "http://127.0.0.1:8000"


@app.command(epilog="Example: swarm batch run requests.jsonl --output answers.jsonl")
def run(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="Requests in OpenAI's format, one per line (JSONL).")],
    *,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="FILE", help="File of the answers. [default: FILE.answers.jsonl]"),
    ] = None,
    errors: Annotated[
        Path | None, typer.Option("--errors", metavar="FILE", help="File of the errors. [default: OUTPUT.errors]")
    ] = None,
    window: Annotated[
        str, typer.Option("--window", metavar="TIME", help="Time until unanswered requests expire, up to 30d.")
    ] = "24h",
    new: Annotated[bool, typer.Option("--new", help="Run the requests again, even if there are answers.")] = False,
    gateway: GatewayOption = GATEWAY,
    api_key_env: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a file of requests, and write its answers.

    Progress goes to stderr. The batch continues without this command. After Ctrl-C, or a restart of anything, the same
    command follows the same batch: its file's content identifies it. Exit code 1 if a request failed.
    """
    from swarm.cli.batch.run import BatchInput, create_batch, find_batch, follow, write_results

    progress = ConsoleProgress(sys.stderr)
    source = BatchInput.read(file)
    answers = output or file.with_name(f"{file.name}.answers.jsonl")
    client = _client(gateway, api_key_env, progress)
    batch: Json | None = None
    try:
        batch = None if new else find_batch(client, source)
        if batch is None:
            batch = create_batch(client, source, window, is_new=new)
        batch = follow(client, batch, progress.set_status)
        written = write_results(client, batch, answers, errors or answers.with_name(f"{answers.name}.errors"))
    except KeyboardInterrupt:
        progress.clear_status()
        if batch is not None:
            progress.print_line(f"{batch['id']} continues; the same command follows it again")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    progress.clear_status()
    if as_json:
        print_json({**batch, "files": [str(path) for path in written]})
    else:
        print(_summary(batch, written))
    _exit_by(batch)


@app.command("list", epilog="Example: swarm batch list")
def list_batches(
    *, gateway: GatewayOption = GATEWAY, api_key_env: KeyOption = None, as_json: JsonOption = False
) -> None:
    """List the newest hundred batches."""
    batches = _client(gateway, api_key_env).get("/v1/batches?limit=100")["data"]
    if as_json:
        print_json(batches)
        return
    rows = []
    for batch in batches:
        counts = batch["request_counts"]
        created = datetime.fromtimestamp(batch["created_at"], UTC).astimezone().strftime("%Y-%m-%d %H:%M")
        numbers = (f"{counts[name]:,}" for name in ("completed", "failed", "total"))
        rows.append((batch["id"], batch["status"], *numbers, created))
    print_table(("batch", "status", "answered", "failed", "total", "created"), rows, optional=("created",))


@app.command(epilog="Example: swarm batch show batch_5f0c")
def show(
    batch_id: Annotated[str, typer.Argument(metavar="ID", help="The batch.")],
    *,
    gateway: GatewayOption = GATEWAY,
    api_key_env: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the state of a batch, and why it failed."""
    batch = _client(gateway, api_key_env).get(f"/v1/batches/{_check_id(batch_id)}")
    if as_json:
        print_json(batch)
    else:
        print(_summary(batch, []))


@app.command(epilog="Example: swarm batch cancel batch_5f0c")
def cancel(
    batch_id: Annotated[str, typer.Argument(metavar="ID", help="The batch.")],
    *,
    gateway: GatewayOption = GATEWAY,
    api_key_env: KeyOption = None,
    as_json: JsonOption = False,
) -> None:
    """Cancel a batch. Answers that it has stay available."""
    batch = _client(gateway, api_key_env).post(f"/v1/batches/{_check_id(batch_id)}/cancel", {})
    if as_json:
        print_json(batch)
    else:
        print(_summary(batch, []))


def _client(url: str, key_env: str | None, progress: ConsoleProgress | None = None) -> GatewayClient:
    from swarm.cli.batch.http import GatewayClient

    key = os.environ.get(key_env or "", "")
    if key_env and not key:
        raise InvalidRequest(f"the environment variable {key_env} is not set")
    if progress is None:
        return GatewayClient(url, key)
    return GatewayClient(url, key, lambda reason: progress.set_status(f"waiting: {reason}"))


def _check_id(batch_id: str) -> str:
    if not batch_id.isascii() or not batch_id.replace("_", "").isalnum():
        raise InvalidRequest(f"{batch_id!r} is no id of a batch", code="unknown")
    return batch_id


def _summary(batch: Json, written: list[Path]) -> str:
    counts = batch["request_counts"]
    lines = [
        f"{batch['id']} {batch['status']}: {counts['completed']:,} of {counts['total']:,} answered, "
        f"{counts['failed']:,} failed"
    ]
    for error in (batch["errors"] or {}).get("data", ()):
        place = f"line {error['line']}: " if error["line"] is not None else ""
        lines.append(f"  {place}{error['message']}")
    return "\n".join([*lines, *(f"  {path}" for path in written)])


def _exit_by(batch: Json) -> None:
    if batch["status"] != "completed" or batch["request_counts"]["failed"]:
        if batch["status"] == "failed":
            raise typer.Exit(print_error("swarm", "the batch was not accepted: correct the lines above"))
        raise typer.Exit(EXIT_FAILED)
