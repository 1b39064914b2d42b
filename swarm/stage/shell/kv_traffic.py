"""The compute thread's share of moving keys and values: when it stores an arrived part or what was read from disk, and
when it offers the core to send or spill some. All this comes after everything else.

Between two steps the core may use a turn within its budget; when no step waits, it may use one after the other. A turn
in which the core sends nothing is not repeated until something has happened: a step, an order, a target that accepts
again, or a tick.
"""

from __future__ import annotations

from math import inf
from typing import Final

from swarm.clock import Clock
from swarm.log import get_logger
from swarm.stage import actions as act
from swarm.stage.events import (
    ChunkLost,
    ChunkSpilled,
    KvArrived,
    KvPartsTaken,
    KvStoreFailed,
    KvTurn,
    SpilledRead,
    SpilledStored,
)
from swarm.stage.executor import Executor
from swarm.stage.shell.kv_channels import MOVE_ERRORS, KvChannels
from swarm.stage.shell.kv_receiver import KvReceiver
from swarm.stage.shell.spill_thread import SpillThread
from swarm.wire.messages import BLOCK
from swarm.wire.push import PushChannel

# Between two turns in which the core sends nothing. Steps of small models take less than a millisecond, and asking
# costs some of that.
_EVERY_S: Final = 0.02

log = get_logger(__name__)

DiskAction = act.SpillChunk | act.ReadSpilled | act.StoreSpilled | act.StopReadingSpilled
KvAction = act.SendKvParts | act.StoreKv | act.ConnectKvTargets | act.AllowKvSenders | DiskAction
Answer = KvPartsTaken | KvStoreFailed | ChunkSpilled | SpilledRead | SpilledStored


class KvTraffic:
    """Copies that leave and arrive, and what goes through the disk. ``receiver``: None for a worker that takes no
    copies. ``spill``: None for one that has no space on disk."""

    def __init__(
        self,
        channels: KvChannels,
        receiver: KvReceiver | None,
        executor: Executor,
        clock: Clock,
        spill: SpillThread | None = None,
    ) -> None:
        self._spill = spill
        self._channels = channels
        self._receiver = receiver
        self._executor = executor
        self._clock = clock
        self._is_due = False  # whether a turn may lead to a part
        self._next_turn_at = -inf
        # memory that copies may still take: as last measured, less what has arrived since
        self.free_bytes = executor.kv_free_bytes()

    def start(self) -> None:
        for thread in (self._receiver, self._spill):
            if thread is not None:
                thread.start()

    def stop(self, grace_s: float) -> bool:
        """End the threads. Returns False if one is still busy after the grace time."""
        ended = [thread.stop(grace_s) for thread in (self._receiver, self._spill) if thread is not None]
        return all(ended)

    def close_channels(self) -> None:
        self._channels.close()

    def blocked_channels(self) -> tuple[PushChannel, ...]:
        return self._channels.blocked_channels()

    def wait_s(self, now: float, *, may_take: bool, may_send_at: float) -> float:
        """Return after what time there is something to do; infinite if nothing has happened. ``may_take``: whether
        arrived parts are taken now. ``may_send_at``: when the core may have something to send."""
        if may_take and self._receiver is not None and self._receiver.has_parts:
            return 0.0
        if may_take and self._spill is not None and self._spill.has_results:
            return 0.0
        return max(0.0, self._next_turn_at - now, may_send_at - now) if self._is_due else inf

    def notice(self) -> None:
        """Record that something has happened, so that a turn may lead to a part."""
        self._is_due = True

    def hurry(self) -> None:
        """Record that an order arrived, which the next turn is to follow at once."""
        self._is_due, self._next_turn_at = True, -inf

    def next_event(self, *, is_idle: bool, may_send_at: float) -> KvArrived | SpilledRead | ChunkLost | KvTurn | None:
        """Return an arrived part, a chunk from disk or a turn for the core, if there is one now. ``may_send_at``: see
        ``wait_s``.

        ``is_idle``: no step is waiting. Called after every step, so it is quick if there is nothing.
        """
        if self._channels.flush():
            self.hurry()
        if self._receiver is not None and (received := self._receiver.take()) is not None:
            free_bytes = self.free_bytes
            self.free_bytes -= received.data.numbers.nbytes
            return KvArrived(received.part, received.data, free_bytes, received.sender)
        if self._spill is not None and (read := self._spill.take()) is not None:
            return read
        if not self._is_due or (now := self._clock.now()) < max(self._next_turn_at, may_send_at):
            return None
        self._is_due = not is_idle
        self._next_turn_at = now + _EVERY_S
        may_spill = self._spill is not None and self._spill.accepts_chunk
        return KvTurn(is_idle, self._channels.blocked, may_spill)

    def perform(self, action: KvAction) -> tuple[Answer, ...]:
        """Carry out an action of the core. Return the answer to ``SendKvParts`` (the next turn may follow at once), and
        that to a ``StoreKv`` that failed: no step depends on a copy."""
        match action:
            case act.SendKvParts():
                began_at = self._clock.now()
                num_bytes = self._channels.send(action)
                self.hurry()
                return (KvPartsTaken(action.to.to, num_bytes, self._clock.now() - began_at),)
            case act.StoreKv(sequence):
                try:
                    act.apply_to_executor(self._executor, action)
                except MOVE_ERRORS as error:
                    return (KvStoreFailed(sequence, f"{type(error).__name__}: {error}"),)
            case act.ConnectKvTargets(edges):
                self._channels.connect(edges)
                self.hurry()
            case act.AllowKvSenders(keys):
                if self._receiver is not None:
                    self._receiver.set_allowed(keys)
            case _:
                return self._perform_on_disk(action)
        return ()

    def _perform_on_disk(self, action: DiskAction) -> tuple[Answer, ...]:
        match action:
            case act.SpillChunk():
                began_at = self._clock.now()
                is_taken = self._spill_chunk(action)
                self.hurry()
                return (ChunkSpilled(action.sequence, self._clock.now() - began_at, is_taken),)
            case act.ReadSpilled(ticket, sequence):
                if self._spill is None:
                    return (SpilledRead(ticket, sequence, (), is_last=True),)
                self._spill.read(action)
            case act.StoreSpilled(ticket, sequence, limit, blocks):
                try:
                    for data in blocks:
                        self._executor.write_kv(sequence, limit, data)
                except MOVE_ERRORS as error:
                    return (SpilledStored(ticket, sequence, f"{type(error).__name__}: {error}"),)
                return (SpilledStored(ticket, sequence),)
            case act.StopReadingSpilled(ticket):
                if self._spill is not None:
                    self._spill.stop_reading(ticket)
        return ()

    def _spill_chunk(self, action: act.SpillChunk) -> bool:
        """Read a chunk from the device, and pass it to the disk's thread."""
        if self._spill is None:
            return False
        starts = range(action.start, action.stop, BLOCK)
        try:
            blocks = [self._executor.read_kv(action.sequence, action.layers, at, at + BLOCK) for at in starts]
        except MOVE_ERRORS as error:
            log.warning("kv_chunk_unreadable", sequence=action.sequence, reason=str(error))
            return False
        self._spill.write(action, blocks)
        return True

    def disconnect_key(self, key: str) -> None:
        self._channels.disconnect_key(key)

    def values(self) -> dict[str, float]:
        """Return counters for ``swarmctl stats``. May be called from any thread."""
        values = {} if self._spill is None else self._spill.values()
        if self._receiver is None:
            return values
        receiver = self._receiver
        return values | {
            "kv_parts_received": receiver.num_parts,
            "kv_bytes_received": receiver.num_bytes,
            "kv_parts_refused": receiver.num_refused,
            "kv_knockers_refused": receiver.num_peers_refused,
        }
