"""Settings for display: each with its value and its origin, without passwords. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from swarm.config.sections import Settings, get, setting_names

Process = Literal["broker", "worker", "gateway"]

ITSELF: Final = "the process itself, at its start"  # the origin of a name or an address that the process determined
# The sections, and the settings without a section, that each process reads.
_READ_BY: Final[Mapping[Process, frozenset[str]]] = {
    "broker": frozenset({"state_dir", "broker", "plan", "worker", "health", "recovery", "journal", "log"}),
    "worker": frozenset({"model", "state_dir", "worker", "client", "log"}),
    "gateway": frozenset({"state_dir", "gateway", "upstream", "client", "log"}),
}
_USER: Final = re.compile(r"://[^/@\s]+@")


class Shown(NamedTuple):
    """A setting for display. ``value`` is ready for JSON."""

    name: str
    value: object
    origin: str


def shown(settings: Settings, origins: Mapping[str, tuple[object, str]], process: Process) -> tuple[Shown, ...]:
    """Return all settings that a process of this kind reads.

    ``origins``: as the settings were loaded (``config.origins``). A value that differs from the loaded one was
    determined by the process itself.
    """
    return tuple(_shown(settings, origins, _READ_BY[process]))


def _shown(settings: Settings, origins: Mapping[str, tuple[object, str]], read: frozenset[str]) -> Iterator[Shown]:
    values = settings.model_dump(mode="json")
    for name in setting_names():
        if name.partition(".")[0] in read:
            value = get(values, name)
            loaded, origin = origins.get(name, (None, ITSELF))
            yield Shown(name, hidden(value), origin if loaded == value else ITSELF)


def hidden(value: object) -> object:
    """Return the value without user names and passwords in addresses."""
    if isinstance(value, str):
        return _USER.sub("://…@", value)
    if isinstance(value, Mapping):
        return {key: hidden(item) for key, item in value.items()}
    return [hidden(item) for item in value] if isinstance(value, list | tuple) else value


def report(process: str, settings: Iterable[Shown]) -> dict[str, object]:
    """Return a report with a row for each setting: name, value and origin."""
    rows = [{"name": each.name, "value": each.value, "from": each.origin} for each in settings]
    return {"process": process, "settings": rows}
