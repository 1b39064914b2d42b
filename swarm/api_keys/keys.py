"""API keys and their limits. Pure, except for random secrets.

A key is written ``sk-swarm-ID-SECRET``. The id is not secret: it selects the record, whose hash is then compared in
constant time. It is the identity to which files and batches belong: a rotated key keeps it, and a new key of the same
name has another one.
"""

from __future__ import annotations

import base64
import hmac
import re
import secrets
from collections.abc import Iterable
from hashlib import blake2b

import msgspec

from swarm.errors import ConfigError
from swarm.params import PRIORITIES

_NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$")
_KEY = re.compile(r"^sk-swarm-([0-9a-f]{12})-([A-Za-z0-9_-]{43})$")  # The id in 6 bytes, the secret in 32 bytes.
_HASH_BYTES = 32
MAX_KEYS = 10_000
KEYLESS_TENANT = "http"  # tenant of requests without a key


class KeyLimits(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """Limits of an API key, which each gateway process applies separately; 0: unlimited."""

    rate_per_min: float = 0.0
    concurrency: int = 0
    tokens_per_day: int = 0  # Of prompts and answers; days in UTC.
    max_priority: int = 100

    def check(self) -> None:
        """Raise ConfigError for an invalid limit."""
        if not (
            0 <= self.rate_per_min <= 1e9 and 0 <= self.concurrency <= 1 << 20 and 0 <= self.tokens_per_day <= 1e15
        ):
            raise ConfigError("limits are positive numbers: rate a minute, concurrency, tokens a day")
        if not -100 <= self.max_priority <= 100:
            raise ConfigError("the highest priority must be between -100 and 100")


class ApiKey(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """An API key, without its secret. Default values are not written to the file, so that older builds can read it;
    they reject files with fields they don't support."""

    name: str
    id: str
    salt: str  # Hexadecimal, random for each key.
    hash: str  # Of the secret; hexadecimal.
    created: str  # Time of creation (UTC), for people.
    limits: KeyLimits = KeyLimits()
    admin: bool = False  # May use the administration endpoints, too.
    models: tuple[str, ...] = ()  # The only models that it may use; empty: all.

    def matches(self, secret: str) -> bool:
        return hmac.compare_digest(_hash(secret, self.salt), self.hash)


def _hash(secret: str, salt: str) -> str:
    return blake2b(secret.encode(), digest_size=_HASH_BYTES, salt=bytes.fromhex(salt)).hexdigest()


# Compared instead of an unknown key, so that timing does not reveal which ids exist.
_NO_KEY = ApiKey("", "", "00" * 16, "0" * 2 * _HASH_BYTES, "")


def make_key(
    name: str,
    limits: KeyLimits,
    created: str,
    *,
    admin: bool = False,
    models: tuple[str, ...] = (),
    key_id: str = "",
) -> tuple[ApiKey, str]:
    """Create a key: return the record to store, and the text for its owner, which is shown once. ``key_id``: of the key
    that it replaces. Raises ConfigError."""
    if not _NAME.fullmatch(name):
        raise ConfigError(f"a key's name is 1 to 64 letters, digits and . _ @ -, not {name[:80]!r}")
    if name == KEYLESS_TENANT:
        raise ConfigError(f"the name {name!r} stands for requests without a key: choose another name")
    limits.check()
    key_id, salt = key_id or secrets.token_hex(6), secrets.token_hex(16)
    secret = base64.urlsafe_b64encode(secrets.token_bytes(32)).decode().rstrip("=")
    key = ApiKey(name, key_id, salt, _hash(secret, salt), created, limits, admin, models)
    return key, f"sk-swarm-{key_id}-{secret}"


class KeySet:
    """Immutable set of API keys."""

    def __init__(self, keys: Iterable[ApiKey] = ()) -> None:
        self.keys = tuple(keys)
        self._by_id = {key.id: key for key in self.keys}

    def find(self, text: str) -> ApiKey | None:
        """Return the key for the text in a request; None if it is not valid. Unknown ids take as long as wrong
        secrets."""
        match = _KEY.fullmatch(text)
        if match is None:
            return None
        key = self._by_id.get(match[1], _NO_KEY)
        return key if key.matches(match[2]) else None

    def has_same(self, key: ApiKey) -> bool:
        """Whether this key still exists with the same rights."""
        return self._by_id.get(key.id) == key

    def get(self, name: str) -> ApiKey:
        """Return the key of this name. Raises ConfigError if there is none."""
        for key in self.keys:
            if key.name == name:
                return key
        known = ", ".join(sorted(key.name for key in self.keys)) or "none"
        raise ConfigError(f"there is no key {name!r}; there are: {known}")

    def add(self, key: ApiKey) -> KeySet:
        if any(other.name == key.name for other in self.keys):
            raise ConfigError(f"there is a key {key.name!r} already: rotate or revoke it, or choose another name")
        if len(self.keys) >= MAX_KEYS:
            raise ConfigError(f"there are {MAX_KEYS} keys already, which is the most: revoke some")
        return KeySet([*self.keys, key])

    def remove(self, name: str) -> KeySet:
        gone = self.get(name)
        return KeySet(key for key in self.keys if key is not gone)

    def replace(self, key: ApiKey) -> KeySet:
        """Return a set in which this key replaces the one of the same name."""
        gone = self.get(key.name)
        return KeySet(key if other is gone else other for other in self.keys)


def parse_priority(text: str) -> int:
    """Parse a priority: the name of a class, or a number. Raises ConfigError."""
    if text in PRIORITIES:
        return PRIORITIES[text]
    try:
        return int(text)
    except ValueError:
        raise ConfigError(f"a priority is {', '.join(PRIORITIES)}, or a number, not {text!r}") from None
