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
from swarm.errors import ConfigError
from swarm.log import get_logger
from swarm.service import handed
from swarm.service.manager import Manager

if TYPE_CHECKING:
    from swarm.config import Settings

AT_ONCE: Final = frozenset({"log.level", "log.format"})

log = get_logger(__name__)


@dataclass
class Unit:
    """``load``: reads flags, environment and file again, as the process did at its start."""

    settings: Settings
    load: Callable[[], Settings]
    manager: Manager = field(default_factory=Manager)

    @classmethod
    def begun(cls, settings: Settings, load: Callable[[], Settings]) -> Unit:
        """This process, as systemd started it, if it did."""
        handed.take_all(os.environ)
        return cls(settings, load, Manager.of(os.environ))

    @classmethod
    def nobodys(cls, settings: Settings) -> Unit:
        """A process that no manager looks after."""
        return cls(settings, lambda: settings)

    def listen(self, loop: asyncio.AbstractEventLoop) -> None:
        """Obey SIGHUP, if there is a manager; elsewhere it says that a terminal is gone, and ends the process."""
        if self.manager.is_there:
            loop.add_signal_handler(signal.SIGHUP, self.reload)

    def reload(self) -> None:
        """Read them again. What is wrong in the file changes nothing."""
        self.manager.reloading()
        try:
            new = self.load()
        except ConfigError as error:
            log.error("settings_refused", reason=str(error))
        else:
            changed = tuple(changes(self.settings.model_dump(), new.model_dump()))
            at_once = [key for key in changed if key in AT_ONCE]
            log.info("settings_reloaded", changed=at_once, need_a_restart=[k for k in changed if k not in AT_ONCE])
            logs.configure(new.log)
            self.settings = self.settings.model_copy(update={"log": new.log})
        self.manager.ready()


def changes(old: Mapping[str, Any], new: Mapping[str, Any], within: str = "") -> Iterator[str]:
    """The names of settings that differ."""
    for key in new:
        name = f"{within}{key}"
        if isinstance(new[key], Mapping) and isinstance(old.get(key), Mapping) and not within:
            yield from changes(old[key], new[key], f"{name}.")
        elif old.get(key) != new[key]:
            yield name
