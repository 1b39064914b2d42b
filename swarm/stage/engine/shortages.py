"""Lack of memory on a device with memory of its own, where others may take what was free at the start.

A step without memory is first computed again in pieces (``stage.faults``). If that fails too, the cache is too large
beside what a step needs: keys and values get less from the next plan on, and the step ends with ``KvFull``, for which
no request is blamed. On a CPU, a lack of memory is the machine's, and nothing is changed here.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch

from swarm.errors import KvFull
from swarm.log import get_logger
from swarm.stage.engine.device import release_cached
from swarm.stage.engine.memory_plan import MemoryPlan
from swarm.stage.executor import is_out_of_memory

LESS = 0.75  # of the cache's former share of the memory, after a step that found none even in pieces
LEAST_SHARE = 0.01  # smallest share, as in ``worker.kv_share``

log = get_logger(__name__)
T = TypeVar("T")


@dataclass(slots=True)
class MemoryShortages:
    """Response to a device's memory shortages."""

    device: torch.device
    memory: MemoryPlan

    def compute(self, step: Callable[[], T], *, is_piece: bool) -> T:
        """Compute a step, or a piece of one. A whole step that lacks memory raises the device's own error, and a piece
        raises ``KvFull``."""
        try:
            return step()
        except (RuntimeError, MemoryError) as error:
            if not is_piece or self.device.type == "cpu" or not is_out_of_memory(error):
                raise
            raise KvFull(self._shrink_cache(error)) from None

    def _shrink_cache(self, error: BaseException) -> str:
        self.memory.kv_share = max(LEAST_SHARE, self.memory.kv_share * LESS)
        log.warning("kv_share_reduced", device=str(self.device), kv_share=self.memory.kv_share)
        reason = str(error).partition("\n")[0]
        return (
            f"device {self.device} had too little memory for a step; keys and values get "
            f"{self.memory.kv_share:.0%} of what the weights leave from the next plan on: {reason}"
        )

    def retry(self, work: Callable[[], T], undo: Callable[[], object] = lambda: None) -> T:
        """Do something that needs memory. If there is none, ``undo`` it, return torch's unused memory to the device,
        and try once more."""
        try:
            return work()
        except (RuntimeError, MemoryError) as error:
            if self.device.type == "cpu" or not is_out_of_memory(error):
                raise
        undo()
        gc.collect()
        release_cached(self.device)
        return work()

    def retry_for_sequences(self, work: Callable[[], None], undo: Callable[[], object] = lambda: None) -> None:
        """Do the same for the keys and values of sequences. Raises ``KvFull``."""
        try:
            self.retry(work, undo)
        except (RuntimeError, MemoryError) as error:
            if self.device.type == "cpu" or not is_out_of_memory(error):
                raise
            undo()
            raise KvFull(str(error).partition("\n")[0]) from None
