"""Executor that computes with torch: one worker's part of a model, its keys and values, and the sampling.

``prepare`` builds a new stage while the current one computes, and touches nothing of it; layers that both contain are
shared. ``activate`` swaps the stages.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import msgspec
import psutil
import torch

from swarm.errors import IllegalMove, KvFull, ModelError
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.passes import CacheStats
from swarm.stage.engine import dry_runs
from swarm.stage.engine.batch_sampling import BatchSamples, sample_batch
from swarm.stage.engine.device import (
    enter_device,
    free_memory,
    limit_memory,
    make_clock,
    memory_stats,
    parse_device,
    release_cached,
)
from swarm.stage.engine.forward import copy_to_array, run_batch
from swarm.stage.engine.grammars import GrammarMasks
from swarm.stage.engine.images import MANY_PATCHES, ImageEncoder
from swarm.stage.engine.kernel_report import describe_code, describe_fallback
from swarm.stage.engine.kv_transfers import KvTransfers
from swarm.stage.engine.loaded_layers import LoadedLayers
from swarm.stage.engine.measure import measure_layer_costs
from swarm.stage.engine.memory_plan import MemoryPlan
from swarm.stage.engine.model_kernels import ModelKernels
from swarm.stage.engine.prompt_logprobs import BatchPromptLogprobs, compute_prompt_logprobs
from swarm.stage.engine.rechecks import Rechecker
from swarm.stage.engine.shortages import MemoryShortages
from swarm.stage.engine.vectors import BatchVectors, VectorPool
from swarm.stage.executor import Batch, Capacity, FenceRaised, ForwardResult, KvData, Progress, StopCheck
from swarm.stage.model.adapter_folder import AdapterFolder, open_adapters
from swarm.stage.model.build import Stage, choose_dtype
from swarm.stage.model.checkpoint import Checkpoint
from swarm.stage.model.loading import StageLoader, log_fetching
from swarm.stage.model.location import locate_model
from swarm.stage.model.vision_tower import ImageRows
from swarm.stage.native import cores
from swarm.stage.native.memory import release_free_memory
from swarm.stage.quantization.at_load import AS_STORED, Quantization
from swarm.wire.messages import (
    KV_SHARE,
    STATE_STRIDE,
    AdapterEntry,
    LayerCost,
    LayerRange,
    Manifest,
    add_layer_bytes,
    layers_of,
    to_ranges,
)


@dataclass(slots=True)
class _Counters:
    """Totals of an executor's work since it started.

    The compute thread writes them; a reader on another thread may lag by one step.
    """

    forwards: int = 0  # passes that were completed
    rows: int = 0
    tokens: int = 0
    samples: int = 0  # draws that were requested, one per row
    fenced: int = 0  # passes that a newer epoch stopped
    compute_s: float = 0.0  # including copies to the host
    images_s: float = 0.0  # of parts of images, which ``compute_s`` leaves out
    sample_s: float = 0.0

    def add_pass(self, batch: Batch, compute_s: float, sample_s: float) -> None:
        self.forwards += 1
        self.rows += len(batch.rows)
        self.tokens += len(batch.tokens)
        self.samples += len(batch.samples)
        self.compute_s += compute_s
        self.sample_s += sample_s

    def values(self) -> dict[str, float]:
        return asdict(self)


class TorchExecutor:
    """Implementation of :class:`swarm.stage.executor.Executor` with torch.

    ``dtype`` "auto" is the checkpoint's own dtype where the device computes fast in it, else float32. ``quantization``:
    how weights and activations are quantized. ``memory_limit``:
    bytes that this worker may use in total (default: the device's free memory). ``kv_share``: share of the memory left
    by the weights that keys and values may take. ``threads``: number of threads that compute while other steps are in
    flight (default: torch's choice), ``threads_alone``: when there is no other step (default: all available cores).
    ``adapters``: folders of adapters by name. ``images``: load the vision tower, if there is one.
    """

    def __init__(
        self,
        path: str,
        *,
        device: str = "cpu",
        dtype: str = "auto",
        quantization: Quantization = AS_STORED,
        memory_limit: int | None = None,
        threads: int | None = None,
        threads_alone: int | None = None,
        kv_share: float = KV_SHARE,
        adapters: Mapping[str, str] = MappingProxyType({}),
        images: bool = True,
    ) -> None:
        place = locate_model(path, log_fetching)
        self._checkpoint = Checkpoint.at(place, quantization, images=images)
        self._device = parse_device(device)
        enter_device(self._device)
        if memory_limit is not None:
            limit_memory(self._device, memory_limit)
        self._dtype_name = choose_dtype(dtype, self._checkpoint.stored_dtype, self._device)
        self.threads = threads or torch.get_num_threads()
        self.threads_alone = threads_alone or max(self.threads, cores.num_available())
        torch.set_num_threads(self.threads)
        cores.expect_threads(self.threads, self.threads_alone)
        opened = open_adapters(adapters, self._checkpoint.name)  # before the model's kernels, which take seconds
        self._kernels = ModelKernels(self._checkpoint, self._device, self._dtype_name)
        self._skeleton, self._source = self._kernels.skeleton, self._kernels.source
        manifest = self._kernels.add_states(self._checkpoint.manifest(self._dtype_name))
        self._manifest = self._kernels.add_adapters(manifest, opened)
        self._loader = StageLoader(self._checkpoint, self._manifest, self._skeleton, self._source, opened)
        memory_bytes = self.scale_memory(memory_limit if memory_limit is not None else free_memory(self._device))
        self._memory = MemoryPlan(self._manifest, memory_bytes, kv_share)
        self._shortages = MemoryShortages(self._device, self._memory)
        self._arena = KvArena(self._device, self._manifest.state_stride or STATE_STRIDE)
        self._transfers = KvTransfers(self._arena, self._manifest, self._skeleton)
        self._clock = make_clock(self._device)
        self._layers = LoadedLayers(self._loader, self._memory)
        self._rechecker = Rechecker(
            self._device, lambda layers: self._loader.build_resident(layers, self._layers.modules)
        )
        self._adapters: dict[str, tuple[int, ...]] = {}  # memory by layer of those loaded at run time; by key
        self._counters = _Counters()
        self._cache_stats = CacheStats()
        self._vectors = VectorPool()
        self._images = ImageEncoder()
        self._grammars = GrammarMasks(self._checkpoint.folder, self._manifest.eos_token_ids)

    @property
    def has_own_kernels(self) -> bool:
        """Whether our own kernels multiply, not torch's."""
        return self._kernels.are_own

    def scale_memory(self, num_bytes: int) -> int:
        """Return how much of the manifest's bytes this memory holds."""
        return self._kernels.scale_memory(num_bytes)

    @property
    def kv_share(self) -> float:
        return self._memory.kv_share

    @property
    def memory_bytes(self) -> int:
        """Memory for weights, keys and values, in the manifest's bytes."""
        return self._memory.memory_bytes

    @memory_bytes.setter
    def memory_bytes(self, num_bytes: int) -> None:
        self._memory.memory_bytes = num_bytes

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
        """The model's folder, from which files are sent to other workers."""
        return self._checkpoint

    @property
    def weight_bytes(self) -> int:
        """Bytes of all loaded weights."""
        active = self._layers.active
        return self.standby_bytes + (0 if active is None else self._memory.manifest.weight_bytes(active.stage.layers))

    @property
    def standby_bytes(self) -> int:
        """Bytes of the weights of standby layers."""
        return self._memory.standby_bytes(self._layers.standby)

    # --- plans -------------------------------------------------------------------------------------------------------

    def enter_thread(self) -> None:
        enter_device(self._device)

    def measure(self) -> tuple[LayerCost, ...]:
        costs = measure_layer_costs(self._skeleton, self._kernels.formats, self.threads, self.threads_alone)
        release_free_memory()
        return costs

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        began = time.perf_counter()
        standby_layers = layers_of(standby)
        with self._layers.loading:
            stage, new = self._shortages.retry(lambda: self._layers.load_stage(layers, standby_layers, progress))
            loaded = time.perf_counter()
            slices = [self._loader.build_slice(stage, part) for part in to_ranges(new)]
            warm_up_s = sum(self._shortages.retry(partial(self._warm_up_stage, part)) for part in slices)
            self._memory.max_sequences = max_sequences
            kv_positions = self._layers.set_prepared(stage, standby_layers)
        kernels, bits = self._kernels.describe(stage.modules)
        share_unit, share_mappings = self._transfers.sharing(layers)
        max_sequences = self._memory.num_sequences(layers, standby_layers)
        return Capacity(
            kv_tokens=max(0, kv_positions - max_sequences * self._arena.wasted),
            max_sequences=max_sequences,
            load_s=loaded - began,
            warm_up_s=warm_up_s,
            resident_bytes=psutil.Process().memory_info().rss,
            kernels=kernels + describe_fallback(stage),
            bits=bits,
            share_unit=share_unit,
            share_mappings=share_mappings,
        )

    def loaded_bits(self) -> str:
        return self._kernels.describe(self._layers.modules)[1]

    def keep(self, ranges: tuple[LayerRange, ...], progress: Progress, stopped: StopCheck) -> tuple[LayerRange, ...]:
        return self._layers.keep(ranges, progress, stopped, self._warm_up_stage)

    def load_adapters(self, entries: tuple[AdapterEntry, ...]) -> tuple[AdapterEntry, ...]:
        opened: dict[AdapterEntry, AdapterFolder] = {}
        for entry in entries:
            adapter = AdapterFolder(entry.name, entry.source)
            asset, sizes = adapter.asset(), self._kernels.adapter_bytes(adapter)
            found = AdapterEntry(entry.name, adapter.source, asset.digest, asset.num_bytes, sizes)
            if entry.digest not in ("", found.digest):
                raise ModelError(f"{entry.source} has other files here than the adapter {entry.name} of the swarm")
            adapter.key = found.key
            opened[found] = adapter
        added = {found.key: found.layer_bytes for found in opened}
        self._layers.add_adapters(tuple(opened.values()), self._adapted_manifest(self._adapters | added))
        self._adapters = self._adapters | added
        return tuple(opened)

    def drop_adapters(self, keys: tuple[str, ...]) -> None:
        self._adapters = {key: sizes for key, sizes in self._adapters.items() if key not in keys}
        self._layers.drop_adapters(keys, self._adapted_manifest(self._adapters))

    def _adapted_manifest(self, adapters: Mapping[str, tuple[int, ...]]) -> Manifest:
        sizes = add_layer_bytes(self._manifest.layer_bytes, adapters.values())
        return msgspec.structs.replace(self._manifest, layer_bytes=sizes)

    def activate(self, layers: LayerRange, kept: tuple[LayerRange, ...] = (), share_unit: int = 0) -> None:
        self._layers.activate(layers, layers_of(kept))
        self._images.start_epoch(self._active_stage().tower)
        self._rechecker.drop()
        cores.start_helpers(self.threads_alone)
        self._shortages.retry_for_sequences(lambda: self._arena.keep_layers(layers, layers_of(kept)))
        self._arena.start_sharing(share_unit)

    # --- sequences ---------------------------------------------------------------------------------------------------

    def open(self, sequence: int, limit: int) -> None:
        self._arena.open(sequence, limit)

    def truncate(self, sequence: int, position: int) -> None:
        self._arena.truncate(sequence, position)

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        self._shortages.retry_for_sequences(
            lambda: self._arena.fork(sequence, source, position, limit, may_share=may_share),
            lambda: self._arena.release(sequence),
        )

    def share(self, sequence: int, source: int, position: int, *, is_mapped: bool) -> None:
        self._arena.share(sequence, source, position, is_mapped=is_mapped)

    def shrink(self, sequence: int, limit: int) -> None:
        self._arena.shrink(sequence, limit)
        self._vectors.drop(sequence)

    def release(self, sequence: int) -> None:
        self._arena.release(sequence)
        self._vectors.drop(sequence)
        self._grammars.drop(sequence)

    def reset(self) -> None:
        self._arena.reset()
        self._vectors.sums.clear()
        self._grammars.clear()

    def read_kv(self, sequence: int, layers: LayerRange, start: int, stop: int) -> KvData:
        return self._transfers.read(sequence, layers, start, stop)

    @property
    def kv_identity(self) -> str:
        return f"{describe_code()}\n{self._checkpoint.describe_files()}"

    def fits_kv(self, data: KvData) -> bool:
        return self._transfers.fits(data)

    def write_kv(self, sequence: int, limit: int, data: KvData) -> None:
        active = self._layers.active
        self._transfers.write(sequence, limit, data, None if active is None else active.stage.layers)

    def drop_kv(self, sequence: int, layers: LayerRange) -> None:
        self._arena.drop_copies(sequence, layers)

    def kv_copy_bytes(self) -> int:
        return self._transfers.copy_bytes

    def kv_free_bytes(self) -> int:
        if (active := self._layers.active) is None:
            return self._memory.kv_budget(None, self._layers.standby) - self.kv_copy_bytes()
        layers = active.stage.layers
        in_use = self._arena.used * sum(self._manifest.kv_bytes_per_token[layers.first : layers.stop])
        return self._memory.kv_budget(layers, active.standby) - in_use - self.kv_copy_bytes()

    def kv_capacity(self) -> int:
        active = self._layers.active
        return 0 if active is None else active.kv_positions

    def kv_used(self) -> int:
        return self._arena.used

    # --- computing ---------------------------------------------------------------------------------------------------

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> ForwardResult:
        return self._shortages.compute(lambda: self._forward(batch, fenced, progressed), is_piece=batch.is_piece)

    def _forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> ForwardResult:
        self._check_adapters(batch)
        stage = self._active_stage() if batch.through is None else self._layers.part_stage(batch.through)
        clock = self._clock
        left_layers: list[Any] = []
        pooled: list[torch.Tensor] = []
        for row in batch.rows:
            self._arena.mark_used(row, is_replay=batch.through is not None)
        if self._arena.used > self.kv_capacity():
            self._arena.refuse_sharing()
            raise KvFull(f"{self._arena.used} positions are in use, the capacity is {self.kv_capacity()}")
        threads = self.threads_alone if batch.alone else self.threads
        try:
            self._advance_images(stage, batch, threads, fenced, progressed)
            began = clock.mark()
            if not batch.rows:
                return ForwardResult(None, (), (), 0.0, 0.0)
            images = self._find_images(stage, batch, threads, fenced, progressed)
            result = run_batch(
                stage,
                self._arena,
                batch,
                is_fenced=fenced,
                on_progress=progressed,
                threads=threads,
                head_rows=None if batch.through is None else (),
                cache_stats=self._cache_stats,
                on_layers_done=lambda: left_layers.append(clock.mark()),
                on_pooled=pooled.append,
                images=images,
            )
        except FenceRaised:
            self._counters.fenced += 1
            raise
        for row in batch.rows if batch.through is not None else ():
            self._arena.end_replay(row)
        computed_layers = clock.mark()
        hidden = None if stage.has_head or result is None else copy_to_array(result)
        computed = clock.mark()
        samples = self._sample(stage, batch, result, threads)
        prompts = self._compute_prompts(batch, result, threads)
        vectors = self._compute_vectors(batch, result, pooled)
        done = clock.mark()
        compute_s, sample_s = clock.elapsed_s(began, computed), clock.elapsed_s(computed, done)
        head_s = clock.elapsed_s(left_layers[-1], computed_layers) if stage.has_head and left_layers else 0.0
        copy_s = 0.0 if hidden is None else clock.elapsed_s(computed_layers, computed)
        self._counters.add_pass(batch, compute_s, sample_s)
        return ForwardResult(
            hidden,
            samples.sampled,
            samples.failed + prompts.failed + vectors.failed,
            compute_s,
            sample_s,
            head_s,
            copy_s,
            late=samples.delayed,
            certain=samples.certain,
            forced=samples.forced,
            vectors=vectors.vectors,
            prompt_logprobs=prompts.items,
        )

    def _advance_images(
        self, stage: Stage, batch: Batch, threads: int, fenced: Callable[[], bool], progressed: Callable[[], None]
    ) -> None:
        """Compute the batch's parts of images, if this stage embeds."""
        if batch.image_parts and stage.tower is not None:
            began = self._clock.mark()
            with cores.computing(threads, MANY_PATCHES), torch.inference_mode():
                self._images.advance(stage.tower, batch.image_parts, batch.pixels, fenced, progressed)
            self._counters.images_s += self._clock.elapsed_s(began, self._clock.mark())

    def _find_images(
        self,
        stage: Stage,
        batch: Batch,
        threads: int,
        fenced: Callable[[], bool] = lambda: False,
        progressed: Callable[[], None] = lambda: None,
    ) -> ImageRows | None:
        """Return the batch's tokens of images with their features, if this stage embeds. Raises ``IllegalMove`` if the
        model has no vision tower."""
        if any(batch.images) and self._manifest.vision is None:
            raise IllegalMove(f"{self._manifest.name} reads text only, and images came")
        if not any(batch.images) or stage.tower is None:
            return None
        with cores.computing(threads, MANY_PATCHES), torch.inference_mode():
            return self._images.find_rows(stage.tower, batch, fenced, progressed)

    def _check_adapters(self, batch: Batch) -> None:
        """Raise ``IllegalMove`` for an adapter that is not loaded: the row would silently be computed without it."""
        for name in set(batch.adapters) - {"", *self._adapters}:
            if (problem := self._manifest.adapter_error(name)) is not None:
                raise IllegalMove(problem)

    def recheck(
        self, batch: Batch, limit: int, fenced: Callable[[], bool], progressed: Callable[[], None]
    ) -> ForwardResult:
        self._check_adapters(batch)
        began = self._clock.mark()
        stage, result = self._rechecker.run(batch, limit, fenced, progressed, self.threads)
        hidden = None if stage.has_head or result is None else copy_to_array(result)
        samples = self._sample(stage, batch, result, self.threads)
        if samples.delayed:
            raise ModelError("the grammar of what is computed again is not compiled yet")
        (row,) = batch.rows
        if row.start + row.count >= limit:
            self._rechecker.drop()
        return ForwardResult(
            hidden, samples.sampled, samples.failed, self._clock.elapsed_s(began, self._clock.mark()), 0.0
        )

    def logits(self, batch: Batch) -> torch.Tensor:
        """Return the last stage's logits after every token, ``[tokens, vocabulary]``, for tests and tools."""
        return self._logits(batch, range(len(batch.tokens)))

    def last_logits(self, batch: Batch) -> torch.Tensor:
        """Return the last stage's logits after every row, ``[rows, vocabulary]``, for tests and tools."""
        return self._logits(batch, [sum(row.count for row in batch.rows[: n + 1]) - 1 for n in range(len(batch.rows))])

    def _logits(self, batch: Batch, head_rows: Sequence[int]) -> torch.Tensor:
        stage = self._active_stage()
        threads = self.threads_alone if batch.alone else self.threads
        for row in batch.rows:
            self._arena.mark_used(row)
        images = self._find_images(stage, batch, threads)
        result = run_batch(stage, self._arena, batch, head_rows=head_rows, threads=threads, images=images)
        if result is None or not stage.has_head:
            raise IllegalMove(f"the stage of layers {stage.layers} has no head")
        return result

    def _active_stage(self) -> Stage:
        return self._layers.active_stage()

    def _sample(self, stage: Stage, batch: Batch, result: torch.Tensor | None, threads: int) -> BatchSamples:
        if not stage.has_head or result is None:
            return BatchSamples()
        return sample_batch(batch, result, self._manifest, threads, self._grammars)

    def _compute_prompts(self, batch: Batch, result: torch.Tensor | None, threads: int) -> BatchPromptLogprobs:
        if not batch.prompts or result is None:
            return BatchPromptLogprobs()
        num_drawn = sum(1 + job.num_proposed for job in batch.samples)
        return compute_prompt_logprobs(batch, result[num_drawn:], self._manifest, threads)

    def _compute_vectors(self, batch: Batch, result: torch.Tensor | None, pooled: list[torch.Tensor]) -> BatchVectors:
        if not batch.vectors:
            return BatchVectors()
        num_scores = sum(job.kind == "scores" and job.is_end for job in batch.vectors)
        scores = result[-num_scores:] if result is not None and num_scores else None
        return self._vectors.compute(batch, scores, pooled, self._manifest.dtype)

    def warm_up(self) -> float:
        return self._warm_up_stage(self._active_stage())

    def _warm_up_stage(self, stage: Stage) -> float:
        began = time.perf_counter()
        result = dry_runs.warm_up(stage, self._manifest)
        self._kernels.add_left_to_torch(result.left_to_torch)
        self._transfers.add_shapes(result.shapes)
        return time.perf_counter() - began

    def test(self, progressed: Callable[[], None]) -> None:
        if self._layers.active is not None:
            dry_runs.test_device(self._layers.active.stage, self._manifest.row_width, self.threads, progressed)

    def drop_spare(self) -> None:
        self._layers.drop_standby()
        self._rechecker.drop()
        release_free_memory()
        release_cached(self._device)
        self._images.clear()

    def stats(self) -> dict[str, float]:
        return {
            **self._counters.values(),
            "loaded_bytes": self._loader.loaded_bytes,
            "fetched_bytes": self._loader.fetched_bytes,
            "mask_hits": self._cache_stats.mask_hits,
            "mask_misses": self._cache_stats.mask_misses,
            "rope_hits": self._cache_stats.rope_hits,
            "rope_misses": self._cache_stats.rope_misses,
            "sequences": len(self._arena),
            "kv_used": self.kv_used(),
            "kv_capacity": self.kv_capacity(),
            "kv_copy_bytes": self.kv_copy_bytes(),
            "state_bytes": self._arena.states.num_bytes,
            "kv_pages_kept": self._arena.num_pages_kept,
            "weight_bytes": self.weight_bytes,
            "standby_bytes": self.standby_bytes,
            "resident_bytes": psutil.Process().memory_info().rss,
            **memory_stats(self._device),
        }
