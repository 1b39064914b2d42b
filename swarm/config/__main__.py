"""Print the commented settings file: ``python -m swarm.config > config/swarm.toml``."""

from swarm.config.template import template

print(template(), end="")
