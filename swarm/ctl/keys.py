"""``swarmctl keys``: who may use the gateways, and how much. Works on the keys' file, which gateways watch."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.options import ConfigOption, JsonOption, load_settings

if TYPE_CHECKING:
    from swarm.keys.keys import Key, Ring
    from swarm.wire.messages import Json

keys_app = typer.Typer(
    help="Make, list and revoke API keys of the gateways.",
    epilog="Example: swarmctl keys add alice --rate 60 --keys-file ~/.config/swarm/keys.json",
    rich_markup_mode=None,
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--keys-file",
        metavar="FILE",
        help="File of the keys. [default: the setting gateway.keys_file, else keys.json in the state directory]",
    ),
]
NameArgument = Annotated[str, typer.Argument(help="The key's name, which is the tenant's.", show_default=False)]
_EXAMPLE = "--keys-file keys.json"


@keys_app.command("add", epilog=f"Example: swarmctl keys add alice --rate 60 --concurrency 8 {_EXAMPLE}")
def add(
    context: typer.Context,
    *,
    name: NameArgument,
    rate: Annotated[float, typer.Option("--rate", metavar="N", min=0, help="Requests a minute. 0: no limit.")] = 0.0,
    concurrency: Annotated[
        int, typer.Option("--concurrency", metavar="N", min=0, help="Requests at a time. 0: no limit.")
    ] = 0,
    tokens_per_day: Annotated[
        int,
        typer.Option(
            "--tokens-per-day", metavar="N", min=0, help="Tokens of prompts and answers, each day (UTC). 0: no limit."
        ),
    ] = 0,
    max_priority: Annotated[
        str, typer.Option("--max-priority", help="The highest priority it gets: high, normal, low or a number.")
    ] = "high",
    keys_file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a key, and show it, this once. Limits hold in each gateway's process."""
    from swarm.keys.file import change
    from swarm.keys.keys import Limits, make, priority_named

    limits = Limits(rate, concurrency, tokens_per_day, priority_named(max_priority))
    key, shown = make(name, limits, _now())
    change(_file(context, keys_file, config), lambda ring: ring.add(key))
    _show_new(key, shown, as_json)


@keys_app.command("list", epilog=f"Example: swarmctl keys list {_EXAMPLE}")
def list_(
    context: typer.Context, keys_file: FileOption = None, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Show the keys' names and limits; what was shown once is kept nowhere."""
    from swarm.cli.output import console, print_json
    from swarm.ctl.render import fields
    from swarm.keys.file import read
    from swarm.keys.keys import Ring

    ring = read(_file(context, keys_file, config)) or Ring()
    rows = [_row(key) for key in ring.keys]
    if as_json:
        print_json({"keys": rows})
    else:
        console().print(fields({"keys": rows}) if rows else "no keys")


@keys_app.command("revoke", epilog=f"Example: swarmctl keys revoke alice {_EXAMPLE}")
def revoke(
    context: typer.Context,
    name: NameArgument,
    keys_file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take a key back: gateways refuse it within a second. What it has under way is finished."""
    from swarm.cli.output import print_json
    from swarm.keys.file import change

    ring = change(_file(context, keys_file, config), lambda ring: ring.remove(name))
    if as_json:
        print_json({"revoked": name, "num_left": len(ring.keys)})
    else:
        print(f"revoked {name}; {len(ring.keys)} left" + ("" if ring.keys else ": nobody is served until one is added"))


@keys_app.command("rotate", epilog=f"Example: swarmctl keys rotate alice {_EXAMPLE}")
def rotate(
    context: typer.Context,
    name: NameArgument,
    keys_file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Make a new key in the place of an old one, with its limits, and show it, this once. The old one is refused."""
    from swarm.keys.file import change
    from swarm.keys.keys import make

    made: list[tuple[Key, str]] = []

    def renew(ring: Ring) -> Ring:
        made.append(make(name, ring.named(name).limits, _now()))
        return ring.replace(made[-1][0])

    change(_file(context, keys_file, config), renew)
    _show_new(*made[-1], as_json)


def _file(context: typer.Context, given: Path | None, config: Path | None) -> Path:
    """Where the gateways look too. Raises BadParameter if nobody says."""
    if given is not None:
        return given.expanduser()
    from swarm.keys.file import NAME

    settings = load_settings(context, config, {})
    if settings.gateway.keys_file is not None:
        return settings.gateway.keys_file
    if settings.state_dir is None:
        raise typer.BadParameter("nothing says where the keys are: set gateway.keys_file or state_dir, or --keys-file")
    return settings.state_dir / NAME


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _show_new(key: Key, shown: str, as_json: bool) -> None:
    from swarm.cli.output import print_json

    if as_json:
        print_json({**_row(key), "key": shown})
    else:
        print(f"{shown}\nThe key of {key.name}. It is shown this once: what is kept is its hash.")


def _row(key: Key) -> Json:
    limits = key.limits
    return {
        "name": key.name,
        "id": key.id,
        "created": key.created,
        "rate_per_min": limits.rate_per_min,
        "concurrency": limits.concurrency,
        "tokens_per_day": limits.tokens_per_day,
        "max_priority": limits.max_priority,
    }
