"""Computations of a stage without any request: to warm up its kernels, or to test that its device computes correctly.

Both use an arena of their own, so that the stage's sequences are not touched.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch

from swarm.errors import DeviceError
from swarm.log import get_logger
from swarm.stage.attention.arena import KvArena
from swarm.stage.attention.racks import KvShape
from swarm.stage.engine import portability
from swarm.stage.engine.forward import run_batch
from swarm.stage.engine.selfcheck import allowed_difference
from swarm.stage.executor import Batch
from swarm.stage.model import program
from swarm.stage.model.build import Stage
from swarm.wire.messages import Manifest, Row

# First steps of layers that were just loaded: first position, number of rows, and whether the modules compute it, too.
_FIRST_STEPS = ((0, 32, True), (32, 1, True), (0, 128, False))
_LONG_STEP = (512, 1, False)  # in a pool of pages: beyond a split, for which attention has kernels of its own
_TEST_CHUNKS = (3, 1)  # positions per pass: first like a prompt, then like a token

log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class WarmUp:
    """What a warm-up showed: torch operations that took part and whose bits depend on the processor (``portability``),
    and the shapes of the layers' keys and values."""

    left_to_torch: set[str]
    shapes: dict[int, KvShape]


def warm_up(stage: Stage, manifest: Manifest) -> WarmUp:
    """Run a few steps through layers that were just loaded, at the sizes that requests will have.

    A program must have the same bits as the modules that it replaces. If it does not, this process computes module by
    module from then on, and ``swarmctl nodes`` shows that.
    """
    arena = KvArena(stage.device)  # an arena of its own: the compute thread may be using the other one
    has_splits = arena.pool is not None and manifest.context > _LONG_STEP[0]
    steps = (*_FIRST_STEPS, _LONG_STEP) if has_splits else _FIRST_STEPS
    arena.open(0, max(start + count for start, count, _ in steps))
    arena.states.is_measuring = True  # the long step has none before it
    chance, left_to_torch = np.random.default_rng(7), set[str]()
    for start, count, compared in steps:
        hidden = None if stage.has_embedding else chance.standard_normal((count, manifest.row_width), np.float32)
        tokens = chance.integers(0, manifest.vocab_size, count)
        row = Row(0, start, count, stage.has_head)
        batch = Batch((row,), tokens, hidden, ())
        arena.mark_used(row)
        with portability.watch_operations() as operations:
            result = run_batch(stage, arena, batch, head_rows=[count - 1])
            if compared and stage.program is not None and program.is_enabled():
                _compare_program(result, run_batch(stage, arena, batch, head_rows=[count - 1], by_modules=True))
        left_to_torch |= operations
    if stage.tower is not None:
        stage.tower.warm_up()
    return WarmUp(left_to_torch, arena.shapes(0))


def test_device(stage: Stage, row_width: int, threads: int, progressed: Callable[[], None]) -> None:
    """Compute a few positions in one pass and in several. Raise ``DeviceError`` unless both give the same finite
    numbers."""
    num = sum(_TEST_CHUNKS)
    hidden = np.random.default_rng(1).standard_normal((num, row_width)).astype(np.float32)

    def compute(*counts: int) -> torch.Tensor:
        arena, at, found = KvArena(stage.device), 0, []
        arena.open(0, num)
        for count in counts:
            row, stop = Row(0, at, count, stage.has_head), at + count
            tokens = np.arange(at, stop, dtype=np.int64)
            batch = Batch((row,), tokens, None if stage.has_embedding else hidden[at:stop], ())
            arena.mark_used(row)
            result = run_batch(stage, arena, batch, head_rows=range(count), on_progress=progressed, threads=threads)
            if result is None:
                raise DeviceError(f"layers {stage.layers} gave nothing")
            found.append(result.to("cpu", torch.float32))
            at = stop
        return torch.cat(found)

    whole, pieces = compute(num), compute(*_TEST_CHUNKS)
    if not torch.isfinite(whole).all():
        raise DeviceError(f"layers {stage.layers} computed numbers that are not finite from ones that are")
    rows = (whole - pieces).abs().amax(-1)
    difference = float(rows.max() if stage.dtype == torch.float32 else rows.median()) / max(
        float(whole.abs().max()), 1e-30
    )
    if not difference <= allowed_difference(str(stage.dtype).removeprefix("torch.")):  # NaN is no match either
        raise DeviceError(
            f"layers {stage.layers} computed the same positions twice and came to different numbers "
            f"(relative difference {difference:.1e})"
        )


def _compare_program(result: torch.Tensor | None, by_modules: torch.Tensor | None) -> None:
    if result is None or by_modules is None or not torch.equal(result, by_modules):
        program.disable("a step as one call has other bits than its modules")
        log.warning("program_unused", why=program.disabled_reason())
