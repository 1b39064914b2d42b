"""A worker's resources: its device, measured before anything is loaded, and its shares of memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import psutil

from swarm.demo import model_path
from swarm.stage.engine.device import parse_device
from swarm.stage.engine.torch_executor import TorchExecutor
from swarm.stage.model import program
from swarm.stage.model.build import possible_dtypes
from swarm.stage.native import packed_cache, variant_choice
from swarm.stage.quantization.at_load import Quantization
from swarm.stage.shell.budget import MemoryBudget, split_memory
from swarm.stage.shell.spill_memory import reserve_bytes
from swarm.wire.messages import LayerCost, Manifest
from swarm.wire.transport.keys import KeyPair

if TYPE_CHECKING:
    from swarm.config import Settings


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """Resources of a worker."""

    executor: TorchExecutor
    costs: tuple[LayerCost, ...]  # the measured speed of one layer
    log_bytes: int  # limit of the activation log
    key_pair: KeyPair
    dtypes: tuple[str, ...] = ()  # types of weights that the worker could compute with instead, as its settings allow
    limit_bytes: int = 0  # of the process's memory; 0: none, because the device has its own


def open_resources(settings: Settings, pair: KeyPair, dtype: str = "") -> WorkerResources:
    """Open the model on the device, measure it, and divide the memory.

    ``dtype``: type of the weights where the swarm has chosen it; empty: the settings decide.
    """
    worker = settings.worker
    limit = None if worker.memory_limit is None else int(worker.memory_limit)
    variant_choice.select_kernels(worker.kernels, worker.bits)
    packed_cache.configure(int(worker.packed_cache_bytes))
    if worker.program == "off":
        program.disable("worker.program is off")
    executor = TorchExecutor(
        _model_path(settings),
        device=worker.device,
        dtype=dtype or worker.dtype,
        quantization=Quantization.from_settings(worker),
        memory_limit=limit,
        threads=worker.threads or None,
        kv_share=worker.kv_share,
        adapters=dict(text.split("=", 1) for text in worker.adapters),
        images=worker.images,
    )
    if worker.bits == "portable":
        variant_choice.require_portable(own=executor.has_own_kernels)
    costs = executor.measure()
    log_bytes, limit_bytes = int(worker.log_bytes), 0
    if not worker.device.startswith("cuda"):  # for a GPU, the limit is for the device's own memory
        budget, limit_bytes = _memory_budget(limit, log_bytes, executor.manifest if worker.spill else None)
        executor.memory_bytes, log_bytes = executor.scale_memory(budget.model_bytes), budget.log_bytes
    dtypes = possible_dtypes(worker.dtype, parse_device(worker.device))
    return WorkerResources(executor, costs, log_bytes, pair, dtypes, limit_bytes)


def _memory_budget(limit: int | None, log_bytes: int, spilled: Manifest | None) -> tuple[MemoryBudget, int]:
    """Return the division of the memory limit, and the limit; by default the free memory. Call it before any weights
    are loaded: the current size of the process counts as its base. ``spilled``: the model, if ``worker.spill`` is
    on."""
    base = psutil.Process().memory_info().rss
    if limit is None:
        limit = psutil.virtual_memory().available + base
    spill_bytes = reserve_bytes(spilled, limit - base) if spilled else 0
    return split_memory(limit, base, log_bytes, spill_bytes), limit


def _model_path(settings: Settings) -> str:
    if settings.model is not None:
        return settings.model
    return str(model_path())
