"""A process as a systemd unit: its manager, and its settings, which can be reloaded while it runs.

``systemctl reload`` sends SIGHUP. A reload determines which settings have changed, which of them apply immediately, and
which need a restart.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from swarm import log as logs
from swarm.config.display import Process, ShownSetting, describe_settings
from swarm.config.sections import get
from swarm.errors import ConfigError
from swarm.log import get_logger
from swarm.systemd import socket_activation
from swarm.systemd.manager import ServiceManager

if TYPE_CHECKING:
    from swarm.config import Settings

Origins = Mapping[str, tuple[object, str]]

ALWAYS_LIVE: Final = frozenset({"log.level", "log.format"})  # settings that every process applies without a restart
_BROKER_SECTION: Final = "plan"  # a section that only the broker reads

log = get_logger(__name__)


@dataclass
class ServiceContext:
    """Settings of a process, and its service manager."""

    settings: Settings  # current settings
    load: Callable[[], Settings]  # reads flags, environment and file again, as at the start of the process
    manager: ServiceManager = field(default_factory=ServiceManager)
    origins: Callable[[], Origins] = dict  # origin of each value (``config.origins``)
    _live: frozenset[str] = ALWAYS_LIVE  # settings, or sections, that apply without a restart
    _on_change: Callable[[Settings], None] | None = None  # called with all settings when one of ``_live`` has changed
    _origins: dict[str, tuple[object, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._origins = dict(self.origins())

    @classmethod
    def from_environment(
        cls, settings: Settings, load: Callable[[], Settings], origins: Callable[[], Origins]
    ) -> ServiceContext:
        """Return this process as a unit, whether systemd started it or not."""
        socket_activation.adopt_sockets(os.environ)
        return cls(settings, load, ServiceManager.from_environment(os.environ), origins)

    @classmethod
    def unmanaged(cls, settings: Settings) -> ServiceContext:
        """Return a process without a service manager."""
        return cls(settings, lambda: settings)

    def enable_reload(
        self,
        loop: asyncio.AbstractEventLoop,
        live: frozenset[str] = frozenset(),
        on_change: Callable[[Settings], None] | None = None,
    ) -> None:
        """Reload the settings at SIGHUP, if there is a manager. (Elsewhere SIGHUP means that the terminal is gone, and
        ends the process.)

        ``live``: settings, or sections, that this process applies while it runs. ``on_change`` is called with all
        current settings when one of them has changed.
        """
        self._live, self._on_change = ALWAYS_LIVE | live, on_change
        if self.manager.is_present:
            loop.add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Reload the settings. An error in the file changes nothing."""
        self.manager.send_reloading()
        try:
            new, origins = self.load(), self.origins()
        except ConfigError as error:
            log.error("settings_refused", reason=str(error))
        else:
            self._apply(split_changes(self.settings, new, self._live))
            in_force = self.settings.model_dump(mode="json")
            self._origins |= {name: origin for name, origin in origins.items() if get(in_force, name) == origin[0]}
        self.manager.send_ready()

    def describe_settings(self, process: Process, settings: Settings | None = None) -> tuple[ShownSetting, ...]:
        """Return the current settings, for people. ``settings``: as completed by the process, if it has."""
        return describe_settings(settings or self.settings, self._origins, process)

    def _apply(self, change: SettingsChange) -> None:
        log.info("settings_reloaded", changed=list(change.immediate), need_a_restart=list(change.need_a_restart))
        self.settings = change.settings
        logs.configure(self.settings.log)
        if self._on_change is not None and set(change.immediate) - ALWAYS_LIVE:
            self._on_change(self.settings)


@dataclass(frozen=True, slots=True)
class SettingsChange:
    """Changes of the settings, by name."""

    immediate: tuple[str, ...]  # applied without a restart
    need_a_restart: tuple[str, ...]
    settings: Settings  # the settings from now on; those that need a restart have their old values


def split_changes(old: Settings, new: Settings, live: frozenset[str]) -> SettingsChange:
    """Divide the changed settings into those in ``live`` and those that need a restart.

    Settings that only a broker reads are not reported by other processes.
    """
    changed = [name for name in changed_names(old.model_dump(), new.model_dump()) if _is_read(name, live)]
    immediate = tuple(name for name in changed if _section(name) in live or name in live)
    settings = old
    for name in immediate:
        section, key = name.split(".")
        part = getattr(settings, section).model_copy(update={key: getattr(getattr(new, section), key)})
        settings = settings.model_copy(update={section: part})
    return SettingsChange(immediate, tuple(name for name in changed if name not in immediate), settings)


def _is_read(name: str, live: frozenset[str]) -> bool:
    return _section(name) != _BROKER_SECTION or _BROKER_SECTION in live


def _section(name: str) -> str:
    return name.partition(".")[0]


def changed_names(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield the names of settings that differ."""
    for key in new:
        name = f"{within}{key}"
        if isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping) and not within:
            yield from changed_names(old[key], new[key], f"{name}.")
        elif old.get(key) != new[key]:
            yield name
