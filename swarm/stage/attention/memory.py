"""What an arena requires of the memory that holds keys and values.

Two implementations exist: racks on CPUs (``rack_memory``), and pages on other devices (``pages``). The arena decides
and counts; the memory allocates, frees and moves.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Protocol, Self

if TYPE_CHECKING:
    import torch

    from swarm.stage.attention.racks import KvShape
    from swarm.stage.attention.shared_slots import SlotMappings
    from swarm.wire.messages import LayerRange


class KvRegion(Protocol):
    """Keys and values of one sequence in one layer, zero where never written."""

    @property
    def shape(self) -> KvShape: ...

    def read(self, start: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a copy of some positions' keys and values ``[key heads, positions, size]``."""
        ...

    def write(self, start: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Write keys and values ``[key heads, positions, size]``, beginning at position ``start``."""
        ...


class KvPlace(Protocol):
    """Memory of one sequence. Layers of it exist once they were ensured."""

    @property
    def mappings(self) -> SlotMappings:
        """Pages of a file that are mapped over the memory; none where sequences can't share."""
        ...

    def num_readable(self, layers: LayerRange) -> int:
        """Return how many positions can be read in these layers, which exist."""
        ...

    def grow(self, used: int, copies: Mapping[int, int]) -> None:
        """Allocate memory for this many positions, and in layers of copies for theirs, before they are counted.

        If memory ends, the place is as it was before.
        """
        ...

    def ensure_region(
        self, layer: int, keys: torch.Tensor, values: torch.Tensor, *, num_copied: int | None
    ) -> KvRegion:
        """Return a layer, created at first use for keys and values like these (``[heads, *, size]``). ``num_copied``:
        its positions if it is a copy."""
        ...

    def region(self, layer: int) -> KvRegion:
        """Return a layer that exists."""
        ...

    def copy_from(self, source: Self, layers: Iterable[int], position: int, *, start: int) -> None:
        """Copy the positions from ``start`` to ``position`` of these layers, which exist in both places."""
        ...

    def shapes(self, layers: LayerRange) -> list[KvShape]:
        """Return the shapes of these layers, which exist."""
        ...

    def read(self, layers: LayerRange, start: int, stop: int) -> torch.Tensor:
        """Return a flat copy of these positions in these layers, which exist (``transfer``)."""
        ...

    def write(self, layers: LayerRange, start: int, flat: torch.Tensor) -> None:
        """Write what ``read`` returned from layers of the same shapes."""
        ...

    def free_from(self, layers: Collection[int], position: int) -> None:
        """Free the memory of the positions from ``position`` on. ``layers``: all that exist."""
        ...

    def drop_layer(self, layer: int) -> None:
        """Free a layer. One that does not exist is no error."""
        ...

    def clear(self, layers: Collection[int]) -> None:
        """Free everything. ``layers``: all that exist."""
        ...

    def release(self) -> None:
        """End the sequence, whose memory was freed before."""
        ...


class KvMemory(Protocol):
    """Memory of all sequences of one stage. Used by one thread only."""

    @property
    def allocated_bytes(self) -> int:
        """Bytes that were allocated; on a CPU, bytes of address space."""
        ...

    @property
    def can_share(self) -> bool:
        """Whether sequences can share memory here."""
        ...

    def count(self, positions: int) -> int:
        """Return how many positions count as used when this many are written."""
        ...

    def open(self, limit: int) -> KvPlace:
        """Return memory for a sequence of up to ``limit`` positions."""
        ...

    def keep_layers(self, own: Collection[int], kept: Collection[int]) -> None:
        """Free all other layers. Sequences write to the ``own`` ones from now on."""
        ...

    def clear(self) -> None:
        """Free everything."""
        ...
