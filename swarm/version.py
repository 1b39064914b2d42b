"""Names this version of Swarm."""

__version__ = "0.2.0"
