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
from swarm.config.sections import get
from swarm.config.shown import Process, Shown, shown
from swarm.errors import ConfigError
from swarm.log import get_logger
from swarm.service import handed
from swarm.service.manager import Manager

if TYPE_CHECKING:
    from swarm.config import Settings

Origins = Mapping[str, tuple[object, str]]

AT_ONCE: Final = frozenset({"log.level", "log.format"})  # settings that every process applies without a restart
_BROKERS: Final = "plan"  # a section that only the broker reads

log = get_logger(__name__)


@dataclass
class Unit:
    """Settings of a process, and its service manager."""

    settings: Settings  # current settings
    load: Callable[[], Settings]  # reads flags, environment and file again, as at the start of the process
    manager: Manager = field(default_factory=Manager)
    origins: Callable[[], Origins] = dict  # origin of each value (``config.origins``)
    _live: frozenset[str] = AT_ONCE  # settings, or sections, that apply without a restart
    _told: Callable[[Settings], None] | None = None  # called with all settings when one of ``_live`` has changed
    _origins: dict[str, tuple[object, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._origins = dict(self.origins())

    @classmethod
    def begun(cls, settings: Settings, load: Callable[[], Settings], origins: Callable[[], Origins]) -> Unit:
        """Return this process as a unit, whether systemd started it or not."""
        handed.take_all(os.environ)
        return cls(settings, load, Manager.of(os.environ), origins)

    @classmethod
    def nobodys(cls, settings: Settings) -> Unit:
        """Return a process without a service manager."""
        return cls(settings, lambda: settings)

    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        live: frozenset[str] = frozenset(),
        told: Callable[[Settings], None] | None = None,
    ) -> None:
        """Reload the settings at SIGHUP, if there is a manager. (Elsewhere SIGHUP means that the terminal is gone, and
        ends the process.)

        ``live``: settings, or sections, that this process applies while it runs. ``on_change`` is called with all
        current settings when one of them has changed.
        """
        self._live, self._told = AT_ONCE | live, told
        if self.manager.is_there:
            loop.add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Reload the settings. An error in the file changes nothing."""
        self.manager.reloading()
        try:
            new, origins = self.load(), self.origins()
        except ConfigError as error:
            log.error("settings_refused", reason=str(error))
        else:
            self._take(sorted_out(self.settings, new, self._live))
            in_force = self.settings.model_dump(mode="json")
            self._origins |= {name: each for name, each in origins.items() if get(in_force, name) == each[0]}
        self.manager.ready()

    def shown(self, process: Process, settings: Settings | None = None) -> tuple[Shown, ...]:
        """Return the current settings, for people. ``settings``: as completed by the process, if it has."""
        return shown(settings or self.settings, self._origins, process)

    def _take(self, news: News) -> None:
        log.info("settings_reloaded", changed=list(news.at_once), need_a_restart=list(news.need_a_restart))
        self.settings = news.settings
        logs.configure(self.settings.log)
        if self._told is not None and set(news.at_once) - AT_ONCE:
            self._told(self.settings)


@dataclass(frozen=True, slots=True)
class News:
    """Changes of the settings, by name."""

    at_once: tuple[str, ...]  # applied without a restart
    need_a_restart: tuple[str, ...]
    settings: Settings  # the settings from now on; those that need a restart have their old values


def sorted_out(old: Settings, new: Settings, live: frozenset[str]) -> News:
    """Divide the changed settings into those in ``live`` and those that need a restart.

    Settings that only a broker reads are not reported by other processes.
    """
    changed = [name for name in changes(old.model_dump(), new.model_dump()) if _is_read(name, live)]
    at_once = tuple(name for name in changed if _section(name) in live or name in live)
    counts = old
    for name in at_once:
        section, key = name.split(".")
        part = getattr(counts, section).model_copy(update={key: getattr(getattr(new, section), key)})
        counts = counts.model_copy(update={section: part})
    return News(at_once, tuple(name for name in changed if name not in at_once), counts)


def _is_read(name: str, live: frozenset[str]) -> bool:
    return _section(name) != _BROKERS or _BROKERS in live


def _section(name: str) -> str:
    return name.partition(".")[0]


def changes(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """Yield the names of settings that differ."""
    for key in new:
        name = f"{within}{key}"
        if isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping) and not within:
            yield from changes(old[key], new[key], f"{name}.")
        elif old.get(key) != new[key]:
            yield name
