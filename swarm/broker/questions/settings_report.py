"""The report for ``swarmctl config show --worker``: a worker's settings, as it sent them to the broker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from swarm.config.shown import Shown, report
from swarm.wire.messages import Json, Setting


def of_worker(name: str, settings: Iterable[Setting]) -> Json:
    # same layout as ``swarm config show``
    return report(name, [Shown(each.name, _value(each.value), each.origin) for each in settings])


def _value(text: str) -> object:
    """Decode a JSON value; return text that is no JSON unchanged."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
