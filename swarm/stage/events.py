"""What can happen to a stage: facts. ``core.handle`` takes them one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.stage.actions import Compute
from swarm.stage.executor import Capacity, Forwarded
from swarm.wire.messages import LayerRange, Order, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BrokerConnected:
    """The control connection stands (again). It does not mean that the broker knows us."""


@dataclass(frozen=True, slots=True)
class OrderArrived:
    order: Order


@dataclass(frozen=True, slots=True)
class StepArrived:
    """A step came over the data edge; ``hidden`` [tokens, hidden] is None at the stage that embeds tokens. ``sender``:
    the key that who sent it has shown; empty: none was asked for."""

    step: Step
    hidden: NDArray[np.float32] | None
    num_bytes: int
    sender: str = ""


@dataclass(frozen=True, slots=True)
class StepRefused:
    """Something came over the data edge that is no message as it was sent: damaged, cut, or never one."""

    reason: str
    sender: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """The rows of the step under way went through the layers."""

    epoch: int
    step: int
    forwarded: Forwarded


@dataclass(frozen=True, slots=True)
class ComputeFenced:
    """The fence rose while the step was under way; nothing of it counts."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """The device could not do it. ``is_memory``: it had too little memory."""

    compute: Compute
    reason: str
    is_memory: bool = False


@dataclass(frozen=True, slots=True)
class DeviceTested:
    """The test of the device has ended. ``problem``: why it failed; empty: it passed."""

    problem: str = ""


@dataclass(frozen=True, slots=True)
class Leisure:
    """Nothing has come that waits: there is time for what can wait."""


@dataclass(frozen=True, slots=True)
class AsideComputed:
    """A part of what is computed again for a comparison went through the layers."""

    ticket: int
    forwarded: Forwarded


@dataclass(frozen=True, slots=True)
class AsideFailed:
    """What was to be computed again can't be, or a fence rose."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The layers of this epoch's plan are loaded and warm."""

    epoch: int
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """``cant_reach``: whose door can't be reached from here, if that is why."""

    epoch: int
    reason: str
    cant_reach: str = ""


@dataclass(frozen=True, slots=True)
class StandbyProgressed:
    """Loading for others goes on: these layers are warm by now. ``load_s``: what the newest took, without rests."""

    layers: tuple[LayerRange, ...]
    load_s: float


@dataclass(frozen=True, slots=True)
class StandbyLoaded:
    """Loading for others has ended: these layers are warm beside those of the plan. ``problem``: why not more.
    ``load_s``: what those took that no ``StandbyProgressed`` reported, without rests."""

    layers: tuple[LayerRange, ...]
    load_s: float
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed."""


Event = (
    BrokerConnected
    | OrderArrived
    | StepArrived
    | StepRefused
    | Computed
    | ComputeFenced
    | ComputeFailed
    | DeviceTested
    | Leisure
    | AsideComputed
    | AsideFailed
    | Loaded
    | LoadFailed
    | StandbyProgressed
    | StandbyLoaded
    | Tick
)
