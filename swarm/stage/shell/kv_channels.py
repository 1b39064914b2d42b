"""Connections on which copies of keys and values leave, one for each worker that is to hold them.

A part that a connection does not accept at once waits here, one per target; the core is asked for no further part for
this target meanwhile. A dead target stays blocked until the broker names other targets. What a lost connection had
accepted is lost without a notice: the receiver's reports to the broker show it.

All methods belong to the compute thread. Encryption and slow writes belong to the channels' own threads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final

from swarm.errors import ConfigError, IllegalMove
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.executor import Executor
from swarm.stage.shell.connections import PeerConnector, edge_key
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import BLOCK, Edge, KvPart, LayerRange
from swarm.wire.push import PushChannel

# Bytes of one message, unless a single block or, with states, a single layer is larger. The receiver's compute thread
# stores a message at once, so its size bounds how long a step may wait there.
MAX_PART_BYTES: Final = 4 << 20
_LINGER_S: Final = 0.05  # accepted messages may still leave; closing without a linger would wait for the thread
_QUEUE: Final = 2  # actions' messages that a connection accepts in addition to those that it is writing
# errors of a device while keys and values are read or written; torch's own are RuntimeErrors
MOVE_ERRORS: Final = (IllegalMove, RuntimeError, MemoryError, ValueError, TypeError)

log = get_logger(__name__)

_Frames = Sequence[tensors.Bytes]


@dataclass(slots=True)
class _Target:
    edge: Edge
    channel: PushChannel
    unsent: list[_Frames] = field(default_factory=list)  # messages of one action, not accepted yet

    @property
    def is_blocked(self) -> bool:
        return bool(self.unsent) or not self.channel.is_ready

    def flush(self) -> bool:
        """Send the waiting messages if the channel accepts them. Return whether there were any and it did."""
        if not self.unsent:
            return False
        if self.channel.send_all(self.unsent):
            self.unsent = []
        return not self.unsent


class KvChannels:
    """Connections to the listeners of all targets. ``incarnation``: this worker's."""

    def __init__(self, connector: PeerConnector, executor: Executor, incarnation: str) -> None:
        self._connector = connector
        self._executor = executor
        self._incarnation = incarnation
        self._targets: dict[str, _Target] = {}  # by incarnation

    @property
    def has_targets(self) -> bool:
        return bool(self._targets)

    @property
    def blocked(self) -> frozenset[str]:
        """Incarnations of the targets that accept nothing now."""
        return frozenset(name for name, target in self._targets.items() if target.is_blocked)

    def blocked_channels(self) -> tuple[PushChannel, ...]:
        """Return the channels with a message that waits; a wait for them ends when they accept one."""
        return tuple(target.channel for target in self._targets.values() if target.unsent)

    def connect(self, edges: Sequence[Edge]) -> None:
        """Have connections to these listeners, and to no others."""
        for name in [name for name, target in self._targets.items() if target.edge not in edges]:
            self._targets.pop(name).channel.close(_LINGER_S)
        for edge in edges:
            if edge.to not in self._targets:
                try:
                    channel = self._connector.open(edge.endpoint, queue=_QUEUE)
                except ConfigError as error:
                    log.warning("kv_target_unusable", to=edge.to, reason=str(error))
                    continue
                self._targets[edge.to] = _Target(edge, channel)

    def disconnect_key(self, key: str) -> None:
        """Send nothing more to the peer whose listener has this key."""
        for name in [name for name, target in self._targets.items() if edge_key(target.edge) == key]:
            self._targets.pop(name).channel.close(_LINGER_S)

    def send(self, action: act.SendKvParts) -> int:
        """Read and send positions. Return their bytes; 0 if the target is gone or still blocked, or none can be read.

        A part that can't be read is left out. Its copy falls behind, so the broker orders the sequence again.
        """
        target = self._targets.get(action.to.to)
        if target is None or target.unsent:
            return 0
        num_bytes = 0
        for part in action.parts:
            try:
                messages = [(len(data), DATA.encode(message, data)) for message, data in self._read(part)]
            except MOVE_ERRORS as error:
                log.warning("kv_part_unreadable", sequence=part.sequence, reason=str(error))
                continue
            num_bytes += sum(size for size, _ in messages) or 1  # layers without attention and states hold nothing
            target.unsent.extend(frames for _, frames in messages)
        target.flush()
        return num_bytes

    def _read(self, action: act.SendKvPart) -> Iterator[tuple[KvPart, memoryview]]:
        """Yield a part's messages, each of limited size: of whole blocks (but for the last one), or of a few layers
        where layers have states, which only the part's end has."""
        start, stop = action.start, action.start + len(action.tokens)
        for layers, begin, end in self._pieces(action.layers, start, stop):
            data = self._executor.read_kv(action.sequence, layers, begin, end)
            spec, packed = tensors.pack(data.numbers, data.dtype)
            message = KvPart(
                epoch=action.epoch,
                lineage=action.lineage,
                sequence=action.sequence,
                layers=layers,
                block=begin // BLOCK,
                tokens=action.tokens[begin - start : end - start],
                open=action.open if begin == start else None,
                sender=self._incarnation,
                tensor=spec,
            )
            yield message, packed

    def _pieces(self, layers: LayerRange, start: int, stop: int) -> Iterator[tuple[LayerRange, int, int]]:
        """Yield the layers and positions of each message of a part."""
        manifest = self._executor.manifest
        if not manifest.state_stride:
            block_bytes = BLOCK * sum(manifest.kv_bytes_per_token[layers.first : layers.stop])
            positions = BLOCK * max(1, MAX_PART_BYTES // max(1, block_bytes))
            for begin in range(start, stop, positions):
                yield layers, begin, min(stop, begin + positions)
            return
        first, num_bytes = layers.first, 0
        for layer in range(layers.first, layers.stop):
            more = manifest.kv_bytes(layer) * (stop - start) + manifest.state_bytes[layer]
            if first < layer and more and num_bytes + more > MAX_PART_BYTES:  # some layers hold nothing
                yield LayerRange(first, layer), start, stop
                first, num_bytes = layer, 0
            num_bytes += more
        yield LayerRange(first, layers.stop), start, stop

    def flush(self) -> bool:
        """Send what waits as far as possible. Return whether a target accepts again what it did not before."""
        accepts = False
        for target in self._targets.values():
            accepts = target.flush() or accepts
        return accepts

    def close(self) -> None:
        for target in self._targets.values():
            target.channel.close()
        self._targets.clear()
