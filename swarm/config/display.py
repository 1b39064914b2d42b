"""Settings for display: each with its value and its origin, without passwords. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from swarm.config.sections import Settings, get, setting_names

Process = Literal["broker", "worker", "gateway"]

# the origin of a name or an address that the process determined
FROM_PROCESS: Final = "the process itself, at its start"
# The sections, and the settings without a section, that each process reads.
_READ_BY: Final[Mapping[Process, frozenset[str]]] = {
    "broker": frozenset({"state_dir", "broker", "plan", "worker", "health", "recovery", "journal", "log"}),
    "worker": frozenset({"model", "state_dir", "worker", "client", "log"}),
    "gateway": frozenset({"state_dir", "gateway", "swarm", "batch", "upstream", "client", "log"}),
}
_CREDENTIALS: Final = re.compile(r"://[^/@\s]+@")


class ShownSetting(NamedTuple):
    """A setting for display. ``value`` is ready for JSON."""

    name: str
    value: object
    origin: str


def describe_settings(
    settings: Settings, origins: Mapping[str, tuple[object, str]], process: Process
) -> tuple[ShownSetting, ...]:
    """Return all settings that a process of this kind reads.

    ``origins``: as the settings were loaded (``config.origins``). A value that differs from the loaded one was
    determined by the process itself.
    """
    return tuple(_describe(settings, origins, _READ_BY[process]))


def _describe(
    settings: Settings, origins: Mapping[str, tuple[object, str]], read: frozenset[str]
) -> Iterator[ShownSetting]:
    values = settings.model_dump(mode="json")
    for name in setting_names():
        if name.partition(".")[0] in read:
            value = get(values, name)
            loaded, origin = origins.get(name, (None, FROM_PROCESS))
            yield ShownSetting(name, hide_credentials(value), origin if loaded == value else FROM_PROCESS)


def hide_credentials(value: object) -> object:
    """Return the value without user names and passwords in addresses."""
    if isinstance(value, str):
        return _CREDENTIALS.sub("://…@", value)
    if isinstance(value, Mapping):
        return {key: hide_credentials(item) for key, item in value.items()}
    return [hide_credentials(item) for item in value] if isinstance(value, list | tuple) else value


def settings_report(process: str, settings: Iterable[ShownSetting]) -> dict[str, object]:
    """Return a report with a row for each setting: name, value and origin."""
    rows = [{"name": setting.name, "value": setting.value, "from": setting.origin} for setting in settings]
    return {"process": process, "settings": rows}
