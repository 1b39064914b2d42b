"""One run of a ragged batch through some layers: what the layers' hooks and the attention function must know about it.

Layer modules are shared by consecutive stages of one worker, and one thread may warm a stage up while another computes
with the one before. So nothing about a run is kept in a module; it stands in the calling thread's current pass.
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
    """Counts how often masks and tables were made anew, and how often they were there already."""

    mask_hits: int = 0
    mask_misses: int = 0
    rope_hits: int = 0
    rope_misses: int = 0


@dataclass(slots=True)
class Pass:
    """One run through some layers by one thread: what the modules' hooks and the attention function need to know."""

    arena: KvArena
    layers: LayerRange
    spans: tuple[Span, ...]
    hidden: torch.Tensor | None = None  # replaces the first layer's input, unless the stage embeds
    keep_rows: torch.Tensor | None = None  # narrows the last layer's output to what the head needs
    fenced: Callable[[], bool] = lambda: False
    progressed: Callable[[], None] = lambda: None
    left_layers: Callable[[], None] = lambda: None  # called after the last layer, before norm and head
    plans: dict[int | None, Plan] = field(default_factory=dict)  # who attends together, by window
    racks: tuple[Together, ...] = ()  # the same for our own kernel, once it was asked for
    tally: Tally = field(default_factory=Tally)
    length: int = 0  # positions up to the furthest of the batch
    by_modules: bool = False  # whether the stage's program, if it has one, is passed over
    output: torch.Tensor | None = None  # the last layer's output


_current = threading.local()


def current_pass() -> Pass:
    """The pass that this thread is in."""
    found = getattr(_current, "value", None)
    if not isinstance(found, Pass):
        raise IllegalMove("a layer ran outside of a pass")
    return found


class running:
    """``with running(a_pass):`` makes it this thread's current one."""

    def __init__(self, this: Pass) -> None:
        self._this = this

    def __enter__(self) -> None:
        _current.value = self._this

    def __exit__(self, *_: object) -> None:
        _current.value = None
