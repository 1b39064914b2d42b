"""How fast one layer is here, measured before anything is loaded: a plan is made of such numbers."""

from __future__ import annotations

import time

import numpy as np
import torch

from swarm.stage.arena import KvArena
from swarm.stage.executor import Batch
from swarm.stage.forward import run
from swarm.stage.model import Skeleton, Stage, Weights
from swarm.wire.messages import LayerCost, LayerRange, Row

_SIZES = (1, 4, 16, 64, 256)
_NUM_RUNS = 3
_BUDGET_S = 0.15  # for one size; the first run of a kernel is slow and doesn't count


class ConstantSource:
    """Every tensor there is, of one small value: speed doesn't depend on it."""

    def __contains__(self, name: str) -> bool:
        return True

    def read(self, name: str, shape: torch.Size) -> torch.Tensor:
        return torch.full(shape, 0.01)


def layer_costs(skeleton: Skeleton) -> tuple[LayerCost, ...]:
    """Seconds for one layer with this many positions, the best of a few runs."""
    layer = min(1, skeleton.num_layers - 1)  # a first layer is now and then unlike the others
    weights = Weights(skeleton, ConstantSource(), lambda _: None)
    stage = Stage(skeleton, LayerRange(layer, layer + 1), {}, weights, bare=True)
    return tuple(LayerCost(rows, _best(stage, skeleton, rows)) for rows in _SIZES)


def _best(stage: Stage, skeleton: Skeleton, rows: int) -> float:
    arena = KvArena(skeleton.device)
    arena.open(0, rows)
    hidden = np.full((rows, skeleton.config.get_text_config().hidden_size), 0.01, np.float32)
    batch = Batch((Row(0, 0, rows, False),), np.zeros(rows, np.int64), hidden, ())
    run(stage, arena, batch)
    best, ends = float("inf"), time.perf_counter() + _BUDGET_S
    for _ in range(_NUM_RUNS):
        began = time.perf_counter()
        run(stage, arena, batch)
        best = min(best, time.perf_counter() - began)
        if time.perf_counter() > ends:
            break
    return best
