"""State of one run of a ragged batch through a range of layers, for the layers' hooks and the attention function.

Consecutive stages of one worker share layer modules, and one thread may warm up a stage while another computes with the
previous one. The state of a run is therefore never kept in a module: it is in the calling thread's current pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import torch

from swarm.errors import IllegalMove

if TYPE_CHECKING:
    from swarm.stage.attention.arena import KvArena
    from swarm.stage.attention.grid import Span
    from swarm.stage.attention.kernel_args import RackBatch
    from swarm.stage.attention.options import Reach
    from swarm.stage.attention.page_plan import PagePlan
    from swarm.stage.attention.tiles import AttentionPlan
    from swarm.wire.messages import LayerRange


@dataclass(slots=True)
class CacheStats:
    """Cache statistics of masks and rope tables: how often they were reused, and how often computed."""

    mask_hits: int = 0
    mask_misses: int = 0
    rope_hits: int = 0
    rope_misses: int = 0


class ImageInputs(Protocol):
    """What a batch's tokens of images bring into the layers."""

    def embed(self, embedded: torch.Tensor) -> torch.Tensor:
        """Return the batch's embeddings ``[1, tokens, hidden]`` with those of images in their places."""

    def add_to(self, hidden: torch.Tensor, layer: int) -> None:
        """Add the features for this layer's output ``[1, tokens, hidden]`` in place."""


@dataclass(slots=True)
class ForwardPass:
    """One run through a range of layers by one thread: all that the modules' hooks and the attention function need."""

    arena: KvArena
    layers: LayerRange
    spans: tuple[Span, ...]  # the rows of the batch
    hidden: torch.Tensor | None = None  # replaces the first layer's input, unless the stage embeds
    keep_rows: torch.Tensor | None = None  # narrows the last layer's output to the rows that the head needs
    num_pooled: int = 0  # rows at the end of ``keep_rows`` that are normed, but do not pass through the head
    is_fenced: Callable[[], bool] = lambda: False  # whether a newer epoch has made this run obsolete
    on_progress: Callable[[], None] = lambda: None  # called after each layer
    on_layers_done: Callable[[], None] = lambda: None  # called after the last layer, before norm and head
    # groups of rows that share products, by the positions that queries see
    groups_by_reach: dict[Reach, AttentionPlan] = field(default_factory=dict)
    page_plan: PagePlan | None = None  # the same for a pool's pages; None until it is first needed
    rack_batches: tuple[RackBatch, ...] = ()  # the same for our own kernel; empty until it is first needed
    cache_stats: CacheStats = field(default_factory=CacheStats)
    length: int = 0  # largest position of the batch, plus one
    # of the batch's tokens, [1, tokens]; [3, 1, tokens] if some sequence has images
    positions: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    images: ImageInputs | None = None  # the batch's tokens of images, on the stage that embeds
    by_modules: bool = False  # run the modules even if the stage has a program
    output: torch.Tensor | None = None  # the last layer's output
    normed: torch.Tensor | None = None  # the same after the norm, on the stage with the head


_current = threading.local()


def current_pass() -> ForwardPass:
    """Return this thread's current pass."""
    current = getattr(_current, "value", None)
    if not isinstance(current, ForwardPass):
        raise IllegalMove("a layer ran outside of a pass")
    return current


class use_pass:
    """Context manager that makes a pass this thread's current one."""

    def __init__(self, forward_pass: ForwardPass) -> None:
        self._pass = forward_pass

    def __enter__(self) -> None:
        _current.value = self._pass

    def __exit__(self, *_: object) -> None:
        _current.value = None
