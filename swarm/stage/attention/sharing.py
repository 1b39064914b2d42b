"""Prefixes whose pages several sequences of an arena share (on a CPU, under Linux).

A fork moves the prefix of its source once to a file in memory, and maps the file's pages over the prefix in both slots.
Later forks of the same prefix only map them. The mappings are private: a sequence that writes there gets pages of its
own, so a write never shows in another sequence, or in another process. The kernel frees the file with its last mapping,
in whatever order the sequences end. Addresses stay the same, so attention needs no change.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from swarm.stage.attention.mapping import map_pages
from swarm.stage.attention.racks import LayerBuffer

# Shorter prefixes are copied, which takes as long as mapping them.
MIN_SHARED = 256
# Mapped ranges of one arena. A process may have 65,530 mappings by default, and the memory behind a range counts again.
MAX_RANGES = 16_384
# Files behind one sequence. A conversation that grows by turns adds one in each; beyond that it is copied.
MAX_FILES = 8


@dataclass(slots=True, eq=False)
class SharedPrefix:
    """Positions ``start`` to ``stop`` that several sequences hold, in a file in memory."""

    start: int
    stop: int
    file: int  # file descriptor
    offsets: dict[int, tuple[int, int]]  # of the keys and of the values in the file, by layer
    holders: int = 0

    @property
    def size(self) -> int:
        return self.stop - self.start

    def __del__(self) -> None:
        os.close(self.file)

    def map(self, buffers: Mapping[int, LayerBuffer], slot: int, stop: int) -> int:
        """Map the positions before ``stop`` over those of a slot. Return the number of mapped ranges."""
        count = 0
        for layer, offsets in self.offsets.items():
            for part, whole, offset in zip(
                buffers[layer].parts(slot, self.start, stop),
                buffers[layer].parts(slot, self.start, self.stop),
                offsets,
                strict=True,
            ):
                for head, address in enumerate(part.addresses):
                    map_pages(address, part.num_bytes, self.file, offset + head * whole.num_bytes)
                count += part.heads
        return count


@dataclass(slots=True)
class SharedPositions:
    """Shared prefixes of one sequence, from position 0 on without gaps."""

    # each with the position up to which it is the sequence's
    prefixes: list[tuple[SharedPrefix, int]] = field(default_factory=list)

    @property
    def stop(self) -> int:
        return self.prefixes[-1][1] if self.prefixes else 0


@dataclass(slots=True)
class SharingAccount:
    """Account of the positions that sequences share. A shared prefix counts in full while a sequence holds some of it,
    and the holders' positions in it don't count."""

    saved: int = 0  # positions of all sequences that don't count

    def hold(self, positions: SharedPositions, shared: SharedPrefix, stop: int) -> None:
        """Count a shared prefix up to ``stop`` as a part of a sequence."""
        self.saved += stop - shared.start - (0 if shared.holders else shared.size)
        shared.holders += 1
        positions.prefixes.append((shared, stop))

    def count_apart(self, positions: SharedPositions) -> None:
        """Count all of a sequence's positions as its own. Pages that it still shares become its own when written."""
        for shared, stop in positions.prefixes:
            shared.holders -= 1
            self.saved -= stop - shared.start - (0 if shared.holders else shared.size)
        positions.prefixes.clear()


def can_share() -> bool:
    """Whether this system can map the pages of one file in memory at several addresses."""
    return sys.platform == "linux" and hasattr(os, "memfd_create")


def shared_unit(buffers: Collection[LayerBuffer]) -> int:
    """Return the positions whose keys and values fill whole pages in every head of these layers; 0 if heads do not
    begin on pages."""
    unit = 1
    for buffer in buffers:
        for tensor, layout in zip((buffer.keys, buffer.values), buffer.layouts, strict=True):
            if tensor.stride(1) * tensor.itemsize % mmap.PAGESIZE:
                return 0
            num_bytes = tensor.stride(2) * tensor.itemsize
            unit = math.lcm(unit, layout.unit * mmap.PAGESIZE // math.gcd(mmap.PAGESIZE, num_bytes))
    return unit


def move_to_file(buffers: Mapping[int, LayerBuffer], slot: int, start: int, stop: int) -> SharedPrefix:
    """Copy a slot's positions to a new file in memory. The slot keeps its pages until the file is mapped over them."""
    shared = SharedPrefix(start, stop, os.memfd_create("swarm-kv", os.MFD_CLOEXEC), {})
    offset = 0
    for layer, buffer in buffers.items():
        begins = []
        for part in buffer.parts(slot, start, stop):
            begins.append(offset)
            for address in part.addresses:
                _write(shared.file, address, part.num_bytes, offset)
                offset += part.num_bytes
        shared.offsets[layer] = begins[0], begins[1]
    return shared


def _write(file: int, address: int, num_bytes: int, offset: int) -> None:
    view = memoryview((ctypes.c_char * num_bytes).from_address(address))
    done = 0
    while done < num_bytes:
        done += os.pwrite(file, view[done:], offset + done)
