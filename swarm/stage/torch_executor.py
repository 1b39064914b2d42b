"""The executor that computes with torch: one worker's share of a model, its keys and values, and the sampling.

Threads as the interface says: ``prepare`` builds a new stage beside the one that computes and touches nothing of it;
layers that both contain are shared, not loaded twice. ``activate`` swaps them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch

from swarm.errors import IllegalMove, ModelError
from swarm.log import get_logger
from swarm.stage import cores, linears, native
from swarm.stage.arena import KvArena
from swarm.stage.checkpoint import Checkpoint, resolve
from swarm.stage.device import clock_of, memory_of
from swarm.stage.executor import Batch, Capacity, Fenced, Forwarded, Progress, SampleJob
from swarm.stage.forward import run, to_wire
from swarm.stage.kernels import describe
from swarm.stage.measure import layer_costs
from swarm.stage.memory import give_back
from swarm.stage.model import DTYPES, Skeleton, Stage, Weights
from swarm.stage.needs import needed_tensors
from swarm.stage.passes import GRID, Tally
from swarm.stage.sampling import draw, is_plain_greedy
from swarm.stage.selfcheck import check_cut, check_kernels
from swarm.wire.messages import Failure, LayerCost, LayerRange, Manifest, Row, Sampled

if TYPE_CHECKING:
    from numpy.typing import NDArray

_WARM_UP_ROWS = (1, 32, 128)
_KV_FRACTION = 0.25  # of the memory that the weights leave
_MAX_KV_BYTES = 64 << 30

log = get_logger(__name__)


@dataclass(slots=True)
class _Counters:
    forwards: int = 0
    rows: int = 0
    tokens: int = 0
    samples: int = 0
    fenced: int = 0
    compute_s: float = 0.0
    sample_s: float = 0.0
    loaded_bytes: int = 0
    fetched_bytes: int = 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A stage ready to compute, and stages that only keep their layers loaded."""

    stage: Stage
    standby: tuple[Stage, ...]
    parts: dict[LayerRange, Stage] = field(default_factory=dict)  # of the stage, for replays through some of its layers


class TorchExecutor:
    """See :class:`swarm.stage.executor.Executor`.

    ``dtype`` "auto" is the checkpoint's own where the device is good at it, else float32. ``memory_limit``: bytes that
    this worker may use in all (default: what the machine has free). ``kv_fraction``: the part of what the weights leave
    that keys and values may take. ``threads`` compute while other steps are in flight (default: torch's own choice),
    ``threads_alone`` when there is no other (default: all cores that the process may use).
    """

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        memory_limit: int | None = None,
        threads: int | None = None,
        threads_alone: int | None = None,
        kv_fraction: float = _KV_FRACTION,
    ) -> None:
        place = resolve(path, _say_fetching)
        self._checkpoint = Checkpoint(place.folder, place.remote)
        self._device = _device(device)
        self._dtype_name = _dtype(dtype, self._checkpoint.stored_dtype, self._device)
        self.threads = threads or torch.get_num_threads()
        self.threads_alone = threads_alone or max(self.threads, cores.available())
        torch.set_num_threads(self.threads)
        self._manifest = self._checkpoint.manifest(self._dtype_name)
        self._skeleton = Skeleton.of(self._checkpoint, self._device, DTYPES[self._dtype_name])
        check_cut(self._skeleton.config)
        if self._device.type == "cpu" and self._dtype_name == "bfloat16":
            self._prove_kernels()
        self._source = self._skeleton.source(self._checkpoint)
        self.memory_bytes = memory_limit if memory_limit is not None else psutil.virtual_memory().available
        self._kv_fraction = kv_fraction
        self._arena = KvArena(self._device)
        self._clock = clock_of(self._device)
        self._active: _Prepared | None = None
        self._prepared: _Prepared | None = None
        self._counters = _Counters()
        self._tally = Tally()

    def _prove_kernels(self) -> None:
        """Our own kernels, or torch's if ours don't know this kind of model."""
        check_kernels(self._skeleton.config)
        if native.absence():
            log.warning("own_kernels_unused", why=native.absence())
            self._skeleton = Skeleton.of(self._checkpoint, self._device, DTYPES[self._dtype_name])

    @property
    def manifest(self) -> Manifest:
        return self._manifest

    @property
    def device(self) -> str:
        return str(self._device)

    @property
    def dtype(self) -> str:
        return self._dtype_name

    @property
    def checkpoint(self) -> Checkpoint:
        """The folder, for whoever sends its files on."""
        return self._checkpoint

    @property
    def kv_budget_bytes(self) -> int:
        """Bytes for keys and values: of the active stage, or before there is one, with the whole model as share."""
        layers = LayerRange(0, self._manifest.num_layers) if self._active is None else self._active.stage.layers
        return self._kv_budget(layers)

    def _kv_budget(self, layers: LayerRange) -> int:
        return min(_MAX_KV_BYTES, int(max(0, self.memory_bytes - self._bytes_of(layers)) * self._kv_fraction))

    @property
    def weight_bytes(self) -> int:
        """Bytes of the weights that are loaded for the active plan."""
        if self._active is None:
            return 0
        return sum(self._bytes_of(stage.layers) for stage in (self._active.stage, *self._active.standby))

    def _bytes_of(self, layers: LayerRange) -> int:
        size = sum(self._manifest.layer_bytes[layers.first : layers.stop])
        if layers.first == 0:
            size += self._manifest.embed_bytes
        if layers.stop == self._manifest.num_layers:
            size += self._manifest.head_bytes
        return size

    # --- plans -------------------------------------------------------------------------------------------------------

    def measure(self) -> tuple[LayerCost, ...]:
        costs = layer_costs(self._skeleton, self.threads, self.threads_alone)
        give_back()
        return costs

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        began = time.perf_counter()
        self._check_ranges((layers, *standby))
        prepared = self._load((layers, *standby), progress)
        loaded = time.perf_counter()
        warm_up_s = self._warm(prepared.stage)
        self._prepared = prepared
        return Capacity(
            kv_tokens=self._capacity(layers),
            max_sequences=max_sequences,
            load_s=loaded - began,
            warm_up_s=warm_up_s,
            resident_bytes=psutil.Process().memory_info().rss,
            kernels=describe(self._skeleton),
        )

    def _check_ranges(self, ranges: tuple[LayerRange, ...]) -> None:
        for layers in ranges:
            if not 0 <= layers.first < layers.stop <= self._manifest.num_layers:
                raise ModelError(f"layers {layers} are not a range of the model's {self._manifest.num_layers} layers")
        needed = sum(map(self._bytes_of, ranges))
        if needed > self.memory_bytes:
            raise ModelError(
                f"layers {', '.join(map(str, ranges))} need {needed >> 20} MiB, but this worker may use "
                f"{self.memory_bytes >> 20} MiB; raise its memory limit or add a worker"
            )

    def _load(self, ranges: tuple[LayerRange, ...], progress: Progress) -> _Prepared:
        held: dict[str, torch.nn.Module] = {}
        if self._active is not None:
            for stage in (self._active.stage, *self._active.standby):
                held |= stage.modules
        fetched = self._fetch(ranges, held, progress)
        total, done = fetched + sum(map(self._bytes_of, ranges)), fetched

        def loaded(num_bytes: int) -> None:
            nonlocal done
            done += num_bytes
            self._counters.loaded_bytes += num_bytes
            progress(min(done, total), total)

        weights = Weights(self._skeleton, self._source, loaded)
        stages: list[Stage] = []
        for layers in ranges:
            stages.append(Stage(self._skeleton, layers, held, weights))
            held |= stages[-1].modules
        progress(total, total)
        give_back()
        return _Prepared(stages[0], tuple(stages[1:]))

    def _fetch(self, ranges: tuple[LayerRange, ...], held: Collection[str], progress: Progress) -> int:
        """Bring the files of a model on a hub that these layers are in; returns how many bytes had to come.

        Fetching and reading are one load, of bytes that come and bytes that are read.
        """
        names = needed_tensors(self._skeleton, self._source, ranges, held)
        to_fetch = sum(self._checkpoint.missing(names).values())
        to_read = sum(map(self._bytes_of, ranges))
        self._checkpoint.fetch(
            names,
            lambda num_came, _: progress(num_came, to_fetch + to_read),
            _say_fetching,
        )
        self._counters.fetched_bytes += to_fetch
        return to_fetch

    def activate(self, layers: LayerRange) -> None:
        if self._prepared is not None and self._prepared.stage.layers == layers:
            self._active, self._prepared = self._prepared, None
            give_back()
        elif self._active is None or self._active.stage.layers != layers:
            raise IllegalMove(f"layers {layers} were not prepared")
        self._arena.keep(layers)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, sequence: int, limit: int) -> None:
        self._arena.open(sequence, limit)

    def truncate(self, sequence: int, position: int) -> None:
        self._arena.truncate(sequence, position)

    def fork(self, sequence: int, source: int, position: int, limit: int) -> None:
        self._arena.fork(sequence, source, position, limit)

    def shrink(self, sequence: int, limit: int) -> None:
        self._arena.shrink(sequence, limit)

    def release(self, sequence: int) -> None:
        self._arena.release(sequence)

    def reset(self) -> None:
        self._arena.reset()

    def kv_capacity(self) -> int:
        return 0 if self._active is None else self._capacity(self._active.stage.layers)

    def _capacity(self, layers: LayerRange) -> int:
        per_token = sum(self._manifest.kv_bytes_per_token[layers.first : layers.stop])
        return self._kv_budget(layers) // per_token // GRID * GRID

    def kv_used(self) -> int:
        return self._arena.used

    # --- computing ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> Forwarded:
        stage, clock = self._stage() if batch.through is None else self._part(batch.through), self._clock
        left_layers: list[Any] = []
        began = clock.mark()
        for row in batch.rows:
            self._arena.take(row)
        if self._arena.used > self.kv_capacity():
            raise IllegalMove(f"{self._arena.used} positions are held, there is room for {self.kv_capacity()}")
        try:
            result = run(
                stage,
                self._arena,
                batch,
                fenced=fenced,
                progressed=progressed,
                threads=self.threads_alone if batch.alone else self.threads,
                head_rows=None if batch.through is None else (),
                tally=self._tally,
                left_layers=lambda: left_layers.append(clock.mark()),
            )
        except Fenced:
            self._counters.fenced += 1
            raise
        through = clock.mark()
        hidden = None if stage.heads or result is None else to_wire(result)
        computed = clock.mark()
        sampled, failed = self._sample(batch, result) if stage.heads and result is not None else ((), ())
        done = clock.mark()
        compute_s, sample_s = clock.between(began, computed), clock.between(computed, done)
        head_s = clock.between(left_layers[-1], through) if stage.heads and left_layers else 0.0
        copy_s = 0.0 if hidden is None else clock.between(through, computed)
        self._count(batch, compute_s, sample_s)
        return Forwarded(hidden, sampled, failed, compute_s, sample_s, head_s, copy_s)

    def logits(self, batch: Batch) -> torch.Tensor:
        """The last stage's logits after every token of the batch, ``[tokens, vocabulary]``: for tests and tools."""
        return self._logits(batch, range(len(batch.tokens)))

    def logits_of_last(self, batch: Batch) -> torch.Tensor:
        """The last stage's logits after every row of the batch, ``[rows, vocabulary]``: for tests and tools."""
        return self._logits(batch, [sum(row.count for row in batch.rows[: n + 1]) - 1 for n in range(len(batch.rows))])

    def _logits(self, batch: Batch, head_rows: Sequence[int]) -> torch.Tensor:
        stage = self._stage()
        threads = self.threads_alone if batch.alone else self.threads
        for row in batch.rows:
            self._arena.take(row)
        result = run(stage, self._arena, batch, head_rows=head_rows, threads=threads)
        if result is None or not stage.heads:
            raise IllegalMove(f"the stage of layers {stage.layers} has no head")
        return result

    def _stage(self) -> Stage:
        if self._active is None:
            raise IllegalMove("no layers are active")
        return self._active.stage

    def _part(self, layers: LayerRange) -> Stage:
        """Some of the active stage's layers, with the same modules."""
        whole = self._stage()
        if layers == whole.layers:
            return whole
        assert self._active is not None
        if layers not in self._active.parts:
            weights = Weights(self._skeleton, self._source, lambda _: None)
            self._active.parts[layers] = Stage(self._skeleton, layers, whole.modules, weights)
        return self._active.parts[layers]

    def _sample(self, batch: Batch, logits: torch.Tensor) -> tuple[tuple[Sampled, ...], tuple[Failure, ...]]:
        scores = logits[: len(batch.samples)].float().cpu()
        finite = torch.isfinite(scores).all(dim=-1).tolist()
        largest = torch.argmax(scores, dim=-1).tolist()  # the first of equals
        rows = scores.numpy()
        sampled, failed = [], []
        for index, job in enumerate(batch.samples):
            row = batch.rows[job.row]
            if finite[index]:
                sampled.append(self._one(row, job, rows[index], largest[index]))
            else:
                failed.append(Failure(row.sequence, self._unfit(len(job.history))))
        return tuple(sampled), tuple(failed)

    def _unfit(self, position: int) -> str:
        return (
            f"the model gave logits that are not finite numbers for position {position}; "
            f"its weights, or the dtype {self.dtype} for them, are unfit"
        )

    def _one(self, row: Row, job: SampleJob, scores: NDArray[np.float32], largest: int) -> Sampled:
        position = len(job.history)
        if is_plain_greedy(job.params, position - job.num_prompt):
            return Sampled(row.sequence, position, largest, ())
        drawn = draw(
            scores,
            job.params,
            history=job.history,
            num_prompt=job.num_prompt,
            seed=job.seed,
            eos_token_ids=self._manifest.eos_token_ids,
        )
        return Sampled(row.sequence, position, drawn.token, drawn.logprobs)

    def _count(self, batch: Batch, compute_s: float, sample_s: float) -> None:
        counters = self._counters
        counters.forwards += 1
        counters.rows += len(batch.rows)
        counters.tokens += len(batch.tokens)
        counters.samples += len(batch.samples)
        counters.compute_s += compute_s
        counters.sample_s += sample_s

    def warm_up(self) -> float:
        return self._warm(self._stage())

    def _warm(self, stage: Stage) -> float:
        began = time.perf_counter()
        arena = KvArena(self._device)  # of its own: the compute thread may be at work with the other one
        arena.open(0, max(_WARM_UP_ROWS))
        for count in _WARM_UP_ROWS:
            hidden = None if stage.embeds else np.zeros((count, self._manifest.hidden_size), np.float32)
            batch = Batch((Row(0, 0, count, stage.heads),), np.zeros(count, np.int64), hidden, ())
            run(stage, arena, batch, head_rows=[0])
        return time.perf_counter() - began

    def stats(self) -> dict[str, float]:
        counters = self._counters
        return {
            "forwards": counters.forwards,
            "rows": counters.rows,
            "tokens": counters.tokens,
            "samples": counters.samples,
            "fenced": counters.fenced,
            "compute_s": counters.compute_s,
            "sample_s": counters.sample_s,
            "loaded_bytes": counters.loaded_bytes,
            "fetched_bytes": counters.fetched_bytes,
            "mask_hits": self._tally.mask_hits,
            "mask_misses": self._tally.mask_misses,
            "rope_hits": self._tally.rope_hits,
            "rope_misses": self._tally.rope_misses,
            "sequences": len(self._arena),
            "kv_used": self.kv_used(),
            "kv_capacity": self.kv_capacity(),
            "weight_bytes": self.weight_bytes,
            "resident_bytes": psutil.Process().memory_info().rss,
            **memory_of(self._device),
        }


def _say_fetching(line: str) -> None:
    log.info("fetching_weights", what=line)


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ModelError(f"there is no kind of device {name!r}; use cpu, cuda or mps") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelError("device cuda was asked for, but torch finds none here; use cpu")
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise ModelError("device mps was asked for, but torch finds none here; use cpu")
    if device.type not in ("cpu", "cuda", "mps"):
        raise ModelError(f"device {name!r} is not supported; use cpu, cuda or mps")
    return device


def _dtype(name: str, stored: str, device: torch.device) -> str:
    if name == "auto":
        return stored if linears.good_at(device, DTYPES[stored]) else "float32"
    if name not in DTYPES:
        raise ModelError(f"dtype {name!r} is not supported; use auto, {', '.join(DTYPES)}")
    return name
