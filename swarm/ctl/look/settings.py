"""``swarmctl config show``: by which settings a running process runs, asked of itself."""

from __future__ import annotations

import http.client
import json
import os
import urllib.error
import urllib.request
from typing import TYPE_CHECKING, Annotated, Final
from urllib.parse import urlsplit

import typer

from swarm.cli.about.completion import worker_names
from swarm.cli.options import JsonOption, UrlOption, open_client

if TYPE_CHECKING:
    from swarm.wire.messages import Json

_PATIENCE_S: Final = 5.0
_MOST_BYTES: Final = 1 << 20

config_app = typer.Typer(
    help="Settings of running processes.", epilog="Example: swarmctl config show --worker w1 --changed"
)


@config_app.callback()
def config() -> None:
    """Settings of running processes."""


@config_app.command(epilog="Example: swarmctl config show --worker w1 --changed")
def show(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    worker: Annotated[
        str,
        typer.Option(
            "--worker",
            metavar="NAME",
            help="Of this worker. [default: of the broker]",
            show_default=False,
            autocompletion=worker_names,
        ),
    ] = "",
    gateway: Annotated[
        str,
        typer.Option("--gateway", metavar="URL", help="Of the gateway at http://HOST:PORT.", show_default=False),
    ] = "",
    api_key_env: Annotated[
        str | None,
        typer.Option(
            "--api-key-env", metavar="VARIABLE", help="With --gateway: the variable that holds an admin's API key."
        ),
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not at its default.")] = False,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """By which settings the broker runs, or a worker, or a gateway: each value that it reads, and where it comes from.
    Passwords are hidden.

    A broker's and a gateway's are those of now, after a reload too; a worker's, those that it had when it joined. What
    a process would get that is started here and now: swarm config show.
    """
    from swarm.cli.about.show import lines
    from swarm.cli.output import print_json
    from swarm.config import DEFAULTS
    from swarm.govern.rows import rows_of

    if worker and gateway:
        raise typer.BadParameter("--worker and --gateway name two processes: give one of them")
    outer = context.obj
    if gateway:
        body = _of_gateway(gateway, _key(api_key_env))
    else:
        with open_client(context, url or outer.url) as client:
            body = client.settings(worker)
    rows = [dict(row) for row in rows_of(body.get("settings")) if not changed or row.get("from") != DEFAULTS]
    if as_json or outer.as_json:
        print_json({**body, "settings": rows})
    else:
        print("\n".join(lines(rows, [])) or "every setting is at its default")


def _key(variable: str | None) -> str:
    if variable is not None and not os.environ.get(variable):
        raise typer.BadParameter(f"--api-key-env names a variable that holds the key, and {variable} is empty or unset")
    return os.environ[variable] if variable is not None else ""


def _of_gateway(address: str, key: str) -> Json:
    """Ask it over HTTP. Raises Unavailable, or RequestFailed in its words."""
    from swarm.errors import RequestFailed, Unavailable

    parts = urlsplit(address)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise typer.BadParameter(f"--gateway takes a URL like http://127.0.0.1:8000, not {address!r}")
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asked = urllib.request.Request(f"{parts.scheme}://{parts.netloc}/console/settings", headers=headers)
    try:
        with urllib.request.urlopen(asked, timeout=_PATIENCE_S) as answer:
            body = json.loads(answer.read(_MOST_BYTES))
    except urllib.error.HTTPError as error:
        raise RequestFailed(f"the gateway at {address} says {error.code}: {_words(error)}") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"no gateway answers at {address} ({reason})") from None
    except http.client.HTTPException:
        raise Unavailable(f"no gateway answers at {address} (what is there speaks no HTTP)") from None
    if not isinstance(body, dict):
        raise RequestFailed(f"what answers at {address} is no gateway of Swarm's")
    return body


def _words(error: urllib.error.HTTPError) -> str:
    """Why it refuses; no such path is there where gateway.console is off."""
    try:
        return str(json.loads(error.read(_MOST_BYTES))["error"]["message"])
    except (OSError, ValueError, KeyError, TypeError):
        return error.reason
