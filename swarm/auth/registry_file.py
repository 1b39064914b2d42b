"""File of the key registry: readable by its owner alone; written as a whole and synced before a change takes effect."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final

import msgspec

from swarm import private_files
from swarm.auth.registry import (
    MAX_EXPIRED,
    MAX_INVITED,
    MAX_MEMBERS,
    MAX_REVOKED,
    KeyRegistry,
    Member,
    OpenInvitation,
    RegistryRefusal,
    RevokedKey,
)
from swarm.errors import ConfigError

_VERSION: Final = 1
_FILE_NAME: Final = "the key registry"
_MAX_BYTES: Final = 8 << 20


class _Version(msgspec.Struct, frozen=True):
    version: int


class _StoredRegistry(_Version, frozen=True, forbid_unknown_fields=True):
    members: Annotated[tuple[Member, ...], msgspec.Meta(max_length=MAX_MEMBERS)]
    invited: Annotated[tuple[OpenInvitation, ...], msgspec.Meta(max_length=MAX_INVITED + MAX_EXPIRED)]
    retired: Annotated[tuple[RevokedKey, ...], msgspec.Meta(max_length=MAX_REVOKED)] = ()
    seen_at: float = 0.0  # Latest time ever seen, in seconds since 1970.


class RegistryFile:
    """The key registry on disk. ``registry``: the content of the file.

    The file also stores the latest time ever seen, so that expired invitations stay expired when the clock goes back or
    starts in 1970 after a boot.
    """

    def __init__(self, path: Path) -> None:
        """Read the file; without one the registry is empty. Raises ConfigError if others may read it, or it is
        invalid."""
        self.path = path
        self.registry, self._seen_at = _read(path)

    def now(self) -> float:
        """Return the current time, which never decreases."""
        self._seen_at = max(self._seen_at, time.time())
        return self._seen_at

    def write(self, registry: KeyRegistry) -> None:
        """Replace the registry. Raises RegistryRefusal if writing fails; ``registry`` then matches the file."""
        if registry is self.registry:
            return
        written = _StoredRegistry(_VERSION, registry.members, registry.invited, registry.retired, self.now())
        content = msgspec.json.format(msgspec.json.encode(written), indent=1) + b"\n"
        try:
            private_files.make_private_directory(self.path.parent)
            private_files.write(self.path, content)
        except OSError as error:
            if not self._has_content(content):
                raise RegistryRefusal(
                    f"{_FILE_NAME} {self.path} can't be written ({error.strerror}); nothing has changed"
                ) from None
            self.registry = registry
            raise RegistryRefusal(
                f"it is done, but a power cut may undo it ({error.strerror}): repeat the command"
            ) from None
        self.registry = registry

    def _has_content(self, content: bytes) -> bool:
        try:
            return self.path.read_bytes() == content
        except OSError:
            return False


def _read(path: Path) -> tuple[KeyRegistry, float]:
    content = private_files.read(path, _FILE_NAME, _MAX_BYTES, remedy="revoke what is in it")
    if content is None:
        return KeyRegistry(), 0.0
    try:
        version = msgspec.json.decode(content, type=_Version).version
        if version != _VERSION:
            raise ConfigError(f"{path} is of version {version}, and this build reads {_VERSION}")
        written = msgspec.json.decode(content, type=_StoredRegistry)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{path} is not a key registry ({error}): restore a copy, or move it away and invite all machines again"
        ) from None
    try:
        return KeyRegistry(written.members, written.invited, written.retired), written.seen_at
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
