"""Actions of a stage's core: orders to its shell, which carries them out in the order given.

All actions except ``LoadLayers`` run in the compute thread. The shell answers ``Compute`` with Computed, ComputeFenced
or ComputeFailed, ``LoadLayers`` with Loaded or LoadFailed, and ``TestDevice`` with DeviceTested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from swarm.stage.executor import Batch, Executor, KvData
from swarm.wire.messages import AdapterEntry, Edge, LayerRange, Lineage, Open, Step, StepDone, WorkerMessage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


EX_TEMPFAIL = 75  # exit code for "start again"
EX_CONFIG = 78  # exit code for "starting again will not help"
CHUNK: Final = 256  # positions of one file of keys and values on disk; a multiple of BLOCK


@dataclass(frozen=True, slots=True)
class SendHello:
    """Send Hello to the broker, with the stored sequences. The shell adds the facts about the machine."""


@dataclass(frozen=True, slots=True)
class SendToBroker:
    """Send a message over the control connection."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class StartHeartbeats:
    """Start sending heartbeats to this endpoint, or move them there."""

    endpoint: str
    interval_s: float


@dataclass(frozen=True, slots=True)
class AllowSenders:
    """Accept steps only from peers with one of these keys, from now on."""

    keys: frozenset[str]
    relay: str = ""  # the relay at which steps arrive in addition to the worker's own listener; empty: none


@dataclass(frozen=True, slots=True)
class SendAssets:
    """Send these tokenizer files to the broker."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class LoadLayers:
    """Load and warm these layers in the background.

    The shell first checks that it can connect to the next stage's listener and, if steps are to arrive by relay, to the
    relay.
    """

    epoch: int
    layers: LayerRange
    standby: tuple[LayerRange, ...]  # where the next stage listens
    max_sequences: int  # the relay at which steps are to arrive; empty: none
    edge: Edge
    relay: str = ""
    gently: bool = False  # another plan serves meanwhile, so its steps go first


@dataclass(frozen=True, slots=True)
class LoadStandby:
    """Load and warm these standby layers in the background. Drop standby layers that are not in the list."""

    layers: tuple[LayerRange, ...]


@dataclass(frozen=True, slots=True)
class StopStandby:
    """Stop loading standby layers, and keep the ones loaded so far: a plan's layers must be loaded."""


@dataclass(frozen=True, slots=True)
class LoadAdapters:
    """Load these adapters into all layers that are loaded, and those that will be; then feed AdaptersLoaded."""

    adapters: tuple[AdapterEntry, ...]


@dataclass(frozen=True, slots=True)
class DropAdapters:
    """Drop the adapters with these keys; no row will have them."""

    keys: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class UseLayers:
    """Compute with these layers from now on, keep the standby layers in ``kept``, and free the memory of all others.
    Forked sequences share positions by ``share_unit``."""

    layers: LayerRange
    kept: tuple[LayerRange, ...]
    share_unit: int = 0


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """Open a new connection to the next stage. The previous connection is dropped, with everything queued in it."""

    epoch: int
    edge: Edge


@dataclass(frozen=True, slots=True)
class DisconnectKey:
    """Send nothing more to the peer whose listener has this key, including messages that are already queued."""

    key: str


@dataclass(frozen=True, slots=True)
class OpenSequence:
    """Reserve memory for a sequence of up to ``limit`` positions."""

    sequence: int
    limit: int


@dataclass(frozen=True, slots=True)
class ForkSequence:
    """Open a sequence with a copy of the first ``position`` positions of another sequence. ``may_share``: their memory
    may be shared."""

    sequence: int
    source: int
    position: int
    limit: int
    may_share: bool = True


@dataclass(frozen=True, slots=True)
class SharePrefix:
    """Count the first ``position`` positions of a sequence as shared with another one. ``is_mapped``: the source has
    them in all layers in use, and from now on both use its memory."""

    sequence: int
    source: int
    position: int
    is_mapped: bool


@dataclass(frozen=True, slots=True)
class ShrinkSequence:
    """Cut a sequence to ``limit`` positions, and free the memory reserved beyond them."""

    sequence: int
    limit: int


@dataclass(frozen=True, slots=True)
class TruncateSequence:
    """Drop a sequence's positions from ``position`` on."""

    sequence: int
    position: int


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    """Drop a sequence and free its memory."""

    sequence: int


@dataclass(frozen=True, slots=True)
class Compute:
    """Run a batch through the layers in use."""

    epoch: int
    step: int
    batch: Batch
    cause: str = ""  # the broker's event from which this follows; for the log
    in_pieces: bool = False  # compute a few positions at a time: less memory, the same bits


@dataclass(frozen=True, slots=True)
class FreeSpareMemory:
    """Free the standby layers and the memory of a recheck: the device is short of memory."""


@dataclass(frozen=True, slots=True)
class TestDevice:
    """Compute a few positions through the layers in use, in scratch memory, and compare. Answered by DeviceTested."""


@dataclass(frozen=True, slots=True)
class ComputeRecheck:
    """Compute one chunk of a recheck. Answered by RecheckComputed or RecheckFailed."""

    epoch: int
    ticket: int
    batch: Batch
    limit: int  # the position at which the recheck ends


@dataclass(frozen=True, slots=True)
class SendRecheck:
    """Send a recheck to another stage, over a connection that is used for this message only."""

    edge: Edge
    step: Step
    hidden: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class SendStep:
    """Send a step to the next stage."""

    step: Step
    hidden: NDArray[np.float32] | None


@dataclass(frozen=True, slots=True)
class SendDone:
    """Report a finished step to the broker, over the data connection."""

    done: StepDone


@dataclass(frozen=True, slots=True)
class ConnectKvTargets:
    """Have connections to these listeners for copies of keys and values, and to no others."""

    edges: tuple[Edge, ...]


@dataclass(frozen=True, slots=True)
class AllowKvSenders:
    """Accept copies of keys and values only from peers with one of these keys, from now on."""

    keys: frozenset[str]


@dataclass(frozen=True, slots=True)
class SendKvPart:
    """Read keys and values of one sequence and send them; a member of ``SendKvParts``."""

    to: Edge
    epoch: int
    lineage: Lineage
    sequence: int
    layers: LayerRange
    start: int  # a multiple of BLOCK
    tokens: tuple[int, ...]  # at these positions
    open: Open | None  # with the first part of a sequence for this target; without tokens


@dataclass(frozen=True, slots=True)
class SendKvParts:
    """Send parts of different sequences to one target together. Answered by KvPartsTaken."""

    parts: tuple[SendKvPart, ...]  # at least one

    @property
    def to(self) -> Edge:
        return self.parts[0].to


@dataclass(frozen=True, slots=True)
class StoreKv:
    """Store copied keys and values. If that fails, the shell answers with KvStoreFailed."""

    sequence: int
    limit: int
    data: KvData


@dataclass(frozen=True, slots=True)
class SpillChunk:
    """Read a chunk of a sequence's keys and values, or its next part, and have it written to disk. Answered by
    ChunkSpilled."""

    sequence: int
    layers: LayerRange
    start: int
    stop: int
    name: str  # digest of all tokens up to ``stop``
    bits: str


@dataclass(frozen=True, slots=True)
class ReadSpilled:
    """Read chunks of a sequence's keys and values from disk, in order, until one is missing. Answered by one or more
    SpilledRead."""

    ticket: int
    sequence: int
    layers: LayerRange
    start: int  # a multiple of BLOCK
    stop: int  # a multiple of CHUNK
    names: tuple[str, ...]  # of the chunks from the one on in which ``start`` lies
    bits: str


@dataclass(frozen=True, slots=True)
class StoreSpilled:
    """Store keys and values that were read from disk. Answered by SpilledStored, unless a StopReadingSpilled with this
    ticket comes before."""

    ticket: int
    sequence: int
    limit: int
    blocks: tuple[KvData, ...]


@dataclass(frozen=True, slots=True)
class StopReadingSpilled:
    """Read and store nothing more for this ticket."""

    ticket: int


@dataclass(frozen=True, slots=True)
class DropKv:
    """Drop a sequence's copied keys and values in these layers."""

    sequence: int
    layers: LayerRange


@dataclass(frozen=True, slots=True)
class Exit:
    """End the process: in good order (code 0), to be started again (75), or because it can never work (78)."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class RestartWithDtype:
    """Restart the worker with weights of another type: the type in which the swarm computes."""

    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class WriteStageLog:
    """Write an event to the log."""

    event: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)


# actions that change a sequence's memory
SequenceAction = (
    OpenSequence | ForkSequence | SharePrefix | ShrinkSequence | TruncateSequence | ReleaseSequence | StoreKv | DropKv
)


def apply_to_executor(executor: Executor, action: SequenceAction) -> None:
    """Apply the action to the executor."""
    match action:
        case OpenSequence(sequence, limit):
            executor.open(sequence, limit)
        case ForkSequence(sequence, source, position, limit, may_share):
            executor.fork(sequence, source, position, limit, may_share=may_share)
        case SharePrefix(sequence, source, position, is_mapped):
            executor.share(sequence, source, position, is_mapped=is_mapped)
        case ShrinkSequence(sequence, limit):
            executor.shrink(sequence, limit)
        case TruncateSequence(sequence, position):
            executor.truncate(sequence, position)
        case ReleaseSequence(sequence):
            executor.release(sequence)
        case StoreKv(sequence, limit, data):
            executor.write_kv(sequence, limit, data)
        case DropKv(sequence, layers):
            executor.drop_kv(sequence, layers)


Action = (
    SendHello
    | SendToBroker
    | StartHeartbeats
    | AllowSenders
    | SendAssets
    | LoadLayers
    | LoadStandby
    | StopStandby
    | LoadAdapters
    | DropAdapters
    | UseLayers
    | OpenEdge
    | DisconnectKey
    | SequenceAction
    | Compute
    | FreeSpareMemory
    | TestDevice
    | ComputeRecheck
    | SendRecheck
    | SendStep
    | SendDone
    | ConnectKvTargets
    | AllowKvSenders
    | SendKvParts
    | SpillChunk
    | ReadSpilled
    | StoreSpilled
    | StopReadingSpilled
    | Exit
    | RestartWithDtype
    | WriteStageLog
)
