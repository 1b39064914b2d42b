"""A process as a unit of systemd: its manager, and its settings, which are read again while it runs (``systemctl
reload``, which is SIGHUP): which were changed, which of them are in force at once, and which want a restart."""

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

AT_ONCE: Final = frozenset({"log.level", "log.format"})  # in every process
_BROKERS: Final = "plan"  # a section that nobody else reads

log = get_logger(__name__)


@dataclass
class Unit:
    """``load``: reads flags, environment and file again, as the process did at its start; ``origins``: where each value
    comes from then (``config.origins``)."""

    settings: Settings
    load: Callable[[], Settings]
    manager: Manager = field(default_factory=Manager)
    origins: Callable[[], Origins] = dict
    _live: frozenset[str] = AT_ONCE
    _told: Callable[[Settings], None] | None = None
    _origins: dict[str, tuple[object, str]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self._origins = dict(self.origins())

    @classmethod
    def begun(cls, settings: Settings, load: Callable[[], Settings], origins: Callable[[], Origins]) -> Unit:
        """This process, as systemd started it, if it did."""
        handed.take_all(os.environ)
        return cls(settings, load, Manager.of(os.environ), origins)

    @classmethod
    def nobodys(cls, settings: Settings) -> Unit:
        """A process that no manager looks after."""
        return cls(settings, lambda: settings)

    def listen(
        self,
        loop: asyncio.AbstractEventLoop,
        live: frozenset[str] = frozenset(),
        told: Callable[[Settings], None] | None = None,
    ) -> None:
        """Obey SIGHUP, if there is a manager; elsewhere it says that a terminal is gone, and ends the process.
        ``live``: settings, or sections of them, that this process can take while it runs; ``told`` gets all settings,
        as they count then, when one of these has changed."""
        self._live, self._told = AT_ONCE | live, told
        if self.manager.is_there:
            loop.add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Read them again. What is wrong in the file changes nothing."""
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
        """By which settings it runs now, for people. ``settings``: as the process has completed them, if it has."""
        return shown(settings or self.settings, self._origins, process)

    def _take(self, news: News) -> None:
        log.info("settings_reloaded", changed=list(news.at_once), need_a_restart=list(news.need_a_restart))
        self.settings = news.settings
        logs.configure(self.settings.log)
        if self._told is not None and set(news.at_once) - AT_ONCE:
            self._told(self.settings)


@dataclass(frozen=True, slots=True)
class News:
    """What has changed in the settings, by names. ``settings``: those that count from now on, in which what needs a
    restart is as it was."""

    at_once: tuple[str, ...]
    need_a_restart: tuple[str, ...]
    settings: Settings


def sorted_out(old: Settings, new: Settings, live: frozenset[str]) -> News:
    """Find what of the new settings a process takes that can take those which are ``live``. Those that only a broker
    reads are told of by no other process."""
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
    """The names of settings that differ."""
    for key in new:
        name = f"{within}{key}"
        if isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping) and not within:
            yield from changes(old[key], new[key], f"{name}.")
        elif old.get(key) != new[key]:
            yield name
