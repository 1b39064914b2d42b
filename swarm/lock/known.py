"""Which swarms this machine has joined, and by which pair each knows it: a file for each, in ``STATE/joined``."""

from __future__ import annotations

import fcntl
import os
import re
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Annotated, Final

import msgspec

from swarm import private
from swarm.errors import ConfigError
from swarm.lock.invitation import MAX_ADDRESSES, Invitation
from swarm.lock.roll import is_called
from swarm.wire.door.keys import KeyPair, address_and_key, keyed, public_of
from swarm.wire.messages import Enrolled, PublicKey, Role

CREDENTIAL: Final = "swarm.joined"  # such a file's name among the credentials that systemd hands to a service
_FOLDER: Final = "joined"
_WHAT: Final = "the key file"
_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 10
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_ALL: Final = ("client", "gateway", "worker", "admin")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A swarm that was joined. ``name`` and ``role``: as which it knows this machine. ``secret``: of this machine's
    key; ``next``: of the one that is to take its place (``rotation``). ``invitation``: the public half of the one by
    which it came in."""

    name: Annotated[str, msgspec.Meta(max_length=128)]
    role: Role
    broker: PublicKey
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    secret: PublicKey
    invitation: str
    joined_at: float
    version: int = _VERSION
    next: PublicKey | None = None

    def is_same(self, other: Known) -> bool:
        """The same membership, whichever keys both ends have by now?"""
        return (self.name, self.invitation, self.joined_at) == (other.name, other.invitation, other.joined_at)

    @property
    def pair(self) -> KeyPair:
        return KeyPair(public_of(self.secret), self.secret)

    @property
    def endpoint(self) -> str:
        """Where to knock, with the key by which the broker is known."""
        return keyed(self.addresses[0], self.broker.encode())


def default_state_dir() -> Path:
    """Where this user's programs keep what must survive a restart, if nobody says."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "swarm"


def keep(
    state_dir: Path, invitation: Invitation, pair: KeyPair, addresses: tuple[str, ...], enrolled: Enrolled
) -> Known:
    """Remember a swarm that was just joined. Raises ConfigError if it can't be written."""
    known = Known(
        enrolled.name,
        enrolled.role,
        invitation.broker,
        addresses,
        pair.secret,
        public_of(invitation.secret),
        time.time(),
    )
    write(state_dir, known)
    return known


def write(state_dir: Path, known: Known) -> None:
    """Keep it, in the place of what was kept of the same swarm and name. Raises ConfigError if it can't be written."""
    # What the broker calls us is only part of a path if it could not lead elsewhere.
    own = known.name if _PLAIN.fullmatch(known.name) else known.role
    _write(state_dir / _FOLDER / f"{own}-{known.broker[:8]}.json", known)


def _write(path: Path, known: Known) -> None:
    try:
        private.make_directory(path.parent)
        private.write(path, msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{_WHAT} {path} can't be written ({error.strerror})") from None


def change(state_dir: Path, joined: Known, edit: Callable[[Known], Known]) -> Known:
    """Write what ``edit`` makes of what is kept of this swarm by now, while nobody else does. Raises ConfigError if it
    is not kept here, or can't be written."""
    folder = state_dir / _FOLDER
    if not is_kept(state_dir, joined):
        raise ConfigError(
            f"the key of {joined.name} is not kept in {state_dir}, but was handed over by whoever started this: "
            "change it where it comes from"
        )
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        path, found = next((path, each) for path, each in _files(state_dir) if each.is_same(joined))
        if (edited := edit(found)) != found:
            _write(path, edited)
    finally:
        os.close(fd)
    return edited


def is_kept(state_dir: Path, joined: Known) -> bool:
    """Is it here, and not handed over? Raises ConfigError."""
    handed = _handed_over()
    is_handed_over = handed is not None and handed.is_same(joined)
    return not is_handed_over and any(each.is_same(joined) for each in kept(state_dir))


def by_invitation(state_dir: Path, invitation: Invitation) -> Known | None:
    """Find the membership that this very invitation brought before. Raises ConfigError."""
    key = public_of(invitation.secret)
    return next((known for known in every(state_dir) if known.invitation == key), None)


def find(state_dir: Path, url: str | None = None, roles: Collection[str] = _ALL) -> Known | None:
    """The swarm with this address, or in which this machine has this name; without one, what was joined last. None: no
    such was joined in one of these roles. Raises ConfigError."""
    return next((known for known in every(state_dir) if known.role in roles and _is_meant(known, url)), None)


def find_worker(state_dir: Path, url: str | None, name: str) -> Known | None:
    """The swarm at this address (or any) in which a worker of this machine may have this name; if there is none, the
    one that was joined last. Raises ConfigError."""
    found = [known for known in every(state_dir) if known.role == "worker" and _is_meant(known, url)]
    fitting = (known for known in found if name and is_called(known.name, name))
    return next(fitting, found[0] if found else None)


def _is_meant(known: Known, url: str | None) -> bool:
    if url is None:
        return True
    address, key = address_and_key(url)
    return url == known.name or (address in known.addresses and key.decode() in ("", known.broker))


def every(state_dir: Path) -> list[Known]:
    """All of them; what systemd hands over first, then those in the state directory, the one joined last first. Raises
    ConfigError if a file of them is none, or others may read it."""
    handed = _handed_over()
    own = sorted(kept(state_dir), key=lambda known: known.joined_at, reverse=True)
    return own if handed is None else [handed, *own]


def kept(state_dir: Path) -> Iterator[Known]:
    """Read the memberships in the state directory."""
    return (known for _, known in _files(state_dir))


def _files(state_dir: Path) -> Iterator[tuple[Path, Known]]:
    for path in sorted((state_dir / _FOLDER).glob("[!.]*.json")):
        if (known := _read(path)) is not None:
            yield path, known


def _handed_over() -> Known | None:
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    return _read(Path(given) / CREDENTIAL, True) if given else None


def _read(path: Path, is_credential: bool = False) -> Known | None:
    remedy = "have the key revoked, and join again"
    content = private.read(path, _WHAT, _MAX_BYTES, remedy=remedy, is_credential=is_credential)
    if content is None:
        return None
    try:
        known = msgspec.json.decode(content, type=Known)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} does not say what was joined ({error}): move it away, and join again") from None
    if known.version != _VERSION:
        raise ConfigError(f"{path} is of version {known.version}, and this build reads {_VERSION}")
    return known
