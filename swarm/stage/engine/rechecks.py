"""Layers that are computed again to compare the results of another worker, with keys and values of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from swarm.errors import IllegalMove
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine.forward import run_batch
from swarm.stage.executor import Batch
from swarm.stage.model.build import Stage
from swarm.wire.messages import LayerRange


@dataclass(frozen=True, slots=True)
class _Recheck:
    stage: Stage
    arena: KvArena


class Rechecker:
    """Computes one sequence at a time again, from its first position on. ``build`` returns a stage of these layers."""

    def __init__(self, device: torch.device, build: Callable[[LayerRange], Stage]) -> None:
        self._device = device
        self._build = build
        self._current: _Recheck | None = None

    def run(
        self, batch: Batch, limit: int, fenced: Callable[[], bool], progressed: Callable[[], None], threads: int
    ) -> tuple[Stage, torch.Tensor | None]:
        """Compute a batch of one row. Return the stage and its output."""
        assert batch.through is not None
        (row,) = batch.rows
        if row.start == 0:
            arena = KvArena(self._device)
            arena.open(row.sequence, limit)
            self._current = _Recheck(self._build(batch.through), arena)
        current = self._current
        if current is None or current.stage.layers != batch.through:
            raise IllegalMove(f"layers {batch.through} are computed again from the middle")
        current.arena.mark_used(row)
        result = run_batch(
            current.stage, current.arena, batch, is_fenced=fenced, on_progress=progressed, threads=threads
        )
        return current.stage, result

    def drop(self) -> None:
        """Free the memory: the comparison has ended, or will not go on."""
        self._current = None
