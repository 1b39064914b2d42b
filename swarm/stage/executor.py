"""The executor: what a stage needs from whoever multiplies the matrices.

Threads: ``prepare`` runs in a loader thread while the compute thread goes on with the old layers; everything else is
called by the compute thread alone. KV belongs to a sequence *and* a layer, so that a layer which stays in the range
over a change of plan keeps its keys and values; the stage's core knows how far each range of layers stands.

``forward`` is prefill, prefill at an offset and decode in one: every row appends its positions from ``start`` on, after
what is already there. A row's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from swarm.params import SamplingParams
    from swarm.wire.messages import Failure, LayerCost, LayerRange, Manifest, Row, Sampled


_MEMORY_WORDS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether an executor's error says that the device had too little memory. Torch says so in a RuntimeError."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _MEMORY_WORDS)


class Fenced(Exception):
    """Raised by ``forward`` when the fence rose between two layers; nothing of the step counts."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Draw the token after row ``row``. ``history`` is every token so far, the first ``num_prompt`` the prompt."""

    row: int
    params: SamplingParams
    seed: int
    history: Sequence[int]
    num_prompt: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows, one after the other. ``hidden`` [tokens, hidden] float32, or None on the stage that embeds ``tokens``.

    ``alone``: all cores of the host may be used, since no other stage computes meanwhile, or seldom. ``through``: only
    these of the stage's layers, whose input ``hidden`` is then.
    """

    rows: tuple[Row, ...]
    tokens: NDArray[np.int64]
    hidden: NDArray[np.float32] | None
    samples: tuple[SampleJob, ...]
    alone: bool = True
    through: LayerRange | None = None


@dataclass(frozen=True, slots=True)
class Forwarded:
    """``hidden`` for the next stage (None on the last), tokens drawn in the order of ``samples``, device time spent.
    Parts of ``compute_s``: ``head_s`` for the head and the norm before it, ``copy_s`` for bringing ``hidden`` here.

    A sequence whose logits can't be sampled (not finite) stands in ``failed`` with the reason instead of ``sampled``;
    one that is to be drawn for another time, in ``late``.
    """

    hidden: NDArray[np.float32] | None
    sampled: tuple[Sampled, ...]
    failed: tuple[Failure, ...]
    compute_s: float
    sample_s: float
    head_s: float = 0.0
    copy_s: float = 0.0
    late: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Capacity:
    """What a prepared stage can hold and what preparing it took. ``kv_tokens``: positions, all sequences together.

    ``kernels`` names what multiplies there, for people: with the dtype, and whether a sequence's bits depend on nothing
    but itself ("exact") or on others in the batch too ("inexact"). ``bits``: stages with equal ones compute the same
    bits, so layers can move between them without a trace.
    """

    kv_tokens: int
    max_sequences: int
    load_s: float
    warm_up_s: float
    resident_bytes: int
    kernels: str = ""
    bits: str = ""


Progress = Callable[[int, int], None]  # (bytes loaded, bytes to load)


class Stopped(Protocol):
    """Asked before each layer is loaded: whether loading is to end here. ``warm``: the layers loaded so far."""

    def __call__(self, warm: tuple[LayerRange, ...], /) -> bool: ...


class Executor(Protocol):
    """One device's share of the model."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def measure(self) -> tuple[LayerCost, ...]:
        """Time one layer at a few sizes, before anything is loaded."""

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        """Load and warm what is not loaded yet of ``layers``, and leave room for those on ``standby``. Raises
        ModelError; then nothing has changed."""

    def keep(self, ranges: tuple[LayerRange, ...], progress: Progress, stopped: Stopped) -> tuple[LayerRange, ...]:
        """Load and warm these layers beside those in use, without KV; forget others that were kept. Returns what is
        kept, which is less if ``stopped`` says so. Raises ModelError. A loader's call, too."""

    def activate(self, layers: LayerRange, kept: tuple[LayerRange, ...] = ()) -> None:
        """Compute with these (prepared) layers from now on, keep ``kept``, which are loaded, without KV; drop all
        others."""

    def open(self, sequence: int, limit: int) -> None:
        """Reserve room for up to ``limit`` positions of a sequence. Opening it again drops what it held."""

    def fork(self, sequence: int, source: int, position: int, limit: int) -> None:
        """Open a sequence that begins with a copy of the first ``position`` positions of another one."""

    def shrink(self, sequence: int, limit: int) -> None:
        """Cut a sequence to ``limit`` positions and give back the room reserved beyond them."""

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> Forwarded:
        """Run the rows through the layers. Asks ``fenced`` and calls ``progressed`` between layers; where layers take
        milliseconds, between some of them: ``progressed`` for each."""

    def recheck(
        self, batch: Batch, limit: int, fenced: Callable[[], bool], progressed: Callable[[], None]
    ) -> Forwarded:
        """Run one row through ``batch.through``, layers that are loaded here for whatever reason, and touch nothing
        that is held: keys and values are in a place of their own, made when the row begins at 0 and dropped when it
        ends at ``limit``. Raises IllegalMove if the layers are not loaded."""

    def drop_spare(self) -> None:
        """Drop layers kept for others and what a recheck holds, and give free memory back to the device."""

    def test(self, progressed: Callable[[], None]) -> None:
        """Compute a few positions through the layers in use, at once and in pieces, in a place of their own. Raises
        DeviceError if the results differ or are not finite; whatever the device raises passes through. Calls
        ``progressed`` after each layer. Without layers in use there is nothing to test."""

    def truncate(self, sequence: int, position: int) -> None:
        """Forget positions from ``position`` on, in every layer."""

    def release(self, sequence: int) -> None:
        """Forget the sequence; its memory goes back. Unknown sequences are no error."""

    def reset(self) -> None:
        """Release every sequence."""

    def kv_capacity(self) -> int:
        """Positions that fit, all sequences together."""

    def kv_used(self) -> int:
        """Positions reserved or used now, counted in whole blocks."""

    def warm_up(self) -> float:
        """Run the kernels once at the sizes that will come; seconds it took."""

    def stats(self) -> dict[str, float]:
        """Counters and gauges by name, for ``swarmctl stats``."""
