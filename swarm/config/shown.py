"""Settings as they are told to people: each with its value and where that comes from, and no password. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Literal, NamedTuple

from swarm.config.sections import Settings, get, setting_names

Process = Literal["broker", "worker", "gateway"]

ITSELF: Final = "the process itself, at its start"  # a name or an address that it found out
# The sections, and the settings without one, that a process reads.
_READ_BY: Final[Mapping[Process, frozenset[str]]] = {
    "broker": frozenset({"state_dir", "broker", "plan", "worker", "health", "recovery", "journal", "log"}),
    "worker": frozenset({"model", "state_dir", "worker", "client", "log"}),
    "gateway": frozenset({"state_dir", "gateway", "upstream", "client", "log"}),
}
_USER: Final = re.compile(r"://[^/@\s]+@")


class Shown(NamedTuple):
    """``value`` is ready for JSON."""

    name: str
    value: object
    origin: str


def shown(settings: Settings, origins: Mapping[str, tuple[object, str]], process: Process) -> tuple[Shown, ...]:
    """All that a process of this kind reads. ``origins``: as the settings were loaded (``config.origins``); what is
    otherwise by now the process has found out itself."""
    return tuple(_shown(settings, origins, _READ_BY[process]))


def _shown(settings: Settings, origins: Mapping[str, tuple[object, str]], read: frozenset[str]) -> Iterator[Shown]:
    values = settings.model_dump(mode="json")
    for name in setting_names():
        if name.partition(".")[0] in read:
            value = get(values, name)
            loaded, origin = origins.get(name, (None, ITSELF))
            yield Shown(name, hidden(value), origin if loaded == value else ITSELF)


def hidden(value: object) -> object:
    """The same without names and passwords in addresses."""
    if isinstance(value, str):
        return _USER.sub("://…@", value)
    if isinstance(value, Mapping):
        return {key: hidden(item) for key, item in value.items()}
    return [hidden(item) for item in value] if isinstance(value, list | tuple) else value


def report(process: str, settings: Iterable[Shown]) -> dict[str, object]:
    """As it is told on: a row for each, with its value and where that comes from."""
    rows = [{"name": each.name, "value": each.value, "from": each.origin} for each in settings]
    return {"process": process, "settings": rows}
