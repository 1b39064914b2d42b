"""Events of a stage: facts, which ``core.handle`` takes one by one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swarm.stage.actions import Compute
from swarm.stage.executor import Capacity, ForwardResult, KvData
from swarm.wire.messages import AdapterEntry, KvPart, LayerRange, Order, Step

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class BrokerConnected:
    """The control connection is up (again). The broker has not welcomed this worker yet."""


@dataclass(frozen=True, slots=True)
class OrderArrived:
    """An order of the broker arrived over the control connection."""

    order: Order


@dataclass(frozen=True, slots=True)
class StepArrived:
    """A step arrived over the data connection."""

    step: Step
    hidden: NDArray[np.float32] | None  # [tokens, hidden]; None on the stage that embeds tokens
    num_bytes: int  # size of the message
    sender: str = ""  # the key with which the sender authenticated; empty: the listener checks no keys


@dataclass(frozen=True, slots=True)
class StepRefused:
    """A message over the data connection was damaged, truncated or malformed."""

    reason: str
    sender: str = ""


@dataclass(frozen=True, slots=True)
class Computed:
    """The rows of the running step went through the layers."""

    epoch: int
    step: int
    forwarded: ForwardResult


@dataclass(frozen=True, slots=True)
class ComputeFenced:
    """The fence rose while the step was running; its result is discarded."""

    epoch: int
    step: int


@dataclass(frozen=True, slots=True)
class ComputeFailed:
    """The device failed to compute a step."""

    compute: Compute
    reason: str
    is_memory: bool = False  # the device had too little memory


@dataclass(frozen=True, slots=True)
class KvOverfull:
    """Sequences could not be opened, or a step not be computed, because the keys and values need more memory than the
    broker counts. ``unopened``: these sequences are not open in the executor."""

    reason: str
    unopened: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class DeviceTested:
    """The test of the device has ended."""

    problem: str = ""  # the reason for a failure; empty: the test passed


@dataclass(frozen=True, slots=True)
class Idle:
    """No step is waiting: there is time for rechecks."""


@dataclass(frozen=True, slots=True)
class RecheckComputed:
    """A chunk of a recheck went through the layers."""

    ticket: int
    forwarded: ForwardResult


@dataclass(frozen=True, slots=True)
class RecheckFailed:
    """A recheck failed, or a fence ended it."""

    ticket: int
    reason: str


@dataclass(frozen=True, slots=True)
class Loaded:
    """The layers of this epoch's plan are loaded and warm."""

    epoch: int
    capacity: Capacity


@dataclass(frozen=True, slots=True)
class LoadFailed:
    """The layers of this epoch's plan could not be loaded, or a peer of the plan cannot be reached."""

    epoch: int
    reason: str
    cant_reach: str = ""  # the worker whose listener cannot be reached from here, if that is the reason


@dataclass(frozen=True, slots=True)
class StandbyProgressed:
    """Loading of standby layers continues: these layers are warm so far."""

    layers: tuple[LayerRange, ...]
    load_s: float  # time for the newest layers, without rests
    bits: str = ""  # workers with equal ones compute equal keys and values


@dataclass(frozen=True, slots=True)
class StandbyLoaded:
    """Loading of standby layers has ended: these layers are warm in addition to the plan's."""

    layers: tuple[LayerRange, ...]
    load_s: float  # time for the layers that no ``StandbyProgressed`` has reported, without rests
    problem: str = ""  # the reason why not all layers were loaded; empty: all were
    bits: str = ""  # workers with equal ones compute equal keys and values


@dataclass(frozen=True, slots=True)
class AdaptersLoaded:
    """A ``LoadAdapters`` has ended: these are loaded now, with their digests. ``problem``: why none is."""

    adapters: tuple[AdapterEntry, ...]
    problem: str = ""


@dataclass(frozen=True, slots=True)
class KvArrived:
    """A part of another worker's keys and values arrived over the connection for copies; its checksum is right."""

    part: KvPart
    data: KvData
    free_bytes: int  # memory that copies may still take
    sender: str = ""  # the key with which the sender authenticated; empty: the listener checks no keys


@dataclass(frozen=True, slots=True)
class KvStoreFailed:
    """A ``StoreKv`` could not be carried out, perhaps for lack of memory."""

    sequence: int
    reason: str


@dataclass(frozen=True, slots=True)
class KvTurn:
    """There is time to send parts of the keys and values to another worker.

    ``is_idle``: no step is waiting. Otherwise the sender's budget decides. ``blocked``: incarnations of the targets
    whose connection accepts nothing now. ``may_spill``: the disk's thread accepts a chunk.
    """

    is_idle: bool
    blocked: frozenset[str] = frozenset()
    may_spill: bool = False


@dataclass(frozen=True, slots=True)
class KvPartsTaken:
    """A ``SendKvParts`` was carried out: it took this long in the compute thread. ``num_bytes`` 0: nothing was sent,
    since the connection to the target is gone, or no sequence can be read."""

    to: str
    num_bytes: int
    took_s: float


@dataclass(frozen=True, slots=True)
class ChunkSpilled:
    """A ``SpillChunk`` was carried out: it took this long in the compute thread. ``is_taken``: the chunk will be
    written, unless the disk prevents it. ``is_whole``: all of it was read; otherwise the same action reads on."""

    sequence: int
    took_s: float
    is_taken: bool
    is_whole: bool = True


@dataclass(frozen=True, slots=True)
class ChunkLost:
    """A chunk of a sequence could not be written: the disk is full, or fails."""

    sequence: int
    start: int


@dataclass(frozen=True, slots=True)
class SpilledRead:
    """Keys and values that were read from disk and verified, block after block. ``is_last``: there are no more."""

    ticket: int
    sequence: int
    blocks: tuple[KvData, ...]
    is_last: bool


@dataclass(frozen=True, slots=True)
class SpilledStored:
    """A ``StoreSpilled`` was carried out. ``problem``: why not all of it is stored; empty: it is."""

    ticket: int
    sequence: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class StageTick:
    """Time has passed."""

    kv_free_bytes: int = 0  # memory that copies of keys and values may still take; negative: some must be dropped


Event = (
    BrokerConnected
    | OrderArrived
    | StepArrived
    | StepRefused
    | Computed
    | ComputeFenced
    | ComputeFailed
    | KvOverfull
    | DeviceTested
    | Idle
    | RecheckComputed
    | RecheckFailed
    | Loaded
    | LoadFailed
    | StandbyProgressed
    | StandbyLoaded
    | AdaptersLoaded
    | KvArrived
    | KvStoreFailed
    | KvTurn
    | KvPartsTaken
    | ChunkSpilled
    | ChunkLost
    | SpilledRead
    | SpilledStored
    | StageTick
)
