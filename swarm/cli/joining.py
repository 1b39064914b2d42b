"""``--join``: enrol this machine with a swarm on another machine, once, and find the membership afterwards."""

from __future__ import annotations

import asyncio
import getpass
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import typer

from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.auth.access import BrokerCredentials
    from swarm.auth.invitation import Invitation
    from swarm.auth.memberships import JoinedSwarm
    from swarm.config import Settings

_MAX_CHARACTERS: Final = 64 << 10  # longest file or line with an invitation


def join(text: str, state_dir: Path, *, name: str = "", roles: tuple[str, ...]) -> JoinedSwarm:
    """Enrol with the invitation, unless this machine has used it before.

    Raises ``BadParameter`` if it is not an invitation or is for another role, ``Unavailable`` if the broker does not
    answer or rejects it, and ``ConfigError`` if the membership can't be saved.
    """
    from swarm.auth import memberships
    from swarm.auth.enrol import enrol
    from swarm.wire.transport.keys import new_pair

    parsed = _parse_invitation(text)
    if parsed.role not in roles:
        wanted = " or ".join(roles)
        raise typer.BadParameter(f"this invitation is for a {parsed.role}, but a {wanted} is needed: get another one")
    if (existing := memberships.find_by_invitation(state_dir, parsed)) is not None:
        return existing
    pair = new_pair()
    address, broker, enrolled = asyncio.run(enrol(parsed, pair, name or socket.gethostname()))
    addresses = (address, *(each for each in parsed.addresses if each != address))
    return memberships.add(state_dir, parsed._replace(broker=broker), pair, addresses, enrolled)


def _parse_invitation(given: str) -> Invitation:
    """Parse the argument of ``--join``: the invitation itself, a file, or ``-`` for standard input."""
    from swarm.auth import invitation

    given = given.strip()
    try:
        return invitation.decode(
            given if given.startswith(invitation.PREFIX) else invitation.find_line(_read_text(given))
        )
    except ConfigError as error:
        raise typer.BadParameter(f"--join: {error}") from None


def _read_text(given: str) -> str:
    """Read the file, or one line of standard input; from a terminal without echo."""
    try:
        if given == "-" and sys.stdin.isatty():
            return getpass.getpass("invitation: ")
        if given == "-":
            return sys.stdin.readline(_MAX_CHARACTERS)
        with Path(given).open(encoding="utf-8") as file:
            return file.read(_MAX_CHARACTERS)
    except FileNotFoundError:
        raise ConfigError(
            f"there is no file {given[:80]!r}, and it is no invitation, which begins with swarm1:"
        ) from None
    except (OSError, EOFError) as error:
        why = getattr(error, "strerror", None) or "nothing came"  # the error's own text may contain the invitation
        raise ConfigError(f"the invitation in {given[:80]!r} can't be read ({why})") from None
    except ValueError:  # not valid text
        raise ConfigError(f"{given[:80]!r} has no invitation in it") from None


def resolve_client(settings: Settings, invitation: str | None) -> BrokerCredentials | str | None:
    """Return the configured broker, or the one that the invitation is for; None if there is neither."""
    if invitation is None:
        return settings.client.url if "url" in settings.client.model_fields_set else None
    from swarm.auth.access import credentials_of
    from swarm.auth.memberships import default_state_dir

    return credentials_of(enrol_client(invitation), default_state_dir())


def enrol_client(invitation: str) -> JoinedSwarm:
    """Enrol as a client or as an operator; later commands find the membership."""
    from swarm.auth.access import ROLES
    from swarm.auth.memberships import default_state_dir

    return join(invitation, default_state_dir(), roles=ROLES)


def resolve_worker(settings: Settings, invitation: str | None) -> tuple[Settings, JoinedSwarm | None]:
    """Return the settings with the broker's address, and this machine's membership; None for a local broker."""
    from swarm.auth import memberships

    state_dir = settings.state_dir or memberships.default_state_dir()
    name = settings.worker.name
    if invitation is not None:
        membership: JoinedSwarm | None = join(invitation, state_dir, name=name, roles=("worker",))
    else:
        url = settings.client.url if "url" in settings.client.model_fields_set else None
        membership = memberships.find_worker(state_dir, url, name)
    if membership is None:
        return settings, None
    client = settings.client.model_copy(update={"url": membership.endpoint})
    worker = settings.worker.model_copy(
        update={"name": _worker_name(membership, name, has_joined=invitation is not None)}
    )
    return settings.model_copy(update={"client": client, "worker": worker}), membership


def _worker_name(joined: JoinedSwarm, wanted: str, *, has_joined: bool) -> str:
    """Return this worker's name in the swarm: the name of this machine's key, optionally with a suffix. Raises
    ``ConfigError``."""
    from swarm.auth.registry import may_name_worker

    if not wanted:
        return f"{joined.name}-{os.getpid()}"  # several workers may run here
    if may_name_worker(joined.name, wanted):
        return wanted
    if has_joined:
        return joined.name  # the requested name was taken
    raise ConfigError(
        f"that swarm has registered this machine as {joined.name}: name workers here {joined.name} or "
        f"{joined.name}-ANYTHING (--name), not {wanted}; or join again as {wanted}, with another invitation"
    )
