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
    RestartWithDtype,
    SendAssets,
    SendHello,
    StartHeartbeats,
)
from swarm.wire.messages import Denied, LeaseRenewed, Order, Rejoin, Release, Welcome

DEFAULT_LEASE_S = 10.0
# until a Hello is repeated. A broker answers within milliseconds, or later after its own restart; a second Hello makes
# the worker join again
HELLO_RETRY_S = 2.0


class LogWriter(Protocol):
    """Function that writes an event to the log."""

    def __call__(self, event: str, level: str = "info", **fields: object) -> None: ...


@dataclass(slots=True)
class BrokerMembership:
    """State of this worker towards its broker. Appends its actions to ``actions``."""

    actions: list[Action]
    write_log: LogWriter
    defer_hello: Callable[[], bool] = lambda: False  # whether Hello must wait; it then starts the necessary device test
    dtypes: tuple[str, ...] = ()  # types of weights that this worker could compute with, as its settings allow
    welcome: Welcome | None = None  # the broker's answer to Hello; None before the first one
    is_parked: bool = False  # the broker has been silent for a lease: the worker keeps everything and sends nothing
    last_order_at: float = 0.0  # time of the last sign of the broker
    hello_sent_at: float | None = None  # time of a Hello that is not answered yet

    def on_connected(self, now: float) -> None:
        """Introduce this worker after the control connection is established."""
        self.last_order_at = now
        self.send_hello(now)

    def on_order_received(self, now: float) -> None:
        """Record a sign of the broker, and end parking."""
        self.last_order_at = now
        if self.is_parked:
            self.is_parked = False
            self.write_log("unparked")

    def on_welcome(self, order: Welcome) -> None:
        """Adopt the broker's welcome: start heartbeats and send the requested files."""
        self.welcome = order
        self.hello_sent_at = None
        self.actions.append(StartHeartbeats(order.beat_endpoint, order.beat_interval_s))
        if order.wants:
            self.actions.append(SendAssets(order.wants))

    def handle_order(self, order: Order) -> bool:
        """Handle an order about membership; return False if the order is about something else."""
        match order:
            case Denied(reason=reason, dtype=dtype) if dtype in self.dtypes:
                self.actions.append(RestartWithDtype(dtype, reason))
            case Denied(reason=reason, dtype=dtype):
                cant = f"; this device can't compute in {dtype}" if dtype and len(self.dtypes) > 1 else ""
                self.actions.append(Exit(EX_CONFIG, f"the broker does not take this worker: {reason}{cant}"))
            case Rejoin(reason=reason):
                self.write_log("rejoining", "warning", reason=reason)
                self.send_hello(self.last_order_at)
            case Release(reason=reason, again=again):
                self.actions.append(Exit(EX_TEMPFAIL if again else 0, reason))
            case LeaseRenewed():
                pass  # its arrival renews the lease, which is its only purpose
            case _:
                return False
        return True

    def tick(self, now: float) -> None:
        lease_s = self.welcome.lease_s if self.welcome is not None else DEFAULT_LEASE_S
        if not self.is_parked and self.welcome is not None and now - self.last_order_at > lease_s:
            self.is_parked = True
            self.write_log("parked", "warning", reason=f"no message from the broker for {lease_s:.0f} s")
        if self.hello_sent_at is not None and now - self.hello_sent_at > HELLO_RETRY_S:
            self.send_hello(now)  # the Hello or its answer was lost

    def send_hello(self, now: float) -> None:
        """Send Hello, unless a device test must pass first."""
        if self.defer_hello():
            self.hello_sent_at = None
            return
        self.hello_sent_at = now
        self.actions.append(SendHello())
