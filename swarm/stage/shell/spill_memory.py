"""Memory of chunks on their way to the disk and back. It is part of a worker's memory limit (``budget``)."""

from __future__ import annotations

from swarm.stage.actions import CHUNK
from swarm.stage.shell.spill_moves import UNIT_BYTES
from swarm.stage.shell.spill_thread import AHEAD_BYTES, MAX_CHUNKS
from swarm.wire.messages import LayerRange, Manifest


def reserve_bytes(manifest: Manifest, memory_bytes: int) -> int:
    """Return the memory to reserve, whichever layers a plan assigns to a worker whose memory is limited to this."""
    per_token, first, most = manifest.kv_bytes_per_token, 0, 0
    for stop in range(1, manifest.num_layers + 1):
        while first < stop and manifest.weight_bytes(LayerRange(first, stop)) > memory_bytes:
            first += 1
        most = max(most, sum(per_token[first:stop]))
    return buffer_bytes(CHUNK * most, CHUNK * max(per_token))


def buffer_bytes(chunk_bytes: int, layer_bytes: int) -> int:
    """Return the most bytes that are in memory at once. ``chunk_bytes``: size of a chunk in all layers of a stage.
    ``layer_bytes``: its size in the largest layer.

    Reading: chunks that were read or are being read, the one that the compute thread stores, and the content of one
    file with its copy. Writing: units that wait or that the compute thread reads, and the copy that is written.
    """
    ahead_bytes = (MAX_CHUNKS + 1) * min(chunk_bytes, AHEAD_BYTES)
    unit_bytes = min(chunk_bytes, max(UNIT_BYTES, layer_bytes))
    return max(ahead_bytes, 2 * chunk_bytes) + 2 * min(chunk_bytes, layer_bytes) + (MAX_CHUNKS + 1) * unit_bytes
