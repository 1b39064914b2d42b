"""State of one run of a ragged batch through a range of layers, for the layers' hooks and the attention function.

Consecutive stages of one worker share layer modules, and one thread may warm up a stage while another computes with the
previous one. The state of a run is therefore never kept in a module: it is in the calling thread's current pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from swarm.errors import IllegalMove

if TYPE_CHECKING:
    from swarm.stage.attention.arena import KvArena
    from swarm.stage.attention.calls import Together
    from swarm.stage.attention.grid import Span
    from swarm.stage.attention.tiles import Plan
    from swarm.wire.messages import LayerRange


@dataclass(slots=True)
class Tally:
    """Cache statistics of masks and rope tables: how often they were reused, and how often computed."""

    mask_hits: int = 0
    mask_misses: int = 0
    rope_hits: int = 0
    rope_misses: int = 0


@dataclass(slots=True)
class Pass:
    """One run through a range of layers by one thread: all that the modules' hooks and the attention function need."""

    arena: KvArena
    layers: LayerRange
    spans: tuple[Span, ...]  # the rows of the batch
    hidden: torch.Tensor | None = None  # replaces the first layer's input, unless the stage embeds
    keep_rows: torch.Tensor | None = None  # narrows the last layer's output to the rows that the head needs
    fenced: Callable[[], bool] = lambda: False  # whether a newer epoch has made this run obsolete
    progressed: Callable[[], None] = lambda: None  # called after each layer
    left_layers: Callable[[], None] = lambda: None  # called after the last layer, before norm and head
    plans: dict[int | None, Plan] = field(default_factory=dict)  # groups of rows that share products, by window
    racks: tuple[Together, ...] = ()  # the same for our own kernel; empty until it is first needed
    tally: Tally = field(default_factory=Tally)
    length: int = 0  # largest position of the batch, plus one
    by_modules: bool = False  # run the modules even if the stage has a program
    output: torch.Tensor | None = None  # the last layer's output


_current = threading.local()


def current_pass() -> Pass:
    """Return this thread's current pass."""
    found = getattr(_current, "value", None)
    if not isinstance(found, Pass):
        raise IllegalMove("a layer ran outside of a pass")
    return found


class running:
    """Context manager that makes a pass this thread's current one."""

    def __init__(self, this: Pass) -> None:
        self._this = this

    def __enter__(self) -> None:
        _current.value = self._this

    def __exit__(self, *_: object) -> None:
        _current.value = None
