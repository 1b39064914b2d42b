"""``swarmctl invite``: create a line with which another machine joins. Its secret is generated here and never sent."""

from __future__ import annotations

import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Final

import typer

from swarm.cli.options import JsonOption, UrlOption, check_device, open_client, read_size


class InviteRole(StrEnum):
    worker = "worker"
    client = "client"
    gateway = "gateway"
    admin = "admin"


_RUN: Final = {
    InviteRole.worker: "swarm worker --join {}{}",
    InviteRole.client: 'swarm generate --join {} "Once upon a time"',
    InviteRole.gateway: "swarm gateway --join {}",
    InviteRole.admin: "swarmctl --join {} status",
}
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_MAX_VALID_S: Final = 365 * 86_400


def invite(  # noqa: PLR0917 (options are parameters)
    context: typer.Context,
    role: Annotated[InviteRole, typer.Option("--role", help="The role of the new machine.", show_default=False)],
    uses: Annotated[
        int, typer.Option("--uses", metavar="N", min=1, max=1024, help="How many machines may use it.")
    ] = 1,
    valid: Annotated[str, typer.Option("--for", metavar="TIME", help="How long it is valid: 90s, 30m, 1h, 7d.")] = "1h",
    name: Annotated[
        str,
        typer.Option("--name", help="Name of the new machine. [default: its own choice]", show_default=False),
    ] = "",
    address: Annotated[
        list[str] | None,
        typer.Option(
            "--address",
            metavar="HOST",
            help="Address to connect to: HOST or HOST:PORT (may be repeated). [default: the broker's addresses]",
            show_default=False,
        ),
    ] = None,
    device: Annotated[
        str,
        typer.Option(
            "--device",
            metavar="DEVICE",
            help="For a worker: cpu, cuda, cuda:N, mps or auto, in the command for its machine.",
            show_default=False,
        ),
    ] = "",
    memory_limit: Annotated[
        str,
        typer.Option(
            "--memory-limit",
            metavar="SIZE",
            help="For a worker: memory of its process, like 8GiB, in the command for its machine.",
            show_default=False,
        ),
    ] = "",
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Let another machine join: print one line, to be used there once, and the command for it.

    The device and the memory limit are no part of the invitation: they only complete the command.
    """
    from swarm.auth import invitation
    from swarm.cli.output import print_json
    from swarm.wire.messages import Invite
    from swarm.wire.transport.keys import new_pair

    if len(name) > 64:
        raise typer.BadParameter("--name takes at most 64 characters")
    if (device or memory_limit) and role is not InviteRole.worker:
        raise typer.BadParameter("--device and --memory-limit are for --role worker")
    flags = _worker_flags(device, memory_limit)
    places, valid_s, pair = _parse_addresses(address or ()), _parse_duration(valid), new_pair()
    message = Invite(key=pair.public, role=role.value, uses=uses, valid_s=valid_s, name=name)
    with open_client(context, url or context.obj.url) as client:
        body = client.invite(message)
    addresses, broker = _broker_address(body)
    made = invitation.Invitation(_choose_addresses(places, addresses), broker, pair.secret, role.value)
    line = invitation.encode(made)
    run = _RUN[role].format(line, flags)
    if as_json or context.obj.as_json:
        shown = {"role": role.value, "uses": uses, "name": name, "key": pair.public[:16]}
        print_json({"invitation": line, **shown, "expires_at": body.get("expires_at"), "run": run})
    else:
        times = "once" if uses == 1 else f"{uses} times"
        print(
            f"{line}\nGood {times}, for {valid}. Run on the other machine, and paste the line there: "
            f"{_RUN[role].format('-', flags)}"
        )
        if role is InviteRole.worker:
            unit = _describe_unit(device, memory_limit)
            print(f"As a service there, after joining once (docs/how-to/systemd.md): {unit}")


def _worker_flags(device: str, memory_limit: str) -> str:
    """Return the options for the worker's command line. Raises BadParameter if a value is wrong."""
    if memory_limit:
        read_size(memory_limit)
    return (f" --device {check_device(device)}" if device else "") + _limit_flag(memory_limit)


def _limit_flag(memory_limit: str) -> str:
    return f" --memory-limit {memory_limit.replace(' ', '')}" if memory_limit else ""


def _describe_unit(device: str, memory_limit: str) -> str:
    """Return the command that installs such a worker's unit, and the unit's setting for the device."""
    gpu = " --gpu" if device.startswith("cuda") or device == "auto" else ""
    edit = (
        f", then systemctl edit swarm-worker@NAME: [Service], Environment=SWARM_WORKER__DEVICE={device}"
        if device
        else ""
    )
    return f"swarm systemd install{gpu}{_limit_flag(memory_limit)}{edit}"


def _parse_duration(text: str) -> float:
    """Parse a duration (1h → 3600)."""
    match = re.fullmatch(r"([0-9]{1,9})([smhd])", text.strip())
    seconds = int(match[1]) * _UNITS[match[2]] if match else 0
    if not 0 < seconds <= _MAX_VALID_S:
        raise typer.BadParameter(f"--for takes a time like 90s, 30m, 1h or 7d, a year at most, not {text!r}")
    return float(seconds)


def _parse_addresses(texts: Sequence[str]) -> list[str]:
    """Parse HOST and HOST:PORT; an IPv6 address may have brackets. Port 0 stands for the broker's own port."""
    from swarm.auth.invitation import is_address

    addresses = []
    for text in texts:
        host, port = text, "0"
        if text.count(":") == 1 or "]:" in text:
            host, _, port = text.rpartition(":")
        if ":" in host and not host.startswith("["):
            host = f"[{host}]"
        if not is_address(f"tcp://{host}:{port if port != '0' else 1}"):
            raise typer.BadParameter(f"--address takes HOST or HOST:PORT, not {text!r}")
        addresses.append(f"tcp://{host}:{port}")
    return addresses


def _broker_address(body: dict[str, object]) -> tuple[tuple[str, ...], str]:
    """Return the addresses and the key in the broker's answer. Raises RequestFailed if they are missing."""
    from swarm.errors import RequestFailed

    addresses, key = body.get("addresses"), body.get("key")
    is_key = isinstance(key, str) and re.fullmatch(r"[0-9a-f]{64}", key) is not None
    if not is_key or not isinstance(addresses, list) or not addresses:
        raise RequestFailed("the broker did not report its addresses: is it of another build?")
    return tuple(map(str, addresses)), str(key)


def _choose_addresses(requested: Sequence[str], broker_addresses: tuple[str, ...]) -> tuple[str, ...]:
    """Return the requested addresses, or the broker's if there are none."""
    port = broker_addresses[0].rpartition(":")[2]
    return (
        tuple(place.removesuffix(":0") + f":{port}" if place.endswith(":0") else place for place in requested)
        or broker_addresses
    )
