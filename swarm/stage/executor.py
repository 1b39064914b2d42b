"""The executor: the interface between a stage and the device that computes its layers.

Threads: ``prepare`` and ``keep`` run in a loader thread while the compute thread continues with the old layers; only
the compute thread calls the other methods. Keys and values belong to a sequence *and* a layer, so a layer that stays in
the range over a change of plan keeps them. The stage's core tracks the position of each range of layers.

``forward`` is prefill, prefill at an offset and decode in one: each row appends its positions from ``start`` on to the
positions already stored. A row's result depends on nothing but its own sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from swarm.params import ImageSpan, SamplingParams, VectorKind
    from swarm.wire.messages import (
        AdapterEntry,
        Failure,
        ForcedTokens,
        ImageParts,
        LayerCost,
        LayerRange,
        Manifest,
        PromptLogprobs,
        Row,
        Sampled,
        SequencePosition,
        SequenceVector,
    )


_MEMORY_ERRORS = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")


def is_out_of_memory(error: Exception) -> bool:
    """Return whether an executor's error means that the device had too little memory. Torch raises it as a
    RuntimeError."""
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in _MEMORY_ERRORS)


# Errors that leave a CUDA context unusable. They are asynchronous: a later call reports them. Triton reports the
# driver's words, without torch's "CUDA error".
_LOST_DEVICE = (
    *("cuda error", "cublas_status_execution_failed", "device-side assert", "cudnn_status_execution_failed"),
    *("illegal memory access", "illegal instruction", "misaligned address", "unspecified launch failure"),
)


def is_device_lost(error: BaseException) -> bool:
    """Return whether an executor's error means that this process can't compute on its device any more, whatever it
    computes. A lack of memory leaves the device as it was."""
    if not isinstance(error, RuntimeError) or is_out_of_memory(error):
        return False
    text = str(error).lower()
    return type(error).__name__ == "AcceleratorError" or any(words in text for words in _LOST_DEVICE)


class FenceRaised(Exception):
    """Raised by ``forward`` when the fence rose between two layers. The whole step is discarded."""


@dataclass(frozen=True, slots=True)
class SampleJob:
    """Request to draw the token that follows a row.

    If the row's last ``num_proposed`` tokens are proposals, a token is drawn after the token before them, and after
    each proposal that equals the token drawn before it, unless that token ends the answer.
    """

    row: int  # index of the row in its batch
    params: SamplingParams
    seed: int
    history: Sequence[int]  # all tokens up to the row's end, the prompt first
    num_prompt: int  # length of the prompt
    num_proposed: int = 0  # tokens at the end of ``history`` that are proposals

    @property
    def num_certain(self) -> int:
        """Number of tokens before the proposals: the position of the first token to be drawn."""
        return len(self.history) - self.num_proposed


@dataclass(frozen=True, slots=True)
class VectorJob:
    """Request to compute a vector from a sequence's positions, of which a row brings some.

    "mean": the executor adds the row's outputs to those of the rows before, position by position, from position 0 on.
    """

    row: int  # index of the row in its batch
    kind: VectorKind
    is_end: bool  # the row ends the prompt: return the vector


@dataclass(frozen=True, slots=True)
class PromptJob:
    """Request for log probabilities of the prompt's tokens that follow a row's positions.

    ``following``: these tokens. The prompt's last position has none, so they may be fewer than the row's positions.
    ``alternatives``: number of the most likely tokens to report besides.
    """

    row: int  # index of the row in its batch
    following: Sequence[int]
    alternatives: int


def is_end_token(token: int, params: SamplingParams, eos_token_ids: Collection[int]) -> bool:
    """Return whether a drawn token ends the answer, so that nothing is drawn after it even if it was proposed."""
    return token in params.stop_token_ids or (token in eos_token_ids and not params.ignore_eos)


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows to compute, one after the other."""

    rows: tuple[Row, ...]
    tokens: NDArray[np.int64]  # of all rows, concatenated
    hidden: NDArray[np.float32] | None  # [tokens, hidden] float32; None on the stage that embeds ``tokens``
    samples: tuple[SampleJob, ...]
    alone: bool = True  # no other stage of this host computes meanwhile (or rarely), so all cores may be used
    through: LayerRange | None = None  # compute only these layers of the stage, with ``hidden`` as their input
    proposed: Mapping[int, int] = field(default_factory=dict)  # rows that end in proposals: index, and their number
    vectors: tuple[VectorJob, ...] = ()  # jobs of the last stage, in the order of their rows
    prompts: tuple[PromptJob, ...] = ()  # likewise
    adapters: tuple[str, ...] = ()  # of each row, "" for none; empty if no row has any
    images: tuple[tuple[ImageSpan, ...], ...] = ()  # of each row's sequence; empty if no sequence has any
    pixels: Mapping[str, bytes] = field(default_factory=dict)  # on the first stage, of the rows' images, by digest
    image_parts: tuple[ImageParts, ...] = ()  # on the first stage, computed before the rows; then there may be no rows
    is_piece: bool = False  # a part of a batch for which the device had too little memory


@dataclass(frozen=True, slots=True)
class ForwardResult:
    """Result of a batch: hidden states or drawn tokens, and the time spent on the device."""

    hidden: NDArray[np.float32] | None  # input of the next stage; None on the last one
    sampled: tuple[Sampled, ...]  # in the order of ``samples``, and within a row by position
    failed: tuple[Failure, ...]  # sequences whose logits can't be sampled (not finite), with the reason
    compute_s: float
    sample_s: float
    head_s: float = 0.0  # part of ``compute_s``: the head and the norm before it
    copy_s: float = 0.0  # part of ``compute_s``: copying ``hidden`` to the host
    late: tuple[int, ...] = ()  # sequences whose token is to be drawn at another time
    # rows with accepted proposals: the position up to which the row's tokens are certain
    certain: tuple[SequencePosition, ...] = ()
    forced: tuple[ForcedTokens, ...] = ()  # tokens that are certain to follow by their sequence's grammar
    vectors: tuple[SequenceVector, ...] = ()  # in the order of the jobs that end a prompt
    prompt_logprobs: tuple[PromptLogprobs, ...] = ()  # in the order of ``prompts``


@dataclass(frozen=True, slots=True)
class Capacity:
    """Capacity of a prepared stage, and the cost of preparing it."""

    kv_tokens: int  # positions, all sequences together
    max_sequences: int
    load_s: float
    warm_up_s: float
    resident_bytes: int
    # for people: kernels and dtype, and whether a sequence's bits depend on itself only ("exact") or on its batch
    # ("inexact")
    kernels: str = ""
    bits: str = ""  # stages with an equal value compute the same bits, so layers can move between them without a trace
    share_unit: int = 0  # positions that sequences are certain to share (``wire.shared_positions``); 0: none
    share_mappings: int = 0  # mappings that sharing sequences may take


KvDtype = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class KvData:
    """Keys and values of some positions: layer after layer, first all keys, then all values, ``[heads, positions,
    size]`` each. ``dtype``: as in ``TensorSpec``; ``numbers`` has its bit patterns (uint16 for bfloat16)."""

    layers: LayerRange
    start: int
    stop: int
    dtype: KvDtype
    numbers: NDArray[np.generic]


Progress = Callable[[int, int], None]  # (bytes loaded, bytes to load)


class StopCheck(Protocol):
    """Callback before each layer is loaded: returns whether loading is to stop here. ``warm``: the layers loaded so
    far."""

    def __call__(self, warm: tuple[LayerRange, ...], /) -> bool: ...


class Executor(Protocol):
    """Interface of a device that computes a range of the model's layers."""

    @property
    def manifest(self) -> Manifest: ...

    @property
    def device(self) -> str: ...

    @property
    def dtype(self) -> str: ...

    def enter_thread(self) -> None:
        """Prepare the calling thread for the device. Called at the start of each thread that uses the executor."""

    def measure(self) -> tuple[LayerCost, ...]:
        """Time one layer at a few sizes, before anything is loaded."""

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        """Load and warm the missing ones of ``layers``, and leave memory for those in ``standby``. Raises ModelError;
        then nothing has changed."""

    def keep(self, ranges: tuple[LayerRange, ...], progress: Progress, stopped: StopCheck) -> tuple[LayerRange, ...]:
        """Load and warm standby layers in addition to those in use, without KV, and drop other standby layers.

        Returns the standby layers, which are fewer if ``stopped`` ended the load. Raises ModelError. Called by a loader
        thread.
        """

    def load_adapters(self, entries: tuple[AdapterEntry, ...]) -> tuple[AdapterEntry, ...]:
        """Load adapters into all loaded layers and those to come; return them with digests and sizes. Raises
        ModelError; then none of them is loaded. Called by a thread of its own."""

    def drop_adapters(self, keys: tuple[str, ...]) -> None:
        """Drop the adapters with these keys. Rows must not have them any more."""

    def loaded_bits(self) -> str:
        """Return ``Capacity.bits`` of everything that is loaded. Called by a loader thread."""

    def activate(self, layers: LayerRange, kept: tuple[LayerRange, ...] = (), share_unit: int = 0) -> None:
        """Compute with these (prepared) layers from now on. Keep ``kept``, which are loaded, as standby, with copies of
        other workers' keys and values but none of its own; drop all others.

        Sequences count in full until they are forked again; forks share by ``share_unit`` (0: as far as possible).
        """

    def open(self, sequence: int, limit: int) -> None:
        """Reserve memory for up to ``limit`` positions of a sequence. Opening it again drops its stored positions."""

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        """Open a sequence with a copy of the first ``position`` positions of another sequence, in the layers in use.

        ``may_share``: both may use the same memory, and the first ones then count once.
        Raises ``KvFull`` if a copy would take memory that the broker does not count; then the sequence is not open.
        """

    def share(self, sequence: int, source: int, position: int, *, is_mapped: bool) -> None:
        """Count the first ``position`` positions of a sequence as shared with another one, once under a plan.

        ``is_mapped``: the source has them in all layers in use; the sequence, which has the same positions or none in
        each layer, has them from now on, in the same memory. Raises ``KvFull`` if they can't be shared.
        """

    def shrink(self, sequence: int, limit: int) -> None:
        """Cut a sequence to ``limit`` positions and free the memory reserved beyond them."""

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> ForwardResult:
        """Run the rows through the layers.

        Calls ``fenced`` and ``progressed`` between layers; where a layer takes only milliseconds, between some of them,
        with ``progressed`` once per layer. Raises ``KvFull``, before any layer, if the positions exceed the capacity.
        """

    def recheck(
        self, batch: Batch, limit: int, fenced: Callable[[], bool], progressed: Callable[[], None]
    ) -> ForwardResult:
        """Run one row through ``batch.through``, which are any layers loaded here, without touching stored sequences.

        Keys and values are in scratch memory, which is made when the row begins at 0 and dropped when it ends at
        ``limit``. Raises IllegalMove if the layers are not loaded.
        """

    def drop_spare(self) -> None:
        """Drop standby layers and the scratch memory of a recheck, and return free memory to the device."""

    def test(self, progressed: Callable[[], None]) -> None:
        """Compute a few positions through the layers in use, once whole and once in pieces, in scratch memory.

        Raises DeviceError if the results differ or are not finite; the device's own errors pass through. Calls
        ``progressed`` after each layer. Without layers in use, does nothing.
        """

    def truncate(self, sequence: int, position: int) -> None:
        """Drop positions from ``position`` on, in every layer."""

    def release(self, sequence: int) -> None:
        """Drop the sequence and free its memory. An unknown sequence is no error."""

    def reset(self) -> None:
        """Release every sequence."""

    def read_kv(self, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        """Return a copy of the keys and values of these positions in these layers, in the form of ``KvPart``."""

    @property
    def kv_identity(self) -> str:
        """What decides the bits of keys and values besides the tokens, the manifest and ``loaded_bits``: versions of
        local model files and of the code that computes."""

    def fits_kv(self, data: KvData) -> bool:
        """Return whether these can be keys and values of this model's layers, by their layers, dtype and size."""

    def write_kv(self, sequence: int, limit: int, data: KvData) -> None:
        """Store keys and values that ``read_kv`` returned, here or on another machine. Opens the sequence with this
        limit if it is not open. They count as a copy (``kv_copy_bytes``) while the layers are not in use.

        Raises IllegalMove unless ``fits_kv``, and for positions beyond the limit.
        """

    def drop_kv(self, sequence: int, layers: LayerRange) -> None:
        """Drop a sequence's copies in these layers, which are not in use."""

    def kv_copy_bytes(self) -> int:
        """Return the memory that copies of other workers' keys and values take."""

    def kv_free_bytes(self) -> int:
        """Return the memory that copies may still take: what positions in use leave. Negative: copies must be
        dropped."""

    def kv_capacity(self) -> int:
        """Return the number of positions that fit, all sequences together."""

    def kv_used(self) -> int:
        """Return the number of positions reserved or used now, counted in whole blocks."""

    def warm_up(self) -> float:
        """Run the kernels once at the sizes to be expected; return the seconds that it took."""

    def stats(self) -> dict[str, float]:
        """Return counters and gauges by name, for ``swarmctl stats``."""
