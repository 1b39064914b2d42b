"""Doors that go by keys: every process has one of its own, new per life, and a door hears those it was told to."""

from __future__ import annotations

import hashlib


def key_of(incarnation: str) -> str:
    """Make up the public key of a process: nobody else's is the same."""
    return hashlib.sha256(incarnation.encode()).hexdigest()


class Door:
    """``uses_keys``: nobody is heard as long as it was not told of anybody; without keys everybody is."""

    __slots__ = ("_keys",)

    def __init__(self, *, uses_keys: bool) -> None:
        self._keys: frozenset[str] | None = frozenset() if uses_keys else None

    def admit(self, keys: frozenset[str]) -> None:
        assert self._keys is not None, "no keys are in use, and a door is told of some"
        self._keys = keys

    def hears(self, key: str | None) -> bool:
        return self._keys is None or key in self._keys
