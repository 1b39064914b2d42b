"""What a stage's core can ask for: orders to its shell, carried out in the order given.

Everything but ``Load`` happens in the compute thread; ``Compute`` is answered by Computed, ComputeFenced or
ComputeFailed, ``Load`` by Loaded or LoadFailed, ``TestDevice`` by DeviceTested.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from swarm.stage.executor import Batch, Executor
from swarm.wire.messages import Edge, LayerRange, Step, StepDone, WorkerMessage

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


EX_TEMPFAIL = 75  # the exit code that means: start again
EX_CONFIG = 78  # the exit code that means: starting again will not help


@dataclass(frozen=True, slots=True)
class Introduce:
    """Say Hello to the broker with what is held (the shell adds what it knows of the machine)."""


@dataclass(frozen=True, slots=True)
class Tell:
    """Send over the control connection."""

    message: WorkerMessage


@dataclass(frozen=True, slots=True)
class StartBeats:
    endpoint: str
    interval_s: float


@dataclass(frozen=True, slots=True)
class Admit:
    """From now on steps are taken from who has one of these keys, and from nobody else. ``relay``: where they are
    waited for beside the own door; empty: nowhere."""

    keys: frozenset[str]
    relay: str = ""


@dataclass(frozen=True, slots=True)
class SendAssets:
    """Send these tokenizer files to the broker."""

    names: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """Try whether the next stage's door can be reached, and the relay by which steps are to come here, if they are;
    then load and warm these layers, in the background. ``gently``: another plan serves meanwhile, so nobody waits."""

    epoch: int
    layers: LayerRange
    standby: tuple[LayerRange, ...]
    max_sequences: int
    edge: Edge
    relay: str = ""
    gently: bool = False


@dataclass(frozen=True, slots=True)
class LoadStandby:
    """Load and warm these layers in the background, for others; forget those kept before that are not among them."""

    layers: tuple[LayerRange, ...]


@dataclass(frozen=True, slots=True)
class StopStandby:
    """Something that is waited for must be loaded: come to an end with what is kept so far."""


@dataclass(frozen=True, slots=True)
class UseLayers:
    """Compute with these layers from now on, keep those loaded; the others' memory goes back."""

    layers: LayerRange
    kept: tuple[LayerRange, ...]


@dataclass(frozen=True, slots=True)
class OpenEdge:
    """A fresh connection to the next stage; the one before is dropped with all that it holds."""

    epoch: int
    edge: Edge


@dataclass(frozen=True, slots=True)
class CutOff:
    """Send nothing more, also of what waits to be sent, to whose door has this key."""

    key: str


@dataclass(frozen=True, slots=True)
class OpenSequence:
    sequence: int
    limit: int


@dataclass(frozen=True, slots=True)
class ForkSequence:
    """Open a sequence with a copy of another one's first positions."""

    sequence: int
    source: int
    position: int
    limit: int


@dataclass(frozen=True, slots=True)
class ShrinkSequence:
    """Cut a sequence, and reserve no more than what it then holds."""

    sequence: int
    limit: int


@dataclass(frozen=True, slots=True)
class TruncateSequence:
    sequence: int
    position: int


@dataclass(frozen=True, slots=True)
class ReleaseSequence:
    sequence: int


@dataclass(frozen=True, slots=True)
class Compute:
    epoch: int
    step: int
    batch: Batch
    cause: str = ""  # for the log
    in_pieces: bool = False  # a few positions at a time, which takes less memory and gives the same bits


@dataclass(frozen=True, slots=True)
class DropSpare:
    """Drop the layers kept for others, and what a comparison holds: the device is short of memory."""


@dataclass(frozen=True, slots=True)
class TestDevice:
    """Compute a little through the layers in use, in a place of its own, and compare; answered by DeviceTested."""


@dataclass(frozen=True, slots=True)
class ComputeAside:
    """Compute a part of what is computed again for a comparison; answered by AsideComputed or AsideFailed."""

    epoch: int
    ticket: int
    batch: Batch
    limit: int  # where it ends


@dataclass(frozen=True, slots=True)
class SendAside:
    """Send a step to a stage that nothing else is sent to, over a connection for this alone."""

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
    """Tell the broker, over the data edge, that a step is done."""

    done: StepDone


@dataclass(frozen=True, slots=True)
class Exit:
    """The process ends: in good order (code 0), or because it can never work (code 78)."""

    code: int
    reason: str


@dataclass(frozen=True, slots=True)
class Recast:
    """The worker introduces itself again with weights of another type, in which the swarm computes."""

    dtype: str
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """A fact for the log."""

    event: str
    level: str = "info"
    fields: dict[str, object] = field(default_factory=dict)


Room = OpenSequence | ForkSequence | ShrinkSequence | TruncateSequence | ReleaseSequence  # what a sequence holds


def arrange(executor: Executor, room: Room) -> None:
    """Have the executor do it."""
    match room:
        case OpenSequence(sequence, limit):
            executor.open(sequence, limit)
        case ForkSequence(sequence, source, position, limit):
            executor.fork(sequence, source, position, limit)
        case ShrinkSequence(sequence, limit):
            executor.shrink(sequence, limit)
        case TruncateSequence(sequence, position):
            executor.truncate(sequence, position)
        case ReleaseSequence(sequence):
            executor.release(sequence)


Action = (
    Introduce
    | Tell
    | StartBeats
    | Admit
    | SendAssets
    | Load
    | LoadStandby
    | StopStandby
    | UseLayers
    | OpenEdge
    | CutOff
    | Room
    | Compute
    | DropSpare
    | TestDevice
    | ComputeAside
    | SendAside
    | SendStep
    | SendDone
    | Exit
    | Recast
    | Note
)
