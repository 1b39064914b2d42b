"""Measurement of this device's speed before anything is loaded: the broker plans with these numbers.

A few layers are built with constant weights and timed: prompts of several lengths, and decodes of several sequences,
after few and after many positions. Stages of one layer and of several separate the time of a layer from the fixed time
of a step. The head and the embedding are timed on a part of the vocabulary. Each figure is the best of a few runs,
because other work on the machine only ever makes a run slower.

Workers that start together on one machine would disturb each other, so they take turns by a lock on a file of the host.
A worker that has waited too long for the lock measures without it. Workers that were forked from the same process share
one result (``shared_cache``).

- If a model is larger than the processor's cache, its weights come from memory in every step. The cache is therefore
  emptied before each run; otherwise the one layer here might stay in it and be faster than among others.
- If only one step is in flight, each stage has been idle before the step arrives. Its code and the cores are then cold,
  which costs a millisecond or two. This is measured after such pauses.
- A GPU is timed by events in its own queue: the host's clock would count how long it takes to notice the end.
- If a container limits the processor's time (``cpu_quota``), a run at full speed is followed by a stop that may or may
  not fall into the timed part. There the processor's time is measured and scaled to the average.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from msgspec import structs

from swarm.params import SamplingParams
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import GRID
from swarm.stage.engine import cpu_quota, device_sampling
from swarm.stage.engine.constant_weights import VALUE, ConstantSource, WeightSizes, constant_weight
from swarm.stage.engine.device import CudaClock, synchronize
from swarm.stage.engine.forward import run_batch
from swarm.stage.executor import Batch, SampleJob
from swarm.stage.model.build import ModelSkeleton, Stage, WeightLoader
from swarm.stage.model.weight_formats import WeightFormats
from swarm.stage.native import shared_cache
from swarm.stage.native.cores import computing
from swarm.wire.messages import LayerCost, LayerRange, Row

try:
    import fcntl
except ImportError:  # a system without file locks: workers do not take turns
    fcntl = None  # type: ignore[assignment]

_PROMPT_CHUNK = 256  # positions of a long prompt's chunk
_PROMPTS = (16, 64)  # and _CHUNK, which also fills the long sequence
_DECODES = (1, 4, 16, 64)  # sequences, each after few positions
_LONG_DECODES = (1, 16)  # sequences, each after many positions
_HEADS = (1, 16)  # rows of the head
_NUM_RUNS = 4
_IDLE_S = 0.003  # pause before a timed run: about the time of the other stages and the broker
_NUM_IDLE_RUNS = 9
_BUDGET_S = 0.1  # for one figure; the first run of a kernel is slow and does not count
_PATIENCE_S = 1.0  # for all figures: after it, larger sizes are skipped
_LOCK_TIMEOUT_S = 15.0  # longest wait for the other workers of this host
_LOCK_POLL_S = 0.01  # between two attempts to take the lock
# upper bound of ``_slowness``: a process with an even smaller share of its cores skips the largest sizes
_MAX_SLOWNESS = 4.0
_VOCABULARY = 4096
_NUM_SEVERAL = 3  # layers of the larger of the two stages
_DEFAULT_CACHE_BYTES = 32 << 20  # bytes; assumed where the cache's size can't be read
_MAX_SCRATCH_BYTES = 128 << 20  # bytes; largest scratch buffer
_SHORT_CONTEXT = GRID  # positions before a short decode


def measure_layer_costs(
    skeleton: ModelSkeleton, formats: WeightFormats, threads: int, threads_alone: int
) -> tuple[LayerCost, ...]:
    """Measure this device with the number of threads that a step uses among other steps. If a lone step uses another
    number, measure with that as well."""

    def measure() -> tuple[LayerCost, ...]:
        with _host_lock(), torch.inference_mode():
            costs = _measure_costs(skeleton, formats, threads, threads_alone)
        gc.collect()  # the measured layers refer to each other
        return costs

    key = _cache_key(skeleton, formats, threads, threads_alone)
    return shared_cache.get_or_compute(key, tuple[LayerCost, ...], measure)


def _cache_key(skeleton: ModelSkeleton, formats: WeightFormats, threads: int, threads_alone: int) -> str:
    """Return the key of a measurement: two workers with the same key are equally fast."""
    kernel = skeleton.kernel.__name__
    where = f"{skeleton.rows} {skeleton.device} {kernel} {threads} {threads_alone}"
    return f"costs {skeleton.config.to_json_string()} {where} {formats}"


def _measure_costs(
    skeleton: ModelSkeleton, formats: WeightFormats, threads: int, threads_alone: int
) -> tuple[LayerCost, ...]:
    bench = _LayerBench(skeleton, formats)
    among = bench.measure(threads)
    alone = among if threads_alone == threads else bench.measure(threads_alone)
    rested_s = bench.measure_idle_penalty(threads_alone)
    return (*among, *(_lone_cost(cost, rested_s) for cost in alone))


def _lone_cost(cost: LayerCost, rested_s: float) -> LayerCost:
    """Return the cost as it is for a step that is alone in flight: its stages were idle before it."""
    seconds = cost.seconds + (rested_s if cost.kind == "stage" else 0.0)
    return structs.replace(cost, alone=True, seconds=seconds)


class _LayerBench:
    """One layer, a part of the head and of the embedding, and sequences to run through them."""

    def __init__(self, skeleton: ModelSkeleton, formats: WeightFormats) -> None:
        self._skeleton = skeleton
        self._text = skeleton.config.get_text_config()
        sizes = WeightSizes(skeleton, formats)
        self._one_layer, self._several_layers = _stages(skeleton, formats, sizes)
        self._arena = KvArena(skeleton.device)
        self._arena.states.is_measuring = True
        self._rows = min(_VOCABULARY, self._text.vocab_size)
        part = torch.full((self._rows, self._text.hidden_size), VALUE, dtype=skeleton.dtype, device=skeleton.device)
        self._table = part
        self._head = self._make_head(formats)
        self._scratch = _scratch(skeleton, sizes.total)
        # cores that a container allows; None: no limit
        self._cpu_limit = cpu_quota.read_cpu_limit() if skeleton.device.type == "cpu" else None
        self._device_clock = CudaClock() if skeleton.device.type == "cuda" else None
        self._now = time.perf_counter
        self._slowness = 1.0  # factor by which a limited processor is slower: the same sizes are measured, in more time

    def _make_head(self, formats: WeightFormats) -> torch.nn.Module:
        skeleton, others = self._skeleton, dict(formats.others)
        parts = skeleton.parts
        form = others.get(f"{parts.output_embedding}.weight")
        if form is None and self._text.tie_word_embeddings:
            form = others.get(f"{parts.input_embedding}.weight")
        if form is None:
            return skeleton.kernel(self._table.clone(), None)
        return skeleton.build_quantized(constant_weight(form, *self._table.shape), None)

    def measure(self, threads: int) -> list[LayerCost]:
        """Measure a prompt, a decode, head and embedding; more sizes while time is left."""
        self._now = make_clock(self._cpu_limit, threads)
        self._slowness = min(_MAX_SLOWNESS, max(1.0, threads / self._cpu_limit)) if self._cpu_limit else 1.0
        longest = min(2 * _PROMPT_CHUNK, getattr(self._text, "max_position_embeddings", 2 * _PROMPT_CHUNK) - GRID)
        chunk = max(1, longest // 2 // GRID * GRID)
        if self._device_clock is not None:
            self._prepare_kernels(chunk, threads)
        ends = time.perf_counter() + _PATIENCE_S * self._slowness
        costs: list[LayerCost] = []

        def is_wanted(kind: str) -> bool:
            return time.perf_counter() < ends or not any(cost.kind == kind for cost in costs)

        def add(kind: str, rows: int, context: int, seconds: float) -> None:
            costs.append(LayerCost(kind, rows, context, max(1e-9, seconds), alone=False))  # type: ignore[arg-type]

        def add_layers(kind: str, rows: tuple[Row, ...]) -> None:
            if is_wanted(kind):
                thin, thick = self._best_times(
                    *(self._pass(stage, rows, threads) for stage in (self._one_layer, self._several_layers))
                )
                several = len(self._several_layers.layers) - 1
                layer = (thick - thin) / several if several and thick > thin else thin
                num, context = sum(row.count for row in rows), rows[0].start
                add(kind, num, context, layer)
                add("stage", num, context, thin - layer)

        self._arena.open(0, 2 * chunk + GRID)
        for count in _PROMPTS:
            add_layers("prefill", _prompt(count, 0))
        add_layers("decode", self._decode(1, _SHORT_CONTEXT))
        for count in _HEADS:
            if is_wanted("head"):
                add(
                    "head",
                    count,
                    0,
                    self._best_times(self._logits(count, threads))[0] * self._text.vocab_size / self._rows,
                )
        add("embed", 64, 0, self._best_times(self._lookup(64))[0])
        for count in _DECODES[1:]:
            add_layers("decode", self._decode(count, _SHORT_CONTEXT))
        add_layers("prefill", _prompt(chunk, 0))
        if time.perf_counter() < ends:
            add_layers("prefill", _prompt(chunk, chunk))
            for count in _LONG_DECODES:
                add_layers("decode", self._decode(count, 2 * chunk))
        self._arena.reset()
        return costs

    def _prepare_kernels(self, chunk: int, threads: int) -> None:
        """Compute each size once. A device compiles a kernel, and probes a product, when it first uses it: that takes
        seconds, which would leave no time for the larger sizes."""
        self._arena.open(0, 2 * chunk + GRID)
        prompts = (*((count, 0) for count in _PROMPTS), (chunk, 0), (chunk, chunk))
        decodes = [(count, _SHORT_CONTEXT) for count in _DECODES] + [(count, 2 * chunk) for count in _LONG_DECODES]
        for stage in (self._one_layer, self._several_layers):
            for count, start in prompts:
                self._pass(stage, _prompt(count, start), threads)()
            for count, context in decodes:
                self._pass(stage, self._decode(count, context), threads)()
        for count in _HEADS:
            self._logits(count, threads)()
        synchronize(self._skeleton.device)
        self._arena.reset()

    def measure_idle_penalty(self, threads: int) -> float:
        """Return how much longer a stage's step takes after the stage was idle while others computed."""
        if self._skeleton.device.type != "cpu":
            return 0.0
        self._now = make_clock(self._cpu_limit, threads)
        self._arena.open(0, 2 * GRID)
        thin, thick = (
            self._pass(stage, self._decode(1, _SHORT_CONTEXT), threads)
            for stage in (self._one_layer, self._several_layers)
        )
        at_once, rested = self._best_times(thin, thick)[0], []
        for _ in range(_NUM_IDLE_RUNS):
            self._empty_cache()
            thick()
            time.sleep(_IDLE_S)
            began = self._now()
            thin()
            rested.append(self._now() - began)
        self._arena.reset()
        return max(0.0, median(rested) - at_once)

    def _best_times(self, *runs: Callable[[], object]) -> list[float]:
        """Return the smallest duration of each callable; they are run in turns."""
        for run_once in runs:
            run_once()
        synchronize(self._skeleton.device)
        best, ends = [float("inf")] * len(runs), time.perf_counter() + _BUDGET_S * self._slowness * len(runs)
        for _ in range(_NUM_RUNS):
            for index, run_once in enumerate(runs):
                self._empty_cache()
                best[index] = min(best[index], self._time(run_once))
            if time.perf_counter() > ends:
                break
        return best

    def _empty_cache(self) -> None:
        if self._scratch is not None:
            self._scratch.add_(1)

    def _time(self, run_once: Callable[[], object]) -> float:
        if self._device_clock is not None:
            first = self._device_clock.mark()
            run_once()
            return self._device_clock.elapsed_s(first, self._device_clock.mark())
        began = self._now()
        run_once()
        synchronize(self._skeleton.device)
        return self._now() - began

    def _decode(self, sequences: int, context: int) -> tuple[Row, ...]:
        """Return rows for one more position of each sequence. The first sequence exists; the others begin with a copy
        of it, in memory of its own: caches serve shared memory better."""
        for sequence in range(1, sequences):
            self._arena.fork(sequence, 0, context, context + 1, may_share=False)
        return tuple(Row(sequence, context, 1, False) for sequence in range(sequences))

    def _pass(self, stage: Stage, rows: tuple[Row, ...], threads: int) -> Callable[[], object]:
        num = sum(row.count for row in rows)
        for row in rows:
            self._arena.mark_used(row)
        hidden = np.full((num, self._skeleton.row_width), VALUE, np.float32)
        batch = Batch(rows, np.zeros(num, np.int64), hidden, ())
        return lambda: run_batch(stage, self._arena, batch, threads=threads)

    def _logits(self, count: int, threads: int) -> Callable[[], object]:
        """Return the work of a step's last stage: multiply, check that all logits are finite, find the largest."""
        jobs = [SampleJob(0, SamplingParams(), 0, (0,), 1)] * count
        shape, skeleton = (count, self._text.hidden_size), self._skeleton
        rows = torch.full(shape, VALUE, dtype=skeleton.dtype, device=skeleton.device)

        def once() -> object:
            with computing(threads, count):
                scores = self._head(rows)
            if device_sampling.supports(scores):
                return device_sampling.sample_rows_on_device(scores, jobs, ())
            scores = scores.float().cpu()
            return torch.isfinite(scores).all(dim=-1), torch.argmax(scores, dim=-1)

        return once

    def _lookup(self, count: int) -> Callable[[], object]:
        ids = torch.arange(count, device=self._skeleton.device) * 61 % self._rows
        return lambda: self._table[ids]


def make_clock(limit: float | None, threads: int) -> Callable[[], float]:
    """Return the clock to read before and after a run.

    That is the wall clock, unless a container allows fewer cores than ``threads``. Then it is the processor time that
    the threads used, divided by the allowed cores.
    """
    if limit is None or threads <= limit:
        return time.perf_counter
    return lambda: time.process_time() / limit


def _prompt(count: int, start: int) -> tuple[Row, ...]:
    return (Row(0, start, count, False),)


def _stages(skeleton: ModelSkeleton, formats: WeightFormats, sizes: WeightSizes) -> tuple[Stage, Stage]:
    """Return a stage of one layer and one of several: real layers if they are small, else one layer repeated.

    Small layers must not be repeated, because one layer would stay in the cache, as a model's layers do not.
    """
    first = _typical_layer(sizes.layers)
    weights = WeightLoader(skeleton, ConstantSource(skeleton, formats), lambda _: None)
    thin = Stage(skeleton, LayerRange(first, first + 1), {}, weights, bare=True)
    name = f"{skeleton.parts.layers}.{first}"
    held = {name: thin.modules[name]}
    layers = LayerRange(first, min(skeleton.num_layers, first + _NUM_SEVERAL))
    if sizes.layers[first] > _cache_bytes():
        held = {f"{skeleton.parts.layers}.{index}": thin.modules[name] for index in range(first, layers.stop)}
    return thin, Stage(skeleton, layers, held, weights, bare=True)


def _typical_layer(layer_bytes: Sequence[int]) -> int:
    """Return a layer that takes about as much memory as the mean, with others after it.

    A model's first layer sometimes differs from the others.
    """
    num = len(layer_bytes)
    if num <= _NUM_SEVERAL:
        return 0
    mean = sum(layer_bytes) / num
    return min(range(1, num - _NUM_SEVERAL + 1), key=lambda index: abs(layer_bytes[index] - mean))


def _scratch(skeleton: ModelSkeleton, model_bytes: int) -> torch.Tensor | None:
    """Return a buffer that fills the processor's cache, if the model is larger than the cache."""
    if skeleton.device.type != "cpu":
        return None
    cache = _cache_bytes()
    return torch.zeros(min(cache, _MAX_SCRATCH_BYTES), dtype=torch.uint8) if model_bytes > 2 * cache else None


def _cache_bytes() -> int:
    """Return the size of the last-level cache, as Linux reports it."""
    with suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text("ascii").strip()
        return int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return _DEFAULT_CACHE_BYTES


@contextmanager
def _host_lock() -> Iterator[None]:
    """Let only one worker of this user measure on this host at a time, if a lock is available."""
    file = None if fcntl is None else _open_lock()
    if file is None:
        yield
        return
    try:
        _lock_file(file)
        yield
    finally:
        os.close(file)  # releases the lock


def _open_lock() -> int | None:
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"swarm-measures-{user}.lock"
    with suppress(OSError):  # the file belongs to another user, or the disk is full: go on without a lock
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return None


def _lock_file(file: int) -> None:
    ends = time.monotonic() + _LOCK_TIMEOUT_S
    while time.monotonic() < ends:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOCK_POLL_S)
