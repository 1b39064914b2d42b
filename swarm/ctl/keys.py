"""``swarmctl keys``: manage API keys (in a file that gateways watch) and machines' keys (stored by the broker)."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.confirm import YesOption, confirm_or_exit
from swarm.cli.options import ConfigOption, JsonOption, UrlOption, load_settings, open_client

if TYPE_CHECKING:
    from swarm.api_keys.keys import ApiKey, KeySet
    from swarm.client.blocking import Client
    from swarm.errors import ClientError
    from swarm.wire.messages import Json

keys_app = typer.Typer(
    help="Keys: the gateways' API keys, and those of machines that have joined (swarmctl invite).",
    epilog="Example: swarmctl keys add alice --rate 60 --keys-file ~/.config/swarm/keys.json",
    rich_markup_mode=None,
)

FileOption = Annotated[
    Path | None,
    typer.Option(
        "--keys-file",
        metavar="FILE",
        help="File of the keys. [default: the setting gateway.keys_file, else keys.json in the state directory, or in "
        "that of the running swarm up]",
    ),
]
OwnNameArgument = Annotated[
    str | None,
    typer.Argument(
        help="Name of the API key or machine; with --machine, this machine's name in a swarm. [default: the swarm "
        "joined last]",
        show_default=False,
    ),
]
BrokerOption = Annotated[bool, typer.Option("--broker", help="The broker's own key; repeat it to see the progress.")]
NowOption = Annotated[
    bool,
    typer.Option("--now", help="With --broker: retire the old key now; machines without the new one are locked out."),
]
OwnOption = Annotated[bool, typer.Option("--machine", help="This machine's own key in a swarm.")]
NameArgument = Annotated[str, typer.Argument(help="The key's name; an API key's is its tenant's.", show_default=False)]
ApiOption = Annotated[bool, typer.Option("--api", help="Only API keys.")]
MachineOption = Annotated[bool, typer.Option("--machine", help="Only machines' keys and invitations.")]
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
    admin: Annotated[
        bool, typer.Option("--admin", help="It may administer the swarm from the console, and see all requests.")
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="NAME", help="A model that it may use; repeat it for several. [default: all]"),
    ] = None,
    keys_file: FileOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Create an API key and show it, only this once. Limits apply to each gateway process."""
    from swarm.api_keys.file import update_keys
    from swarm.api_keys.keys import KeyLimits, make_key, parse_priority

    limits = KeyLimits(rate, concurrency, tokens_per_day, parse_priority(max_priority))
    key, shown = make_key(name, limits, _now(), admin=admin, models=tuple(model or ()))
    update_keys(_keys_path(context, keys_file, config), lambda ring: ring.add(key))
    _show_new(key, shown, as_json)


@keys_app.command(
    "list", short_help="List keys; secrets are not stored.", epilog="Example: swarmctl keys list --machine"
)
def list_(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    api: ApiOption = False,
    machine: MachineOption = False,
    keys_file: FileOption = None,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """List keys: names, limits, roles; secrets are not stored. With --keys-file, list only that file's keys."""
    from swarm.cli.output import make_console, print_json
    from swarm.ctl import machine_keys
    from swarm.ctl.render_keys import keys
    from swarm.errors import RequestFailed

    kinds = _selected_kinds(api, machine, keys_file)
    body: Json = {}
    error: ClientError | None = None
    if "api" in kinds:
        ring = _read_keys(context, keys_file, config, is_required=kinds == {"api"})
        body["keys"] = [_row(key) for key in ring.keys]
    if "machine" in kinds:
        with open_client(context, url or _outer_url(context)) as client:
            told, error = machine_keys.query_keys(client)
        body |= {"members": told.get("members", []), "invitations": told.get("invitations", [])}
        about = {what: told.get(what) for what in ("key", "former_key", "locked")}
        body |= {"problem": str(error)} if error else about
    if as_json:
        print_json(body)
    else:
        make_console().print(keys({**body, **machine_keys.with_ages(body)} if "machine" in kinds else body))
    if error is not None and (isinstance(error, RequestFailed) or kinds == {"machine"}):
        raise error  # A refusal is a failure; an absent broker is one only if nothing else was requested.


@keys_app.command("revoke", epilog="Example: swarmctl keys revoke alice")
def revoke(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    name: NameArgument,
    api: ApiOption = False,
    machine: MachineOption = False,
    keys_file: FileOption = None,
    yes: YesOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Revoke a key. An API key: gateways refuse it within a second; its active requests finish. A machine's key, by its
    name or prefix: its connections end immediately. An invitation: it can't be used any more."""
    kinds = _selected_kinds(api, machine, keys_file)
    confirm_or_exit(f"Revoke the key {name}?", yes=yes)
    problem = ""
    with open_client(context, url or _outer_url(context)) as client:
        if len(kinds) > 1:
            kind, problem = _kind_of(name, _read_keys(context, keys_file, config, is_required=False), client)
            kinds = {kind}
        if kinds == {"machine"}:
            client.revoke_key(name)
            _print_result({"revoked": name, "kind": "machine"}, f"revoked {name}", as_json)
            return
    from swarm.api_keys.file import update_keys

    left = len(update_keys(_keys_path(context, keys_file, config), lambda ring: ring.remove(name)).keys)
    text = f"revoked {name}; {left} left" + ("" if left else ": no request is served until one is added")
    text += f"\nmachines' keys are unknown: {problem}" if problem else ""
    _print_result({"revoked": name, "kind": "api", "num_left": left}, text, as_json)


def _print_result(body: Json, text: str, as_json: bool) -> None:
    from swarm.cli.output import print_json

    if as_json:
        print_json(body)
    else:
        print(text)


def _kind_of(name: str, ring: KeySet, client: Client) -> tuple[str, str]:
    """Return the kind of the key with this name, and why machines' keys are unknown, if they are. Raises ConfigError if
    it may be both, or does not exist."""
    from swarm.ctl import machine_keys
    from swarm.errors import ConfigError

    told, error = machine_keys.query_keys(client)
    problem = "" if error is None else str(error)
    is_api, is_machine = any(key.name == name for key in ring.keys), machine_keys.has_key(told, name)
    if is_api and is_machine:
        raise ConfigError(f"{name!r} is an API key and a machine's: choose with --api or --machine")
    if not is_api and not is_machine:
        unknown = f"; machines' keys are unknown: {problem}" if problem else ""
        raise ConfigError(f"there is no key {name!r} (swarmctl keys list){unknown}")
    return ("api" if is_api else "machine"), problem


@keys_app.command(
    "show", short_help="Show the broker's public key, and the swarms joined.", epilog="Example: swarmctl keys show"
)
def show(
    context: typer.Context,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show the broker's public key, and which swarms this machine has joined. No secrets."""
    from swarm.auth.memberships import default_state_dir
    from swarm.cli.output import make_console, print_json
    from swarm.ctl import machine_keys
    from swarm.ctl.render_keys import memberships

    settings = load_settings(context, config, {})
    with open_client(context, url or _outer_url(context)) as client:
        description, error = machine_keys.query_keys(client)
    body: Json = {"key": description.get("key") or "", "problem": "" if error is None else str(error)}
    body["joined"] = machine_keys.list_memberships(settings.state_dir or default_state_dir())
    if as_json:
        print_json(body)
    else:
        make_console().print(memberships(body))


@keys_app.command("rotate", epilog=f"Example: swarmctl keys rotate alice {_EXAMPLE}")
def rotate(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    name: OwnNameArgument = None,
    machine: OwnOption = False,
    broker: BrokerOption = False,
    now: NowOption = False,
    keys_file: FileOption = None,
    yes: YesOption = False,
    url: UrlOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replace a key by a new one.

    An API key: keeps its limits and rights; the new key is shown only this once; the old one is refused. A member's, by
    its name: its machine generates a new key now, or when it connects next. With --machine, this machine's own: the
    secret half stays here, processes here switch to the new key, and the old one is refused. With --broker, the
    broker's: it accepts both keys until all members have the new one.
    """
    if machine and broker:
        raise typer.BadParameter("--machine is this machine's key, and --broker the broker's: name one of them")
    if now and not broker:
        raise typer.BadParameter("--now is about the broker's key: add --broker")
    if broker:
        if now:
            confirm_or_exit("Retire the broker's old key now? Machines without the new one are locked out.", yes=yes)
        _rotate_broker(context, url, now, as_json)
        return
    if machine:
        _rotate_machine(context, name, config, as_json)
        return
    if name is None:
        raise typer.BadParameter("give a name, or --machine for this machine's own key, or --broker for the broker's")
    confirm_or_exit(f"Change the key of {name}? The old one is refused from then on.", yes=yes)
    if keys_file is None and _rotate_member(
        context, name, _read_keys(context, None, config, is_required=False), url, as_json
    ):
        return
    from swarm.api_keys.file import update_keys
    from swarm.api_keys.keys import make_key

    made: list[tuple[ApiKey, str]] = []

    def replace_key(ring: KeySet) -> KeySet:
        old = ring.get(name)
        made.append(make_key(name, old.limits, _now(), admin=old.admin, models=old.models, key_id=old.id))
        return ring.replace(made[-1][0])

    update_keys(_keys_path(context, keys_file, config), replace_key)
    _show_new(*made[-1], as_json)


def _rotate_broker(context: typer.Context, url: str | None, now: bool, as_json: bool) -> None:
    from swarm.cli.output import print_json
    from swarm.ctl.render_keys import broker_key

    with open_client(context, url or _outer_url(context)) as client:
        body = client.rotate_broker_key(now=now)
    if as_json:
        print_json({**body, "kind": "broker"})
    else:
        print(broker_key(body))


def _rotate_member(context: typer.Context, name: str, ring: KeySet, url: str | None, as_json: bool) -> bool:
    """Order a rotation if a joined machine has this name. Return False if it may be an API key's name."""
    from swarm.ctl import machine_keys
    from swarm.errors import ConfigError

    is_api = any(key.name == name for key in ring.keys)
    with open_client(context, url or _outer_url(context)) as client:
        told, problem = machine_keys.query_keys(client)
        if not machine_keys.has_key({"members": told.get("members")}, name):
            if not is_api and not ring.keys:
                unknown = f" ({problem})" if problem else ""
                raise ConfigError(f"there is no key {name!r} (swarmctl keys list){unknown}")
            return False
        if is_api:
            raise ConfigError(f"{name!r} is an API key and a machine's: name the API key's file with --keys-file")
        called = client.rotate_member_key(name).get("name")
    text = f"{called} will rotate its key now, or when it connects next (swarmctl keys list)"
    _print_result({"rotated": called, "kind": "machine"}, text, as_json)
    return True


def _rotate_machine(context: typer.Context, name: str | None, config: Path | None, as_json: bool) -> None:
    from swarm.auth.memberships import default_state_dir
    from swarm.cli.output import print_json
    from swarm.ctl import machine_keys

    settings = load_settings(context, config, {})
    called, key = machine_keys.rotate(settings.state_dir or default_state_dir(), name)
    if as_json:
        print_json({"rotated": called, "kind": "machine", "key": key})
    else:
        print(f"this machine ({called}) has a new key now, {key}; the old one is refused")


def _selected_kinds(api: bool, machine: bool, keys_file: Path | None) -> set[str]:
    if api and machine:
        raise typer.BadParameter("--api and --machine are both the default: name one of them, or none")
    if machine and keys_file is not None:
        raise typer.BadParameter("--keys-file is about API keys, and --machine about others")
    if api or keys_file is not None:
        return {"api"}
    return {"machine"} if machine else {"api", "machine"}


def _outer_url(context: typer.Context) -> str | None:
    """Return the --url that precedes the command's name."""
    parent = context.find_root().obj
    return getattr(parent, "url", None)


def _read_keys(context: typer.Context, keys_file: Path | None, config: Path | None, *, is_required: bool) -> KeySet:
    """Return the file's keys. If ``is_required``, raises BadParameter when the file's location is not configured."""
    from swarm.api_keys.file import read_keys
    from swarm.api_keys.keys import KeySet

    path = (_keys_path if is_required else _find_keys_file)(context, keys_file, config)
    return (None if path is None else read_keys(path)) or KeySet()


def _keys_path(context: typer.Context, given: Path | None, config: Path | None) -> Path:
    """Return the path that gateways use, too. Raises BadParameter if it is not configured."""
    path = _find_keys_file(context, given, config)
    if path is None:
        raise typer.BadParameter(
            "the location of the keys is not configured, and no swarm up of this broker runs here: set "
            "gateway.keys_file or state_dir, or --keys-file"
        )
    return path


def _find_keys_file(context: typer.Context, given: Path | None, config: Path | None) -> Path | None:
    """Return the path of the option or the settings, or that of the running ``swarm up`` with the broker's address;
    None if there is neither."""
    if given is not None:
        return given.expanduser()
    from swarm.api_keys.file import NAME
    from swarm.cli.up.runs import read_runs

    settings = load_settings(context, config, {"client.url": context.params.get("url") or _outer_url(context)})
    if settings.gateway.keys_file is not None:
        return settings.gateway.keys_file
    if settings.state_dir is not None:
        return settings.state_dir / NAME
    url = settings.client.url
    folders = (run.state_dir for run in read_runs() if run.is_alive and url in {swarm.url for swarm in run.swarms})
    return next((Path(folder) / NAME for folder in folders), None)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _show_new(key: ApiKey, shown: str, as_json: bool) -> None:
    from swarm.cli.output import print_json

    if as_json:
        print_json({**_row(key), "key": shown})
    else:
        print(f"{shown}\nThe key of {key.name}. It is shown only this once: only its hash is stored.")


def _row(key: ApiKey) -> Json:
    limits = key.limits
    return {
        "name": key.name,
        "id": key.id,
        "created": key.created,
        "rate_per_min": limits.rate_per_min,
        "concurrency": limits.concurrency,
        "tokens_per_day": limits.tokens_per_day,
        "max_priority": limits.max_priority,
        "admin": key.admin,
        "models": list(key.models),
    }
