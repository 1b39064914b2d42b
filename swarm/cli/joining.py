"""``--join``: become known to a swarm on another machine, once; afterwards, find what was joined."""

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
    from swarm.config import Settings
    from swarm.lock.access import Access
    from swarm.lock.invitation import Invitation
    from swarm.lock.known import Known

_MAX_CHARACTERS: Final = 64 << 10  # of a file or line with an invitation in it


def join(text: str, state_dir: Path, *, name: str = "", roles: tuple[str, ...]) -> Known:
    """Use the invitation, unless this machine has used it before. Raises BadParameter if it is none, or is for another
    role; Unavailable if nobody answers or it isn't taken any more; ConfigError if it can't be kept."""
    from swarm.lock import known
    from swarm.lock.enrol import enrol
    from swarm.wire.door.keys import new_pair

    read = _read(text)
    if read.role not in roles:
        wanted = " or ".join(roles)
        raise typer.BadParameter(f"this invitation is for a {read.role}, and a {wanted} is wanted: ask for another")
    if (former := known.by_invitation(state_dir, read)) is not None:
        return former
    pair = new_pair()
    address, broker, enrolled = asyncio.run(enrol(read, pair, name or socket.gethostname()))
    addresses = (address, *(each for each in read.addresses if each != address))
    return known.keep(state_dir, read._replace(broker=broker), pair, addresses, enrolled)


def _read(given: str) -> Invitation:
    """Read what ``--join`` names: the invitation itself, a file, or ``-`` for standard input."""
    from swarm.lock import invitation

    given = given.strip()
    try:
        return invitation.read(given if given.startswith(invitation.PREFIX) else invitation.line_in(_text_of(given)))
    except ConfigError as error:
        raise typer.BadParameter(f"--join: {error}") from None


def _text_of(given: str) -> str:
    """Read the file, or one line of standard input; from a terminal without showing it."""
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
        why = getattr(error, "strerror", None) or "nothing came"  # the error's own text may hold the invitation
        raise ConfigError(f"the invitation in {given[:80]!r} can't be read ({why})") from None
    except ValueError:  # it is no text
        raise ConfigError(f"{given[:80]!r} has no invitation in it") from None


def of_client(settings: Settings, invitation: str | None) -> Access | str | None:
    """The broker that was named, or that the invitation is to; None: neither."""
    if invitation is None:
        return settings.client.url if "url" in settings.client.model_fields_set else None
    from swarm.lock.access import access_by
    from swarm.lock.known import default_state_dir

    return access_by(join_here(invitation), default_state_dir())


def join_here(invitation: str) -> Known:
    """Become known as a client, or as somebody who governs; it is found from then on."""
    from swarm.lock.access import ROLES
    from swarm.lock.known import default_state_dir

    return join(invitation, default_state_dir(), roles=ROLES)


def of_worker(settings: Settings, invitation: str | None) -> tuple[Settings, Known | None]:
    """The settings with the broker's address, and by which pair it knows this machine: None on its own machine."""
    from swarm.lock import known

    state_dir = settings.state_dir or known.default_state_dir()
    name = settings.worker.name
    if invitation is not None:
        found: Known | None = join(invitation, state_dir, name=name, roles=("worker",))
    else:
        url = settings.client.url if "url" in settings.client.model_fields_set else None
        found = known.find_worker(state_dir, url, name)
    if found is None:
        return settings, None
    client = settings.client.model_copy(update={"url": found.endpoint})
    worker = settings.worker.model_copy(update={"name": _name_in(found, name, has_joined=invitation is not None)})
    return settings.model_copy(update={"client": client, "worker": worker}), found


def _name_in(joined: Known, wanted: str, *, has_joined: bool) -> str:
    """What this worker is called there: as the swarm knows this machine, perhaps with more behind it. Raises
    ConfigError."""
    from swarm.lock.roll import is_called

    if not wanted:
        return f"{joined.name}-{os.getpid()}"  # there may be several
    if is_called(joined.name, wanted):
        return wanted
    if has_joined:
        return joined.name  # the wanted name was taken
    raise ConfigError(
        f"that swarm knows this machine as {joined.name}: a worker here is called so, or {joined.name}-ANYTHING "
        f"(--name), and not {wanted}; or join once more as {wanted}, with an invitation"
    )
