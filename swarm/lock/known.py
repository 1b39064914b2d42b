"""Memberships of this machine: the swarms it has joined and its key pair for each, one file per swarm in
``STATE/joined``."""

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

CREDENTIAL: Final = "swarm.joined"  # Name of such a file among systemd's credentials.
_FOLDER: Final = "joined"
_WHAT: Final = "the key file"
_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 10
_PLAIN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")  # Names that are safe as part of a file name.
_ALL: Final = ("client", "gateway", "worker", "admin")


class Known(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Membership in a joined swarm.

    ``name`` and ``role``: this machine's, in that swarm. ``secret``: secret key of this machine there; ``next``: its
    successor during a rotation (``rotation``). ``invitation``: public half of the invitation that was used.
    """

    name: Annotated[str, msgspec.Meta(max_length=128)]
    role: Role
    broker: PublicKey
    # Of the client channel; the first one answered when joining.
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    secret: PublicKey
    invitation: str
    joined_at: float  # Seconds since 1970.
    version: int = _VERSION
    next: PublicKey | None = None  # Written during a rotation only.

    def is_same(self, other: Known) -> bool:
        """Whether this is the same membership, regardless of rotated keys."""
        return (self.name, self.invitation, self.joined_at) == (other.name, other.invitation, other.joined_at)

    @property
    def pair(self) -> KeyPair:
        return KeyPair(public_of(self.secret), self.secret)

    @property
    def endpoint(self) -> str:
        """Return the broker's endpoint with its public key."""
        return keyed(self.addresses[0], self.broker.encode())


def default_state_dir() -> Path:
    """Return this user's default directory for persistent state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "swarm"


def keep(
    state_dir: Path, invitation: Invitation, pair: KeyPair, addresses: tuple[str, ...], enrolled: Enrolled
) -> Known:
    """Store the membership in a swarm that was just joined. Raises ConfigError if it can't be written."""
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
    """Write a membership, replacing the one with the same swarm and name. Raises ConfigError if it can't be written."""
    # The name comes from the broker: it may be part of a path only if it can't point elsewhere.
    own = known.name if _PLAIN.fullmatch(known.name) else known.role
    _write(state_dir / _FOLDER / f"{own}-{known.broker[:8]}.json", known)


def _write(path: Path, known: Known) -> None:
    try:
        private.make_directory(path.parent)
        private.write(path, msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{_WHAT} {path} can't be written ({error.strerror})") from None


def change(state_dir: Path, joined: Known, edit: Callable[[Known], Known]) -> Known:
    """Apply ``edit`` to the stored membership under an exclusive lock, and write the result.

    Raises ConfigError if it is not stored here, or can't be written.
    """
    folder = state_dir / _FOLDER
    if not is_kept(state_dir, joined):
        raise ConfigError(
            f"the key of {joined.name} is not stored in {state_dir}: it is a systemd credential; change it there"
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
    """Whether this membership is stored here, and not passed in as a systemd credential. Raises ConfigError."""
    handed = _handed_over()
    is_handed_over = handed is not None and handed.is_same(joined)
    return not is_handed_over and any(each.is_same(joined) for each in kept(state_dir))


def by_invitation(state_dir: Path, invitation: Invitation) -> Known | None:
    """Return the membership that this very invitation produced earlier, or None. Raises ConfigError."""
    key = public_of(invitation.secret)
    return next((known for known in every(state_dir) if known.invitation == key), None)


def find(state_dir: Path, url: str | None = None, roles: Collection[str] = _ALL) -> Known | None:
    """Return the membership with this address or machine name; without ``url``, the one joined last.

    None if there is no such membership in one of these roles. Raises ConfigError.
    """
    return next((known for known in every(state_dir) if known.role in roles and _is_meant(known, url)), None)


def find_worker(state_dir: Path, url: str | None, name: str) -> Known | None:
    """Return the membership at this address (or any) in which a worker of this machine may have this name; if there is
    none, the one joined last. Raises ConfigError."""
    found = [known for known in every(state_dir) if known.role == "worker" and _is_meant(known, url)]
    fitting = (known for known in found if name and is_called(known.name, name))
    return next(fitting, found[0] if found else None)


def _is_meant(known: Known, url: str | None) -> bool:
    if url is None:
        return True
    address, key = address_and_key(url)
    return url == known.name or (address in known.addresses and key.decode() in ("", known.broker))


def every(state_dir: Path) -> list[Known]:
    """Return all memberships: systemd's credential first, then the stored ones, the one joined last first.

    Raises ConfigError if a file is invalid, or readable by others.
    """
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
        raise ConfigError(f"{path} is not a valid membership ({error}): move it away, and join again") from None
    if known.version != _VERSION:
        raise ConfigError(f"{path} is of version {known.version}, and this build reads {_VERSION}")
    return known
