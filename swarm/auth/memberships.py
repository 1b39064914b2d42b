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

from swarm import private_files
from swarm.auth.invitation import MAX_ADDRESSES, Invitation
from swarm.auth.registry import may_name_worker
from swarm.errors import ConfigError
from swarm.wire.messages import Enrolled, PublicKey, Role
from swarm.wire.transport.keys import KeyPair, address_and_key, public_of, with_key

CREDENTIAL: Final = "swarm.joined"  # Name of a membership file among systemd's credentials.
_FOLDER: Final = "joined"
_FILE_NAME: Final = "the key file"
_VERSION: Final = 1
_MAX_BYTES: Final = 64 << 10
_SAFE_FILE_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")  # Names that are safe as part of a file name.
_ALL_ROLES: Final = ("client", "gateway", "worker", "admin")


class JoinedSwarm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Membership in a joined swarm.

    ``name`` and ``role``: this machine's, in that swarm. ``secret``: secret key of this machine there; ``next``: its
    successor during a rotation (``rotation``). ``invitation``: public half of the invitation that was used.
    """

    name: Annotated[str, msgspec.Meta(max_length=128)]
    role: Role
    broker: PublicKey
    # Addresses of the broker's client channel; the first one answered when this machine joined.
    addresses: Annotated[tuple[str, ...], msgspec.Meta(min_length=1, max_length=MAX_ADDRESSES)]
    secret: PublicKey
    invitation: str
    joined_at: float  # Seconds since 1970.
    version: int = _VERSION
    next: PublicKey | None = None  # Written during a rotation only.

    def is_same_membership(self, other: JoinedSwarm) -> bool:
        """Whether this is the same membership, regardless of rotated keys."""
        return (self.name, self.invitation, self.joined_at) == (other.name, other.invitation, other.joined_at)

    @property
    def pair(self) -> KeyPair:
        return KeyPair(public_of(self.secret), self.secret)

    @property
    def endpoint(self) -> str:
        """Return the broker's endpoint with its public key."""
        return with_key(self.addresses[0], self.broker.encode())


def default_state_dir() -> Path:
    """Return this user's default directory for persistent state."""
    base = os.environ.get("XDG_STATE_HOME", "")
    return (Path(base) if base.startswith("/") else Path.home() / ".local" / "state") / "swarm"


def add(
    state_dir: Path, invitation: Invitation, pair: KeyPair, addresses: tuple[str, ...], enrolled: Enrolled
) -> JoinedSwarm:
    """Store the membership in a swarm that was just joined. Raises ConfigError if it can't be written."""
    known = JoinedSwarm(
        enrolled.name,
        enrolled.role,
        invitation.broker,
        addresses,
        pair.secret,
        public_of(invitation.secret),
        time.time(),
    )
    store(state_dir, known)
    return known


def store(state_dir: Path, known: JoinedSwarm) -> None:
    """Write a membership, replacing the one with the same swarm and name. Raises ConfigError if it can't be written."""
    # The name comes from the broker: it may be part of a path only if it can't point elsewhere.
    file_name = known.name if _SAFE_FILE_NAME.fullmatch(known.name) else known.role
    _write(state_dir / _FOLDER / f"{file_name}-{known.broker[:8]}.json", known)


def _write(path: Path, known: JoinedSwarm) -> None:
    try:
        private_files.make_private_directory(path.parent)
        private_files.write(path, msgspec.json.format(msgspec.json.encode(known), indent=1) + b"\n")
    except OSError as error:
        raise ConfigError(f"{_FILE_NAME} {path} can't be written ({error.strerror})") from None


def update(state_dir: Path, membership: JoinedSwarm, edit: Callable[[JoinedSwarm], JoinedSwarm]) -> JoinedSwarm:
    """Apply ``edit`` to the stored membership under an exclusive lock, and write the result.

    Raises ConfigError if it is not stored here, or can't be written.
    """
    folder = state_dir / _FOLDER
    if not is_stored(state_dir, membership):
        raise ConfigError(
            f"the key of {membership.name} is not stored in {state_dir}: it is a systemd credential; change it there"
        )
    fd = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        path, stored = next(
            (path, each) for path, each in _stored_files(state_dir) if each.is_same_membership(membership)
        )
        if (edited := edit(stored)) != stored:
            _write(path, edited)
    finally:
        os.close(fd)
    return edited


def is_stored(state_dir: Path, membership: JoinedSwarm) -> bool:
    """Whether this membership is stored here, and not passed in as a systemd credential. Raises ConfigError."""
    credential = _read_credential()
    is_handed_over = credential is not None and credential.is_same_membership(membership)
    return not is_handed_over and any(each.is_same_membership(membership) for each in read_stored(state_dir))


def find_by_invitation(state_dir: Path, invitation: Invitation) -> JoinedSwarm | None:
    """Return the membership that this very invitation produced earlier, or None. Raises ConfigError."""
    key = public_of(invitation.secret)
    return next((known for known in read_all(state_dir) if known.invitation == key), None)


def find(state_dir: Path, url: str | None = None, roles: Collection[str] = _ALL_ROLES) -> JoinedSwarm | None:
    """Return the membership with this address or machine name; without ``url``, the one joined last.

    None if there is no such membership in one of these roles. Raises ConfigError.
    """
    return next((known for known in read_all(state_dir) if known.role in roles and _matches(known, url)), None)


def find_worker(state_dir: Path, url: str | None, name: str) -> JoinedSwarm | None:
    """Return the membership at this address (or any) in which a worker of this machine may have this name; if there is
    none, the one joined last. Raises ConfigError."""
    matching = [known for known in read_all(state_dir) if known.role == "worker" and _matches(known, url)]
    named_so = (known for known in matching if name and may_name_worker(known.name, name))
    return next(named_so, matching[0] if matching else None)


def _matches(known: JoinedSwarm, url: str | None) -> bool:
    if url is None:
        return True
    address, key = address_and_key(url)
    return url == known.name or (address in known.addresses and key.decode() in ("", known.broker))


def read_all(state_dir: Path) -> list[JoinedSwarm]:
    """Return all memberships: systemd's credential first, then the stored ones, the one joined last first.

    Raises ConfigError if a file is invalid, or readable by others.
    """
    credential = _read_credential()
    stored = sorted(read_stored(state_dir), key=lambda known: known.joined_at, reverse=True)
    return stored if credential is None else [credential, *stored]


def read_stored(state_dir: Path) -> Iterator[JoinedSwarm]:
    """Read the memberships in the state directory."""
    return (known for _, known in _stored_files(state_dir))


def _stored_files(state_dir: Path) -> Iterator[tuple[Path, JoinedSwarm]]:
    for path in sorted((state_dir / _FOLDER).glob("[!.]*.json")):
        if (known := _read(path)) is not None:
            yield path, known


def _read_credential() -> JoinedSwarm | None:
    given = os.environ.get("CREDENTIALS_DIRECTORY")
    return _read(Path(given) / CREDENTIAL, True) if given else None


def _read(path: Path, is_credential: bool = False) -> JoinedSwarm | None:
    remedy = "have the key revoked, and join again"
    content = private_files.read(path, _FILE_NAME, _MAX_BYTES, remedy=remedy, is_credential=is_credential)
    if content is None:
        return None
    try:
        known = msgspec.json.decode(content, type=JoinedSwarm)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not a valid membership ({error}): move it away, and join again") from None
    if known.version != _VERSION:
        raise ConfigError(f"{path} is of version {known.version}, and this build reads {_VERSION}")
    return known
