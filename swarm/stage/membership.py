"""What this worker is to its broker: introduced, welcomed, parked when nothing is heard of it, told to go."""

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
HELLO_AGAIN_S = 2.0  # a broker answers at once, and waits for longer when it was started again; twice is to join anew


class Notes(Protocol):
    """Writes a line for the log."""

    def __call__(self, event: str, level: str = "info", **fields: object) -> None: ...


@dataclass(slots=True)
class Membership:
    """Appends what is to be done to ``out``. While ``parked``, the worker keeps all that it holds and sends nothing.
    ``holds_back``: whether something must be done before a Hello may be said."""

    out: list[Action]
    note: Notes
    holds_back: Callable[[], bool] = lambda: False
    dtypes: tuple[str, ...] = ()  # in which this worker could compute, as its settings allow
    welcome: Welcome | None = None
    parked: bool = False
    heard_at: float = 0.0
    introduced_at: float | None = None  # when Hello was said, until it is answered

    def connected(self, now: float) -> None:
        """There is a broker, and it wants to know who this is."""
        self.heard_at = now
        self.introduce(now)

    def heard(self, now: float) -> None:
        """The broker gave an order."""
        self.heard_at = now
        if self.parked:
            self.parked = False
            self.note("unparked")

    def begin(self, order: Welcome) -> None:
        """The broker takes this worker in."""
        self.welcome = order
        self.introduced_at = None
        self.out.append(StartBeats(order.beat_endpoint, order.beat_interval_s))
        if order.wants:
            self.out.append(SendAssets(order.wants))

    def take(self, order: Order) -> bool:
        """Take an order about membership; False if it is about something else."""
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
                pass  # hearing it is all it is for
            case _:
                return False
        return True

    def tick(self, now: float) -> None:
        lease_s = self.welcome.lease_s if self.welcome is not None else DEFAULT_LEASE_S
        if not self.parked and self.welcome is not None and now - self.heard_at > lease_s:
            self.parked = True
            self.note("parked", "warning", reason=f"nothing heard from the broker for {lease_s:.0f} s")
        if self.introduced_at is not None and now - self.introduced_at > HELLO_AGAIN_S:
            self.introduce(now)  # that Hello, or the answer to it, was lost

    def introduce(self, now: float) -> None:
        """Say Hello, unless something must be done first."""
        if self.holds_back():
            self.introduced_at = None
            return
        self.introduced_at = now
        self.out.append(Introduce())
