"""Whoever wants to know which answers begin and end."""

from __future__ import annotations

from typing import Protocol

from swarm.gateway.answer import Counts
from swarm.gateway.desk.desk import Owner


class Ledger(Protocol):
    """Hears of each answer twice; must be quick, and must not raise."""

    def began(self, owner: Owner) -> None: ...

    def ended(self, owner: Owner, counts: Counts) -> None:
        """However it ended: what was computed until then."""
        ...


class NoLedger:
    """Keeps nothing."""

    def began(self, owner: Owner) -> None:
        pass

    def ended(self, owner: Owner, counts: Counts) -> None:
        pass
