"""The report for ``swarmctl config show --worker``: a worker's settings, as it sent them to the broker."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from swarm.config.display import ShownSetting, settings_report
from swarm.wire.messages import Json, Setting


def report_worker(name: str, settings: Iterable[Setting]) -> Json:
    # same layout as ``swarm config show``
    return settings_report(
        name, [ShownSetting(setting.name, _decode_value(setting.value), setting.origin) for setting in settings]
    )


def _decode_value(text: str) -> object:
    """Decode a JSON value; return text that is no JSON unchanged."""
    try:
        return msgspec.json.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return text
