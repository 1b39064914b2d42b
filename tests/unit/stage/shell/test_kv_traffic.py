"""When the compute thread stores or sends a part of a copy."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
import pytest

from swarm.clock import Clock
from swarm.errors import IllegalMove
from swarm.stage import actions as act
from swarm.stage.events import KvArrived, KvPartsTaken, KvStoreFailed, KvTurn
from swarm.stage.executor import KvData
from swarm.stage.shell.kv_receiver import ReceivedPart
from swarm.stage.shell.kv_traffic import KvTraffic
from swarm.wire.messages import NO_LINEAGE, Edge, KvPart, LayerRange, TensorSpec

LAYERS = LayerRange(0, 1)
EDGE = Edge("w1.1", "tcp://127.0.0.1:20000")
DATA = KvData(LAYERS, 0, 32, "float32", np.zeros(64, np.float32))
PART = KvPart(sequence=1, layers=LAYERS, block=0, tensor=TensorSpec("float32", (64,), 256, 1))
SEND = act.SendKvParts((act.SendKvPart(EDGE, 1, NO_LINEAGE, 1, LAYERS, 0, (5,) * 32, None),))


@dataclass
class Hand:
    """A clock, channels, a receiver and an executor, all moved by hand."""

    time: float = 100.0
    blocked: frozenset[str] = frozenset()
    accepts_again: bool = False
    sent: list[act.SendKvParts] = field(default_factory=list)
    parts: deque[ReceivedPart] = field(default_factory=deque)
    store_error: Exception | None = None

    def now(self) -> float:
        return self.time

    def flush(self) -> bool:
        accepts, self.accepts_again = self.accepts_again, False
        return accepts

    def send(self, action: act.SendKvParts) -> int:
        self.sent.append(action)
        self.time += 0.001
        return 256

    @property
    def has_parts(self) -> bool:
        return bool(self.parts)

    def take(self) -> ReceivedPart | None:
        return self.parts.popleft() if self.parts else None

    def kv_free_bytes(self) -> int:
        return 1000

    def write_kv(self, sequence: int, limit: int, data: KvData) -> None:
        if self.store_error is not None:
            raise self.store_error


@pytest.fixture
def hand() -> Hand:
    return Hand()


@pytest.fixture
def traffic(hand: Hand) -> KvTraffic:
    every: Any = hand
    clock: Clock = every
    return KvTraffic(every, every, every, clock)


class Busy:
    """A thread that never ends."""

    def __init__(self, hand: Hand) -> None:
        self.hand, self.grace_s = hand, -1.0

    def stop(self, grace_s: float) -> bool:
        self.grace_s = grace_s
        self.hand.time += grace_s
        return False


def test_two_busy_threads_get_one_grace_time(hand: Hand) -> None:
    receiver, spill = Busy(hand), Busy(hand)
    every: Any = hand
    parts: tuple[Any, Any] = receiver, spill
    assert not KvTraffic(every, parts[0], every, every, parts[1]).stop(5.0)
    assert (receiver.grace_s, spill.grace_s, hand.time) == (5.0, 0.0, 105.0)


def test_nothing_is_asked_while_there_is_nothing_to_send(traffic: KvTraffic) -> None:
    traffic.notice()
    assert traffic.next_event(is_idle=True, may_send_at=inf) is None
    assert traffic.wait_s(100.0, may_take=True, may_send_at=inf) == inf


def test_a_turn_in_vain_is_repeated_when_something_has_happened(hand: Hand, traffic: KvTraffic) -> None:
    """After a step, but not after every one of a fast model; at once after an order or when a target accepts again."""
    traffic.notice()
    assert traffic.next_event(is_idle=True, may_send_at=0.0) == KvTurn(is_idle=True)
    hand.time += 1.0
    assert traffic.next_event(is_idle=True, may_send_at=0.0) is None
    assert traffic.wait_s(hand.time, may_take=True, may_send_at=0.0) == inf
    traffic.notice()
    assert traffic.next_event(is_idle=False, may_send_at=0.0) == KvTurn(is_idle=False)
    traffic.notice()
    assert traffic.next_event(is_idle=False, may_send_at=0.0) is None
    assert 0 < traffic.wait_s(hand.time, may_take=True, may_send_at=0.0) < 0.1
    traffic.hurry()
    assert traffic.next_event(is_idle=True, may_send_at=0.0) == KvTurn(is_idle=True)
    hand.accepts_again, hand.blocked = True, frozenset({"w2.1"})
    assert traffic.next_event(is_idle=True, may_send_at=0.0) == KvTurn(is_idle=True, blocked=hand.blocked)


def test_a_part_is_followed_by_the_next_turn(hand: Hand, traffic: KvTraffic) -> None:
    """The answer has the time that the part took."""
    traffic.notice()
    assert traffic.next_event(is_idle=True, may_send_at=0.0) is not None
    (taken,) = traffic.perform(SEND)
    assert isinstance(taken, KvPartsTaken)
    assert (taken.to, taken.num_bytes) == ("w1.1", 256)
    assert taken.took_s == pytest.approx(0.001)
    assert hand.sent == [SEND]
    assert traffic.wait_s(hand.time, may_take=True, may_send_at=0.0) == 0.0


def test_arrived_parts_come_first_and_use_up_the_memory_that_was_measured(hand: Hand, traffic: KvTraffic) -> None:
    """The free memory is measured at ticks only, so each part is counted against it."""
    hand.parts.extend([ReceivedPart(PART, DATA, "key")] * 2)
    assert traffic.wait_s(hand.time, may_take=True, may_send_at=inf) == 0.0
    assert traffic.wait_s(hand.time, may_take=False, may_send_at=inf) == inf  # parked
    traffic.hurry()
    assert traffic.next_event(is_idle=False, may_send_at=0.0) == KvArrived(PART, DATA, 1000, "key")
    assert traffic.next_event(is_idle=False, may_send_at=0.0) == KvArrived(PART, DATA, 744, "key")
    assert traffic.next_event(is_idle=False, may_send_at=0.0) == KvTurn(is_idle=False)


@pytest.mark.parametrize("error", [IllegalMove("beyond the limit"), MemoryError("none left"), RuntimeError("device")])
def test_a_copy_that_cannot_be_stored_is_reported(hand: Hand, traffic: KvTraffic, error: Exception) -> None:
    """No step depends on a copy, so the worker goes on."""
    assert traffic.perform(act.StoreKv(1, 64, DATA)) == ()
    hand.store_error = error
    assert traffic.perform(act.StoreKv(1, 64, DATA)) == (KvStoreFailed(1, f"{type(error).__name__}: {error}"),)
