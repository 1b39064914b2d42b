"""How fast this device is, measured before anything is loaded: a plan is made of such numbers.

A few layers are built, of constant weights, and timed: prompts of several lengths, decodes of several sequences, with
few and with many positions before. A stage of one layer and one of several tell what a layer takes, and what a step
takes beside its layers. The head and the embedding are timed on a part of the vocabulary. Each figure is the best of a
few runs, for whatever else a machine does makes it slower, never quicker.

Workers that are started together on one machine would disturb each other, so they take turns: a lock on a file of the
host. Who has waited for it long enough measures all the same; who was forked from the same process as another one takes
what that one found (``siblings``). And where a model is larger than the processor's cache,
its weights come from memory in every step: then the cache is emptied before each run, so that the one layer here,
which might stay in it, is not quicker than it will be among others. Where a step goes through all stages before the
next one begins, each stage has rested when it comes: its code and the cores have gone cold, which costs a millisecond
or two, and is measured after such rests. Where a container limits the processor's time (see ``quota``), a run at full
speed is followed by a stop, which may or may not fall into what is timed. There the processor's time is measured, and
stretched as it will be on average.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from statistics import median

import numpy as np
import torch
from msgspec import structs

from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.grid import GRID
from swarm.stage.engine import quota
from swarm.stage.engine.forward import run
from swarm.stage.executor import Batch
from swarm.stage.model.build import Skeleton, Stage, Weights
from swarm.stage.native import siblings
from swarm.stage.native.cores import computing
from swarm.wire.messages import LayerCost, LayerRange, Row

try:
    import fcntl
except ImportError:  # a system without it has no turns
    fcntl = None  # type: ignore[assignment]

_CHUNK = 256
_PROMPTS = (16, 64)  # and _CHUNK, which fills the long sequence too
_DECODES = (1, 4, 16, 64)
_LONG_DECODES = (1, 16)
_NUM_RUNS = 4
_REST_S = 0.003  # as long as other stages take, and the broker
_NUM_RESTS = 9
_BUDGET_S = 0.1  # for one figure; the first run of a kernel is slow and doesn't count
_PATIENCE_S = 1.0  # in all: past it, larger sizes are left out
_TURN_S = 15.0  # how long to wait for the others of this host
_LOOK_AGAIN_S = 0.01
_MOST_SLOWNESS = 4.0  # who may use so small a part of its cores leaves the largest sizes out
_VOCABULARY = 4096
_THICK = 3  # layers of the larger of the two stages
_USUAL_CACHE = 32 << 20
_MOST_EMPTIED = 128 << 20
_SHORT = GRID


class ConstantSource:
    """Every tensor there is, of one small value: speed doesn't depend on it."""

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, 0.01)


def layer_costs(skeleton: Skeleton, threads: int, threads_alone: int) -> tuple[LayerCost, ...]:
    """Measure this device with the threads of a step among others and, if they differ, with those of one alone."""

    def found() -> tuple[LayerCost, ...]:
        with _in_turn(), torch.inference_mode():
            return _measured(skeleton, threads, threads_alone)

    return siblings.once(_what(skeleton, threads, threads_alone), tuple[LayerCost, ...], found)


def _what(skeleton: Skeleton, threads: int, threads_alone: int) -> str:
    """Tell what is measured: two of the same are as fast as each other."""
    kernel = skeleton.kernel.__name__
    where = f"{skeleton.dtype} {skeleton.device} {kernel} {threads} {threads_alone}"
    return f"costs {skeleton.config.to_json_string()} {where}"


def _measured(skeleton: Skeleton, threads: int, threads_alone: int) -> tuple[LayerCost, ...]:
    bench = _Bench(skeleton)
    among = bench.measure(threads)
    alone = among if threads_alone == threads else bench.measure(threads_alone)
    rested_s = bench.after_rests(threads_alone)
    return (*among, *(_alone(cost, rested_s) for cost in alone))


def _alone(cost: LayerCost, rested_s: float) -> LayerCost:
    """The figure of a step that is alone: its stages have rested."""
    seconds = cost.seconds + (rested_s if cost.kind == "stage" else 0.0)
    return structs.replace(cost, alone=True, seconds=seconds)


class _Bench:
    """One layer, a part of the head and of the embedding, and sequences to run through them."""

    def __init__(self, skeleton: Skeleton) -> None:
        self._skeleton = skeleton
        self._text = skeleton.config.get_text_config()
        self._thin, self._thick = _stages(skeleton)
        self._arena = KvArena(skeleton.device)
        self._rows = min(_VOCABULARY, self._text.vocab_size)
        part = torch.full((self._rows, self._text.hidden_size), 0.01, dtype=skeleton.dtype, device=skeleton.device)
        self._table = part
        self._head = skeleton.kernel(part.clone(), None)
        self._scratch = _scratch(skeleton)
        self._limit = quota.cores() if skeleton.device.type == "cpu" else None
        self._now = time.perf_counter
        self._slowness = 1.0  # times as long as with whole cores: who is limited measures the same sizes, in more time

    def measure(self, threads: int) -> list[LayerCost]:
        """Measure a prompt, a decode, head and embedding; more sizes while that doesn't take too long."""
        self._now = clock(self._limit, threads)
        self._slowness = min(_MOST_SLOWNESS, max(1.0, threads / self._limit)) if self._limit else 1.0
        ends = time.perf_counter() + _PATIENCE_S * self._slowness
        longest = min(2 * _CHUNK, getattr(self._text, "max_position_embeddings", 2 * _CHUNK) - GRID)
        chunk = max(1, longest // 2 // GRID * GRID)
        found: list[LayerCost] = []

        def is_wanted(kind: str) -> bool:
            return time.perf_counter() < ends or not any(cost.kind == kind for cost in found)

        def add(kind: str, rows: int, context: int, seconds: float) -> None:
            found.append(LayerCost(kind, rows, context, max(1e-9, seconds), alone=False))  # type: ignore[arg-type]

        def add_layers(kind: str, rows: tuple[Row, ...]) -> None:
            if is_wanted(kind):
                thin, thick = self._best(*(self._pass(stage, rows, threads) for stage in (self._thin, self._thick)))
                several = len(self._thick.layers) - 1
                layer = (thick - thin) / several if several and thick > thin else thin
                num, context = sum(row.count for row in rows), rows[0].start
                add(kind, num, context, layer)
                add("stage", num, context, thin - layer)

        self._arena.open(0, 2 * chunk + GRID)
        for count in _PROMPTS:
            add_layers("prefill", _prompt(count, 0))
        add_layers("decode", self._decode(1, _SHORT))
        for count in (1, 16):
            if is_wanted("head"):
                add("head", count, 0, self._best(self._logits(count, threads))[0] * self._text.vocab_size / self._rows)
        add("embed", 64, 0, self._best(self._lookup(64))[0])
        for count in _DECODES[1:]:
            add_layers("decode", self._decode(count, _SHORT))
        add_layers("prefill", _prompt(chunk, 0))
        if time.perf_counter() < ends:
            add_layers("prefill", _prompt(chunk, chunk))
            for count in _LONG_DECODES:
                add_layers("decode", self._decode(count, 2 * chunk))
        self._arena.reset()
        return found

    def after_rests(self, threads: int) -> float:
        """Reckon what a stage's step takes longer when the stage has rested, and others have computed meanwhile."""
        if self._skeleton.device.type != "cpu":
            return 0.0
        self._now = clock(self._limit, threads)
        self._arena.open(0, 2 * GRID)
        thin, thick = (self._pass(stage, self._decode(1, _SHORT), threads) for stage in (self._thin, self._thick))
        at_once, rested = self._best(thin, thick)[0], []
        for _ in range(_NUM_RESTS):
            self._empty_cache()
            thick()
            time.sleep(_REST_S)
            began = self._now()
            thin()
            rested.append(self._now() - began)
        self._arena.reset()
        return max(0.0, median(rested) - at_once)

    def _best(self, *ways: Callable[[], object]) -> list[float]:
        """The least seconds of each, run in turns."""
        for once in ways:
            once()
        best, ends = [float("inf")] * len(ways), time.perf_counter() + _BUDGET_S * self._slowness * len(ways)
        for _ in range(_NUM_RUNS):
            for index, once in enumerate(ways):
                self._empty_cache()
                began = self._now()
                once()
                self._wait()
                best[index] = min(best[index], self._now() - began)
            if time.perf_counter() > ends:
                break
        return best

    def _empty_cache(self) -> None:
        if self._scratch is not None:
            self._scratch.add_(1)

    def _wait(self) -> None:
        if self._skeleton.device.type == "cuda":
            torch.cuda.synchronize(self._skeleton.device)
        elif self._skeleton.device.type == "mps":
            torch.mps.synchronize()

    def _decode(self, sequences: int, context: int) -> tuple[Row, ...]:
        """Make rows for one more position of each; the first is held already, the others begin with a copy of it."""
        for sequence in range(1, sequences):
            self._arena.fork(sequence, 0, context, context + 1)
        return tuple(Row(sequence, context, 1, False) for sequence in range(sequences))

    def _pass(self, stage: Stage, rows: tuple[Row, ...], threads: int) -> Callable[[], object]:
        num = sum(row.count for row in rows)
        hidden = np.full((num, self._text.hidden_size), 0.01, np.float32)
        batch = Batch(rows, np.zeros(num, np.int64), hidden, ())
        return lambda: run(stage, self._arena, batch, threads=threads)

    def _logits(self, count: int, threads: int) -> Callable[[], object]:
        """Do what a step's last stage does: multiply, look whether all are numbers, find the largest."""
        shape, skeleton = (count, self._text.hidden_size), self._skeleton
        rows = torch.full(shape, 0.01, dtype=skeleton.dtype, device=skeleton.device)

        def once() -> object:
            with computing(threads, count):
                scores = self._head(rows).float().cpu()
            return torch.isfinite(scores).all(dim=-1), torch.argmax(scores, dim=-1)

        return once

    def _lookup(self, count: int) -> Callable[[], object]:
        ids = torch.arange(count, device=self._skeleton.device) * 61 % self._rows
        return lambda: self._table[ids]


def clock(limit: float | None, threads: int) -> Callable[[], float]:
    """Choose what is read before and after a run: the time; or, where so many threads may not use as many cores all
    the time, how long the processor's time that they took lasts with those that they may use."""
    if limit is None or threads <= limit:
        return time.perf_counter
    return lambda: time.process_time() / limit


def _prompt(count: int, start: int) -> tuple[Row, ...]:
    return (Row(0, start, count, False),)


def _stages(skeleton: Skeleton) -> tuple[Stage, Stage]:
    """One layer, and several: real ones as long as they are small, else the same one several times. Small ones must
    not be: they would stay in the cache as no model's layers do."""
    num = skeleton.num_layers
    first = 1 if num > _THICK else 0  # a first layer is now and then unlike the others
    weights = Weights(skeleton, ConstantSource(), lambda _: None)
    thin = Stage(skeleton, LayerRange(first, first + 1), {}, weights, bare=True)
    name = f"{skeleton.parts.layers}.{first}"
    held = {name: thin.modules[name]}
    size = sum(part.numel() for part in skeleton.model.get_submodule(name).parameters()) * skeleton.dtype.itemsize
    layers = LayerRange(first, min(num, first + _THICK))
    if size > _cache_bytes():
        held = {f"{skeleton.parts.layers}.{index}": thin.modules[name] for index in range(first, layers.stop)}
    return thin, Stage(skeleton, layers, held, weights, bare=True)


def _scratch(skeleton: Skeleton) -> torch.Tensor | None:
    """Memory that fills the processor's cache, if the model is larger than that."""
    if skeleton.device.type != "cpu":
        return None
    size = sum(part.numel() for part in skeleton.model.parameters()) * skeleton.dtype.itemsize
    cache = _cache_bytes()
    return torch.zeros(min(cache, _MOST_EMPTIED), dtype=torch.uint8) if size > 2 * cache else None


def _cache_bytes() -> int:
    """Size of the last level's cache, as Linux tells it."""
    with suppress(OSError, ValueError):
        text = Path("/sys/devices/system/cpu/cpu0/cache/index3/size").read_text("ascii").strip()
        return int(text.rstrip("KM")) * {"K": 1 << 10, "M": 1 << 20}.get(text[-1], 1)
    return _USUAL_CACHE


@contextmanager
def _in_turn() -> Iterator[None]:
    """Let one worker of this user at a time measure on this host, if that can be had."""
    file = None if fcntl is None else _open_lock()
    if file is None:
        yield
        return
    try:
        _take(file)
        yield
    finally:
        os.close(file)  # which gives the lock back


def _open_lock() -> int | None:
    user = os.getuid() if hasattr(os, "getuid") else 0
    path = Path(tempfile.gettempdir()) / f"swarm-measures-{user}.lock"
    with suppress(OSError):  # somebody else's file, or no room: then without
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    return None


def _take(file: int) -> None:
    ends = time.monotonic() + _TURN_S
    while time.monotonic() < ends:
        with suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        time.sleep(_LOOK_AGAIN_S)
