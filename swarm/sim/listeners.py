"""Listeners that check keys: each process life has a key of its own, and a listener accepts an allow-list."""

from __future__ import annotations

import hashlib


def fake_public_key(incarnation: str) -> str:
    """Return the public key of a process, unique to its incarnation."""
    return hashlib.sha256(incarnation.encode()).hexdigest()


class FakeListener:
    """Allow-list of a listener.

    With ``uses_keys``, no key is accepted until the first list arrives; without, every sender is accepted.
    """

    __slots__ = ("_keys",)

    def __init__(self, *, uses_keys: bool) -> None:
        self._keys: frozenset[str] | None = frozenset() if uses_keys else None

    def set_allowed(self, keys: frozenset[str]) -> None:
        assert self._keys is not None, "no keys are in use, but a listener got some"
        self._keys = keys

    def accepts(self, key: str | None) -> bool:
        return self._keys is None or key in self._keys
