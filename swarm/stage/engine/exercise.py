"""A stage computes for nobody: to warm its kernels up, or to show that its device still computes.

Both work in an arena of their own, so that what the stage holds of sequences is not touched.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from swarm.errors import DeviceError
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine import rounding
from swarm.stage.engine.forward import run
from swarm.stage.engine.selfcheck import allowed_difference
from swarm.stage.executor import Batch
from swarm.stage.model.build import Stage
from swarm.wire.messages import Row

_WARM_UP_ROWS = (1, 32, 128)
_TEST_PIECES = (3, 1)  # positions: as of a prompt, and as of a token


def warm(stage: Stage, hidden_size: int) -> set[str]:
    """Run the kernels once at the sizes that will come; return the operations whose bits are the processor's."""
    arena = KvArena(stage.device)  # of its own: the compute thread may be at work with the other one
    arena.open(0, max(_WARM_UP_ROWS))
    left_to_torch: set[str] = set()
    for count in _WARM_UP_ROWS:
        hidden = None if stage.embeds else np.zeros((count, hidden_size), np.float32)
        batch = Batch((Row(0, 0, count, stage.heads),), np.zeros(count, np.int64), hidden, ())
        with rounding.watching() as found:
            run(stage, arena, batch, head_rows=[0])
        left_to_torch |= found
    return left_to_torch


def test(stage: Stage, hidden_size: int, threads: int, progressed: Callable[[], None]) -> None:
    """Compute a few positions at once and in pieces. Raise DeviceError unless both give the same finite numbers."""
    num = sum(_TEST_PIECES)
    hidden = np.random.default_rng(1).standard_normal((num, hidden_size)).astype(np.float32)

    def computed(*counts: int) -> torch.Tensor:
        arena, at, found = KvArena(stage.device), 0, []
        arena.open(0, num)
        for count in counts:
            row, stop = Row(0, at, count, stage.heads), at + count
            tokens = np.arange(at, stop, dtype=np.int64)
            batch = Batch((row,), tokens, None if stage.embeds else hidden[at:stop], ())
            arena.take(row)
            result = run(stage, arena, batch, head_rows=range(count), progressed=progressed, threads=threads)
            if result is None:
                raise DeviceError(f"layers {stage.layers} gave nothing")
            found.append(result.to("cpu", torch.float32))
            at = stop
        return torch.cat(found)

    whole, pieces = computed(num), computed(*_TEST_PIECES)
    if not torch.isfinite(whole).all():
        raise DeviceError(f"layers {stage.layers} computed numbers that are not finite from ones that are")
    rows = (whole - pieces).abs().amax(-1)
    found = float(rows.max() if stage.dtype == torch.float32 else rows.median()) / max(float(whole.abs().max()), 1e-30)
    if not found <= allowed_difference(str(stage.dtype).removeprefix("torch.")):  # NaN is no match either
        raise DeviceError(
            f"layers {stage.layers} computed the same positions twice and came to different numbers "
            f"(relative difference {found:.1e})"
        )
