"""Machines' keys, for ``swarmctl keys``: the broker's report, and the swarms that this machine has joined."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from swarm.admin.report_rows import read_rows
from swarm.errors import RequestFailed, Unavailable

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarm.client.blocking import Client
    from swarm.wire.messages import Json

_MIN_PREFIX_DIGITS = 8  # Minimum length of a key prefix that the broker accepts.
_SHOWN_DIGITS = 16  # Digits of keys in the broker's lists.


def query_keys(client: Client) -> tuple[Json, Unavailable | RequestFailed | None]:
    """Return the broker's report on keys, or an empty one with the error: no broker answers, or the query is not
    permitted."""
    try:
        return client.query("keys"), None
    except (Unavailable, RequestFailed) as error:
        return {}, error


def has_key(body: Json, name: str) -> bool:
    """Whether a member or invitation has this name, or a key with this prefix."""
    rows = [*read_rows(body.get("members")), *read_rows(body.get("invitations"))]
    start = name.lower()[:_SHOWN_DIGITS] if len(name) >= _MIN_PREFIX_DIGITS else None
    return any(row.get("name") == name or (start is not None and str(row.get("key")).startswith(start)) for row in rows)


def with_ages(body: Json) -> Json:
    """Return the rows with ages in place of times."""
    now = time.time()
    return {what: [_row_with_age(row, now) for row in read_rows(body.get(what))] for what in ("members", "invitations")}


def _row_with_age(row: Mapping[str, object], now: float) -> Json:
    since = row.get("since")
    rest = {key: value for key, value in row.items() if key != "since"}
    return {**rest, "age_s": max(0.0, now - since)} if isinstance(since, int | float) else rest


def rotate(state_dir: Path, name: str | None) -> tuple[str, str]:
    """Rotate this machine's key in the swarm where it has this name, or in the one joined last. Return the name and the
    new public key. Raises ConfigError, and the broker's Unavailable or RequestFailed."""
    from swarm.auth import memberships
    from swarm.auth.rotation import CredentialStore
    from swarm.cli.key_rotation import change_key
    from swarm.errors import ConfigError

    membership = memberships.find(state_dir, name)
    if membership is None:
        what = "no swarm" if name is None else f"no swarm as {name!r}"
        raise ConfigError(
            f"this machine has joined {what} (looked in {state_dir}): rotate a key on its own machine, since its "
            "secret half never leaves it"
        )
    successor = change_key(CredentialStore(state_dir, membership))
    return successor.name, successor.pair.public


def list_memberships(state_dir: Path) -> list[Json]:
    """Return the swarms that this machine has joined, the last one first, without secrets. Raises ConfigError."""
    from swarm.auth import memberships

    return [
        {
            "name": membership.name,
            "role": membership.role,
            "key": membership.pair.public,
            "broker": membership.broker,
            "addresses": list(membership.addresses),
            "joined_at": datetime.fromtimestamp(membership.joined_at, UTC).isoformat(timespec="seconds"),
        }
        for membership in memberships.read_all(state_dir)
    ]
