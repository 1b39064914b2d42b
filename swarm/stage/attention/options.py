"""Parameters of attention, and which positions queries see by them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class Reach:
    """Which earlier positions queries see: a window's, or those of their own chunk; without either, all."""

    window: int | None = None
    chunk: int | None = None

    def first(self, position: Any) -> Any:
        """Return the first position that a query sees, which may be negative; takes tensors, too. It never falls from
        one position to the next."""
        if self.window is not None:
            return position - self.window + 1
        return position * 0 if self.chunk is None else position // self.chunk * self.chunk


@dataclass(frozen=True, slots=True)
class Latents:
    """Keys whose first ``value_size`` numbers are their values, too, stored once: as one of the ``num_heads`` key heads
    of a layer."""

    value_size: int
    head: int = 0
    num_heads: int = 1


@dataclass(frozen=True, slots=True)
class AttentionOptions:
    """Parameters of attention: what scores go through before they become weights."""

    scale: float  # factor of the scores
    window: int | None  # positions that a query sees; None: all
    softcap: float | None  # bound of the scores, by tanh
    sinks: torch.Tensor | None  # per query head, a score that takes weight and gives nothing
    chunk: int | None = None  # a query sees only its own chunk of this length; None: all
    slopes: torch.Tensor | None = None  # per query head, change of a score per position from query to key (ALiBi)
    # Falcon's ALiBi: slopes count from position 0, position and product are rounded to bfloat16, and then scaled by
    # this; None: not rounded.
    rounded: float | None = None
    latents: Latents | None = None  # whether values are the first numbers of the keys, as these

    @property
    def reach(self) -> Reach:
        return Reach(self.window, self.chunk)

    def bias(self, slopes: torch.Tensor, positions: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return what scores change by. ``slopes``, the queries' ``positions`` and those of the ``keys`` broadcast."""
        if self.rounded is not None:
            return (slopes.bfloat16() * keys.bfloat16()).float() * self.rounded
        return slopes.float() * (keys - positions)
