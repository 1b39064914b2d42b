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
from swarm.stage.shell.spill_moves import SpillMoves
from swarm.stage.shell.spill_thread import SpillThread
from swarm.wire.push import PushChannel

# Between two turns in which the core sends nothing. Steps of small models take less than a millisecond, and asking
# costs some of that.
_EVERY_S: Final = 0.02

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
        self._disk = None if spill is None else SpillMoves(executor, spill, clock)
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
        """End the threads. Returns False if one is still busy after the grace time, which is for both together."""
        until = self._clock.now() + grace_s
        threads = [thread for thread in (self._receiver, self._spill) if thread is not None]
        ended = [thread.stop(max(0.0, until - self._clock.now())) for thread in threads]
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
        if may_take and self._disk is not None and self._disk.has_work:
            return 0.0
        return max(0.0, self._next_turn_at - now, may_send_at - now) if self._is_due else inf

    def notice(self) -> None:
        """Record that something has happened, so that a turn may lead to a part."""
        self._is_due = True

    def hurry(self) -> None:
        """Record that an order arrived, which the next turn is to follow at once."""
        self._is_due, self._next_turn_at = True, -inf

    def next_event(
        self, *, is_idle: bool, may_send_at: float
    ) -> KvArrived | SpilledRead | ChunkLost | SpilledStored | KvTurn | None:
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
        if self._disk is not None and self._disk.has_work:
            return self._disk.next_event()
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
            case act.SpillChunk(sequence):
                self.hurry()
                if self._disk is None:
                    return (ChunkSpilled(sequence, 0.0, is_taken=False),)
                return (self._disk.spill(action),)
            case act.ReadSpilled(ticket, sequence):
                if self._disk is None:
                    return (SpilledRead(ticket, sequence, (), is_last=True),)
                self._disk.thread.read(action)
            case act.StoreSpilled(ticket, sequence):
                if self._disk is None:
                    return (SpilledStored(ticket, sequence, "this worker has no space on disk"),)
                self._disk.store(action)
            case act.StopReadingSpilled(ticket):
                if self._disk is not None:
                    self._disk.stop(ticket)
        return ()

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
