"""``swarm config show``: each setting's value, and where it comes from."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from swarm.cli.options import ConfigOption, JsonOption, common_overrides, load_settings
from swarm.cli.output import print_json, window_width

if TYPE_CHECKING:
    from swarm.wire.messages import Json

# Credentials that a service manager may pass to a process, with their purpose. The key itself is never shown.
_CREDENTIALS: Final = {
    "swarm.key": "the broker's own key",
    "swarm.joined": "what joining another machine's swarm brought",
    "swarm.hub-token": "the token for the model hub",
}


def show(
    context: typer.Context,
    file: Annotated[
        Path | None, typer.Argument(metavar="[FILE]", help="Settings file (TOML), as with --config.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only what is not at its default.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show each setting's value, and where it comes from: the defaults, the file, an environment variable, the command
    line (options before the command's name), or a systemd credential. Passwords are hidden.

    The values are those of a process started here and now; swarmctl config show shows the values of running ones.
    """
    from swarm.config import DEFAULTS, origins
    from swarm.config.display import hide_credentials

    if file is not None and config is not None:
        raise typer.BadParameter(f"two settings files are named, {file} and {config}: name one")
    load_settings(context, file or config, {})  # raises errors that name the wrong setting and its origin
    found = origins(file or config, common_overrides(context))
    rows: list[Json] = [
        {"name": name, "value": hide_credentials(value), "from": origin}
        for name, (value, origin) in found.items()
        if not changed or origin != DEFAULTS
    ]
    passed = list(list_credentials(os.environ.get("CREDENTIALS_DIRECTORY")))
    if as_json:
        print_json({"settings": rows, "credentials": passed})
    else:
        print("\n".join(format_settings(rows, passed, window_width())) or "every setting is at its default")


def list_credentials(directory: str | None) -> Iterator[Json]:
    """Yield the credentials that were passed to this process, by name."""
    for name, what in _CREDENTIALS.items() if directory else ():
        path = Path(directory or "") / name
        if path.is_file():
            yield {"name": name, "what": what, "from": f"the credential {path}"}


def format_settings(rows: list[Json], handed: list[Json], width: int | None = None) -> list[str]:
    """Return the settings as lines with aligned columns, or with the origin below if they don't fit into ``width``.

    Lines are never wrapped: users copy paths from them.
    """
    cells = [(str(row["name"]), _format_value(row["value"]), str(row["from"])) for row in rows]
    cells += [(str(row["what"]), "(hidden)", str(row["from"])) for row in handed]
    wide = [max((len(row[column]) for row in cells), default=0) for column in (0, 1)]
    lines = [f"{name:{wide[0]}}  {value:{wide[1]}}  {origin}" for name, value, origin in cells]
    if width is None or max(map(len, lines), default=0) <= width:
        return lines
    return [f"{name}: {value}\n  ({origin})" for name, value, origin in cells]


def _format_value(value: object) -> str:
    import json

    return "unset" if value is None else json.dumps(value, ensure_ascii=False)
