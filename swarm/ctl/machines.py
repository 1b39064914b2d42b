"""Machines' keys, for ``swarmctl keys``: the broker's report, and the swarms that this machine has joined."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from swarm.errors import RequestFailed, Unavailable
from swarm.govern.rows import rows_of

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from swarm.client.blocking import Client
    from swarm.wire.messages import Json

_FEWEST_DIGITS = 8  # Minimum length of a key prefix that the broker accepts.
_SHOWN = 16  # Digits of keys in the broker's lists.


def told(client: Client) -> tuple[Json, Unavailable | RequestFailed | None]:
    """Return the broker's report on keys, or an empty one with the error: no broker answers, or the query is not
    permitted."""
    try:
        return client.query("keys"), None
    except (Unavailable, RequestFailed) as error:
        return {}, error


def has(body: Json, name: str) -> bool:
    """Whether a member or invitation has this name, or a key with this prefix."""
    rows = [*rows_of(body.get("members")), *rows_of(body.get("invitations"))]
    start = name.lower()[:_SHOWN] if len(name) >= _FEWEST_DIGITS else None
    return any(row.get("name") == name or (start is not None and str(row.get("key")).startswith(start)) for row in rows)


def shown(body: Json) -> Json:
    """Return the rows with ages in place of times."""
    now = time.time()
    return {what: [_with_age(row, now) for row in rows_of(body.get(what))] for what in ("members", "invitations")}


def _with_age(row: Mapping[str, object], now: float) -> Json:
    since = row.get("since")
    rest = {key: value for key, value in row.items() if key != "since"}
    return {**rest, "age_s": max(0.0, now - since)} if isinstance(since, int | float) else rest


def rotate(state_dir: Path, name: str | None) -> tuple[str, str]:
    """Rotate this machine's key in the swarm where it has this name, or in the one joined last. Return the name and the
    new public key. Raises ConfigError, and the broker's Unavailable or RequestFailed."""
    from swarm.cli.rotating import change_key
    from swarm.errors import ConfigError
    from swarm.lock import known
    from swarm.lock.rotation import Home

    found = known.find(state_dir, name)
    if found is None:
        what = "no swarm" if name is None else f"no swarm as {name!r}"
        raise ConfigError(
            f"this machine has joined {what} (looked in {state_dir}): rotate a key on its own machine, since its "
            "secret half never leaves it"
        )
    successor = change_key(Home(state_dir, found))
    return successor.name, successor.pair.public


def joined(state_dir: Path) -> list[Json]:
    """Return the swarms that this machine has joined, the last one first, without secrets. Raises ConfigError."""
    from swarm.lock import known

    return [
        {
            "name": each.name,
            "role": each.role,
            "key": each.pair.public,
            "broker": each.broker,
            "addresses": list(each.addresses),
            "joined_at": datetime.fromtimestamp(each.joined_at, UTC).isoformat(timespec="seconds"),
        }
        for each in known.every(state_dir)
    ]
