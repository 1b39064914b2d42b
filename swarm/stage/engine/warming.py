"""First steps of layers that were just loaded: kernels run at the sizes that will come, and a program proves itself.

A program must have the bits of the modules that it stands for. If it has others, this process computes module by
module from then on, and ``swarmctl nodes`` says so.
"""

from __future__ import annotations

import numpy as np
import torch

from swarm.log import get_logger
from swarm.stage.attention.arena import KvArena
from swarm.stage.engine import rounding
from swarm.stage.engine.forward import run
from swarm.stage.executor import Batch
from swarm.stage.model import program
from swarm.stage.model.build import Stage
from swarm.wire.messages import Manifest, Row

# First position, number of rows, and whether the modules compute the step, too.
_STEPS = ((0, 32, True), (32, 1, True), (0, 128, False))

log = get_logger(__name__)


def warm(stage: Stage, manifest: Manifest) -> set[str]:
    """Run a few steps; return which of torch's operations took part whose bits are the processor's (``rounding``)."""
    arena = KvArena(stage.device)  # of its own: the compute thread may be at work with the other one
    arena.open(0, max(start + count for start, count, _ in _STEPS))
    chance, left_to_torch = np.random.default_rng(7), set[str]()
    for start, count, compared in _STEPS:
        hidden = None if stage.embeds else chance.standard_normal((count, manifest.hidden_size), np.float32)
        tokens = chance.integers(0, manifest.vocab_size, count)
        batch = Batch((Row(0, start, count, stage.heads),), tokens, hidden, ())
        with rounding.watching() as found:
            result = run(stage, arena, batch, head_rows=[count - 1])
            if compared and stage.program is not None and program.runs():
                _compare(result, run(stage, arena, batch, head_rows=[count - 1], by_modules=True))
        left_to_torch |= found
    return left_to_torch


def _compare(result: torch.Tensor | None, by_modules: torch.Tensor | None) -> None:
    if result is None or by_modules is None or not torch.equal(result, by_modules):
        program.do_without("a step as one call has other bits than its modules")
        log.warning("program_unused", why=program.absence())
