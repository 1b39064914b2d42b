"""The validated settings, from a TOML file, the environment and flags, in rising precedence.

``load()`` reads the file that ``--config`` or ``SWARM_CONFIG`` names (otherwise ``config/swarm.toml`` under the working
directory, if it exists), then variables such as ``SWARM_BROKER__PORT``, then the flags that a command passes on. An
unknown key, a wrong type or a value out of range is a :class:`~swarm.errors.ConfigError` that names the key, the value,
its origin and the remedy.

Every field states its unit, its default and the reason; ``python -m swarm.config`` prints them as a commented file.
"""

from __future__ import annotations

from swarm.config.broker import BrokerSettings, HealthSettings, RecoverySettings
from swarm.config.load import DEFAULTS, OTHER_VARIABLES, file_in_use, load, load_file, origins
from swarm.config.plan import PlanSettings
from swarm.config.sections import (
    BatchSettings,
    ClientSettings,
    GatewaySettings,
    LogSettings,
    Settings,
    UpstreamSettings,
    defaults,
    get,
    setting_names,
)
from swarm.config.template import template
from swarm.config.values import Section, is_loopback
from swarm.config.worker import WorkerSettings
