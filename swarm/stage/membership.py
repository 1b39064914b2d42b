"""The worker's state towards its broker: introduced, welcomed, parked while the broker is silent, released."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from swarm.stage.actions import (
    EX_CONFIG,
    EX_TEMPFAIL,
    Action,
    Exit,
    Introduce,
    Recast,
    SendAssets,
    StartBeats,
)
from swarm.wire.messages import Alive, Denied, Order, Rejoin, Release, Welcome

DEFAULT_LEASE_S = 10.0
# until a Hello is repeated. A broker answers within milliseconds, or later after its own restart; a second Hello makes
# the worker join again
HELLO_AGAIN_S = 2.0


class Notes(Protocol):
    """Function that writes an event to the log."""

    def __call__(self, event: str, level: str = "info", **fields: object) -> None: ...


@dataclass(slots=True)
class Membership:
    """State of this worker towards its broker. Appends its actions to ``actions``."""

    out: list[Action]
    note: Notes
    holds_back: Callable[[], bool] = lambda: False  # whether Hello must wait; it then starts the necessary device test
    dtypes: tuple[str, ...] = ()  # types of weights that this worker could compute with, as its settings allow
    welcome: Welcome | None = None  # the broker's answer to Hello; None before the first one
    parked: bool = False  # the broker has been silent for a lease: the worker keeps everything and sends nothing
    heard_at: float = 0.0  # time of the last sign of the broker
    introduced_at: float | None = None  # time of a Hello that is not answered yet

    def connected(self, now: float) -> None:
        """Introduce this worker after the control connection is established."""
        self.heard_at = now
        self.introduce(now)

    def heard(self, now: float) -> None:
        """Record a sign of the broker, and end parking."""
        self.heard_at = now
        if self.parked:
            self.parked = False
            self.note("unparked")

    def begin(self, order: Welcome) -> None:
        """Adopt the broker's welcome: start heartbeats and send the requested files."""
        self.welcome = order
        self.introduced_at = None
        self.out.append(StartBeats(order.beat_endpoint, order.beat_interval_s))
        if order.wants:
            self.out.append(SendAssets(order.wants))

    def take(self, order: Order) -> bool:
        """Handle an order about membership; return False if the order is about something else."""
        match order:
            case Denied(reason=reason, dtype=dtype) if dtype in self.dtypes:
                self.out.append(Recast(dtype, reason))
            case Denied(reason=reason, dtype=dtype):
                cant = f"; this device can't compute in {dtype}" if dtype and len(self.dtypes) > 1 else ""
                self.out.append(Exit(EX_CONFIG, f"the broker does not take this worker: {reason}{cant}"))
            case Rejoin(reason=reason):
                self.note("rejoining", "warning", reason=reason)
                self.introduce(self.heard_at)
            case Release(reason=reason, again=again):
                self.out.append(Exit(EX_TEMPFAIL if again else 0, reason))
            case Alive():
                pass  # its arrival renews the lease, which is its only purpose
            case _:
                return False
        return True

    def tick(self, now: float) -> None:
        lease_s = self.welcome.lease_s if self.welcome is not None else DEFAULT_LEASE_S
        if not self.parked and self.welcome is not None and now - self.heard_at > lease_s:
            self.parked = True
            self.note("parked", "warning", reason=f"nothing heard from the broker for {lease_s:.0f} s")
        if self.introduced_at is not None and now - self.introduced_at > HELLO_AGAIN_S:
            self.introduce(now)  # the Hello or its answer was lost

    def introduce(self, now: float) -> None:
        """Send Hello, unless a device test must pass first."""
        if self.holds_back():
            self.introduced_at = None
            return
        self.introduced_at = now
        self.out.append(Introduce())
