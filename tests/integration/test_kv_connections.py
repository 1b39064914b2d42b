"""Copies of keys and values between the shells of two workers, over real sockets."""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest

from swarm.clock import SystemClock
from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import OrderArrived
from swarm.stage.executor import KvData
from swarm.stage.shell import kv_receiver
from swarm.stage.shell.compute import ComputeThread
from swarm.stage.shell.connections import PeerConnector, StepListener
from swarm.stage.shell.kv_channels import MAX_PART_BYTES
from swarm.stage.shell.kv_receiver import KvReceiver
from swarm.stage.shell.vitals import Vitals
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire import tensors
from swarm.wire.codec import DATA
from swarm.wire.messages import (
    Activate,
    BlockKey,
    Edge,
    KvHeld,
    KvPart,
    KvSource,
    KvTarget,
    LayerRange,
    Open,
    Order,
    Prepare,
    Prepared,
    ReceiveKv,
    Row,
    SendKv,
    SequencePosition,
    Step,
    WorkerMessage,
)
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.transport.keys import AuthPolicy, KeyPair, new_pair

PATIENCE_S = 10.0
HOST = "127.0.0.1"
LAYERS = LayerRange(0, 6)
SEQUENCE, LIMIT = 7, 512


def until(holds: Callable[[], object]) -> None:
    """Look again and again; fail if it takes too long."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def listener(pair: KeyPair | None) -> StepListener:
    """A listener as at loopback, or with keys."""
    allowed: set[str] = set()
    lock = None if pair is None else AuthPolicy(pair, allowed.__contains__, reject_explicitly=False)
    pull = PullChannel(HOST, DATA.frame_limit_bytes, auth=lock)
    return StepListener(pull, pull.endpoint, HOST, _allowed=allowed)


@dataclass
class Worker:
    """A compute thread with a fake executor, and what it asks of the control loop."""

    name: str
    pair: KeyPair | None = None
    executor: FakeExecutor = field(default_factory=lambda: FakeExecutor(fake_manifest(6)))
    outward: queue.Queue[act.Action] = field(default_factory=queue.Queue)

    def __post_init__(self) -> None:
        steps, copies = listener(None), listener(self.pair)
        self.kv_endpoint, self.pull = copies.endpoint, steps.pull
        self.core = StageCore(StageSettings(self.name, f"{self.name}.1", 6))
        clock = SystemClock()
        self.thread = ComputeThread(
            PeerConnector(self.pair or new_pair(), HOST),
            listener=steps,
            core=self.core,
            executor=self.executor,
            vitals=Vitals(clock),
            clock=clock,
            on_control_action=self.outward.put,
            kv_listener=copies,
        )
        self.before = PushChannel(steps.endpoint)
        self.after = PullChannel(HOST, DATA.frame_limit_bytes)  # the broker's end
        self.thread.start()

    @property
    def edge(self) -> Edge:
        return Edge(f"{self.name}.1", self.kv_endpoint)

    def order(self, order: Order) -> None:
        self.thread.post(OrderArrived(order))

    def serve(self) -> None:
        """Become the only stage of a plan."""
        edge = Edge("broker", self.after.endpoint)
        self.order(Prepare(epoch=1, layers=LAYERS, standby=(), edge=edge, max_sequences=4))
        until(lambda: isinstance(self.report(), Prepared))
        self.order(Activate(epoch=1, first_step=1, live=()))
        until(lambda: self.core.active == 1)

    def report(self) -> WorkerMessage | None:
        """Return the next message to the broker, or None for anything else that is asked of the control loop."""
        action = self.outward.get(timeout=PATIENCE_S)
        return action.message if isinstance(action, act.SendToBroker) else None

    def compute(self, step: int, start: int, count: int) -> None:
        """Compute these positions, as a step does, and wait for the result."""
        opening = Open(SEQUENCE, SamplingParams(), 0, 1, LIMIT, (5,))
        message = Step(
            epoch=1,
            step=step,
            rows=(Row(SEQUENCE, start, count, False),),
            tokens=tuple(range(start, start + count)),
            open=(opening,) * (not start),
        )
        assert self.before.wait(PATIENCE_S)
        assert self.before.send(DATA.encode(message))
        assert self.after.wait(PATIENCE_S)
        assert self.after.receive() is not None

    def send_to(self, *targets: Worker, until: tuple[SequencePosition, ...] = (), layers: LayerRange = LAYERS) -> None:
        self.order(SendKv(epoch=1, targets=tuple(KvTarget(each.edge, layers, until=until) for each in targets)))

    def receive_from(self, sender: Worker, *, awaited: tuple[SequencePosition, ...] = ()) -> None:
        key = None if sender.pair is None else sender.pair.public
        self.order(ReceiveKv(epoch=1, sources=(KvSource(f"{sender.name}.1", LAYERS, key),), awaited=awaited))

    def copied(self, layer: int = 0) -> list[int]:
        """What is held of the sequence in a layer."""
        return list(self.executor.chains.get(SEQUENCE, {}).get(layer, ()))

    def counted(self, name: str) -> float:
        return self.thread.kv.values().get(name, 0.0)

    def close(self) -> None:
        self.before.close()
        assert self.thread.stop(PATIENCE_S)
        self.after.close()


@pytest.fixture(params=[False, True], ids=["token", "keys"])
def pairs(request: pytest.FixtureRequest) -> tuple[KeyPair | None, KeyPair | None]:
    return (new_pair(), new_pair()) if request.param else (None, None)


@pytest.fixture
def workers(pairs: tuple[KeyPair | None, KeyPair | None]) -> Iterator[tuple[Worker, Worker]]:
    """One that serves, and one that is to hold copies."""
    both = Worker("w0", pairs[0]), Worker("w1", pairs[1])
    both[0].serve()
    yield both
    for worker in both:
        worker.close()


def part_of(sender: Worker, start: int = 0, stop: int = 32) -> tuple[KvPart, memoryview]:
    """What the sender would send."""
    data = sender.executor.read_kv(SEQUENCE, LAYERS, start, stop)
    spec, packed = tensors.pack(data.numbers, data.dtype)
    opening = Open(SEQUENCE, SamplingParams(), 0, 1, LIMIT, ())
    tokens = tuple(range(start, stop))
    part = KvPart(
        epoch=1,
        sequence=SEQUENCE,
        layers=LAYERS,
        block=start // 32,
        tokens=tokens,
        open=None if start else opening,
        sender=f"{sender.name}.1",
        tensor=spec,
    )
    return part, packed


def test_finished_blocks_follow_the_steps(workers: tuple[Worker, Worker]) -> None:
    """They arrive without another order, bit for bit in all layers, and are reported; unfinished ones do not."""
    sender, holder = workers
    holder.receive_from(sender)
    sender.send_to(holder)
    sender.compute(1, 0, 70)
    until(lambda: len(holder.copied()) == 64)
    for step in range(2, 30):
        sender.compute(step, 68 + step, 1)
    until(lambda: len(holder.copied()) == 96)
    assert all(holder.copied(layer) == sender.copied(layer)[:96] for layer in range(6))

    def has_reported() -> bool:
        report = holder.report()
        return isinstance(report, KvHeld) and [kv.position for held in report.held for kv in held.kv] == [96]

    until(has_reported)
    assert holder.counted("kv_parts_refused") == holder.counted("kv_knockers_refused") == 0


def test_the_last_positions_are_sent_on_demand(workers: tuple[Worker, Worker]) -> None:
    """A change of plan awaits the exact positions; they come at once, with the report that they are complete."""
    sender, holder = workers
    sender.compute(1, 0, 77)
    awaited = (SequencePosition(SEQUENCE, 77),)
    holder.receive_from(sender, awaited=awaited)
    sender.send_to(holder, until=awaited)
    until(lambda: isinstance(report := holder.report(), KvHeld) and report.is_complete)
    assert holder.copied(5) == sender.copied(5)


def test_a_long_part_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """No message has more than its share of bytes, of whole blocks each, and together they are the part."""
    sender, holder = Worker("w0"), Worker("w1")
    sender.serve()
    sender.compute(1, 0, 300)
    monkeypatch.setattr("swarm.stage.shell.kv_channels.MAX_PART_BYTES", 3 * 32 * 6)  # a byte per position and layer
    assert MAX_PART_BYTES == 4 << 20
    holder.receive_from(sender)
    sender.send_to(holder)
    until(lambda: len(holder.copied()) == 288)
    assert holder.counted("kv_parts_received") >= 3
    for worker in (sender, holder):
        worker.close()


def test_what_is_no_part_is_dropped(workers: tuple[Worker, Worker]) -> None:
    """Noise, other messages, flipped bits, missing checksums and foreign sizes are counted; the thread lives on."""
    sender, holder = workers
    sender.compute(1, 0, 64)
    holder.receive_from(sender)
    part, data = part_of(sender)
    flipped = bytearray(data)
    flipped[100] ^= 1
    unchecked = msgspec.structs.replace(part, tensor=msgspec.structs.replace(part.tensor, checksum=0))
    other_dtype = tensors.pack(np.frombuffer(data, np.uint16), "bfloat16")
    bad = [
        [b"noise"],
        DATA.encode(Step(epoch=1, step=1, rows=(), tokens=())),
        DATA.encode(part, flipped),
        DATA.encode(part, data[:-8]),
        DATA.encode(unchecked, data),
        DATA.encode(msgspec.structs.replace(part, tokens=part.tokens[:-1]), data),
        DATA.encode(msgspec.structs.replace(part, layers=LayerRange(1, 7)), data),
        DATA.encode(msgspec.structs.replace(part, tensor=other_dtype[0]), other_dtype[1]),
    ]
    push = PushChannel(holder.kv_endpoint, pair=sender.pair)
    for number, frames in enumerate(bad):
        assert push.wait(PATIENCE_S)
        assert push.send(frames)
        until(lambda number=number: holder.counted("kv_parts_refused") == number + 1)
    assert not holder.copied()
    assert push.send(DATA.encode(part, data))
    until(lambda: len(holder.copied()) == 32)
    push.close()


def test_only_named_keys_are_accepted() -> None:
    """A sender that no order names, or whose key was revoked, has no connection."""
    sender, other, holder = (Worker(name, new_pair()) for name in ("w0", "w2", "w1"))
    sender.serve()
    sender.compute(1, 0, 40)
    holder.receive_from(other)
    sender.send_to(holder)
    until(lambda: holder.counted("kv_knockers_refused") > 0)
    assert not holder.copied()
    holder.receive_from(sender)
    until(lambda: len(holder.copied()) == 32)
    assert sender.pair is not None
    holder.order(BlockKey(epoch=1, key=sender.pair.public))
    refused = holder.counted("kv_knockers_refused")
    until(lambda: holder.counted("kv_knockers_refused") > refused)
    sender.compute(2, 40, 40)
    assert len(holder.copied()) == 32
    for worker in (sender, other, holder):
        worker.close()


def test_a_full_receiver_blocks_its_sender_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the holder's compute thread is busy, parts wait in bounded numbers, and steps go on; then all arrive."""
    sender, holder = Worker("w0"), Worker("w1")
    monkeypatch.setattr("swarm.stage.shell.kv_channels._QUEUE", 1)
    sender.serve()
    busy, free = threading.Event(), threading.Event()
    write = FakeExecutor.write_kv

    def wait_first(executor: FakeExecutor, sequence: int, limit: int, data: KvData) -> None:
        busy.set()
        assert free.wait(PATIENCE_S)
        write(executor, sequence, limit, data)

    monkeypatch.setattr(FakeExecutor, "write_kv", wait_first)
    holder.receive_from(sender)
    sender.send_to(holder)
    for step in range(1, 60):
        sender.compute(step, (step - 1) * 8, 8)
    assert busy.wait(PATIENCE_S)
    assert not holder.copied()
    free.set()
    until(lambda: len(holder.copied()) == 59 * 8 // 32 * 32)
    for worker in (sender, holder):
        worker.close()


@pytest.mark.parametrize("limited", ["parts", "bytes"])
def test_few_parts_wait_for_the_compute_thread(
    limited: str, workers: tuple[Worker, Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is not taken is not read: it stays with the kernel, and with the sender."""
    sender, arrived = workers[0], threading.Event()
    sender.compute(1, 0, 32)
    most, num_bytes = 4, len(part_of(sender)[1])
    monkeypatch.setattr(kv_receiver, "MAX_PARTS", most if limited == "parts" else kv_receiver.MAX_PARTS)
    monkeypatch.setattr(
        kv_receiver, "MAX_BYTES", (most - 1) * num_bytes + 1 if limited == "bytes" else kv_receiver.MAX_BYTES
    )
    copies, failed = listener(None), queue.Queue[BaseException]()
    receiver = KvReceiver(copies, SystemClock(), fits=lambda _: True, on_part=arrived.set, on_crash=failed.put)
    receiver.start()
    push, num_sent = PushChannel(copies.endpoint), 0
    assert push.wait(PATIENCE_S)
    while num_sent < 20:
        num_sent += push.send(DATA.encode(*part_of(sender)))
    until(lambda: receiver.num_parts == most)
    arrived.clear()
    assert not arrived.wait(0.2)
    for number in range(20):
        until(lambda: receiver.has_parts)
        assert receiver.num_parts <= number + most
        assert receiver.take() is not None
    assert receiver.take() is None
    assert receiver.num_parts == 20
    push.close()
    assert receiver.stop(PATIENCE_S)
    assert failed.empty()


def test_a_dead_target_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps go on, without a busy loop, whether the target never lived or dies; another one gets everything."""
    sender, holder = Worker("w0"), Worker("w1")
    sender.serve()
    with socket.socket() as place:  # where nobody listens
        place.bind((HOST, 0))
        dead = KvTarget(Edge("w9.1", f"tcp://word@{HOST}:{place.getsockname()[1]}"), LAYERS)
        sender.order(SendKv(epoch=1, targets=(dead,)))
        sender.compute(1, 0, 100)
        turns, wait = [], sender.pull.wait
        monkeypatch.setattr(sender.pull, "wait", lambda *args, **options: (turns.append(1), wait(*args, **options))[1])
        time.sleep(0.5)
        assert len(turns) < 50
    holder.receive_from(sender)
    sender.send_to(holder)
    until(lambda: len(holder.copied()) == 96)
    holder.close()
    sender.compute(2, 100, 100)
    survivor = Worker("w2")
    survivor.receive_from(sender)
    sender.send_to(survivor)
    until(lambda: len(survivor.copied()) == 192)
    assert survivor.copied(3) == sender.copied(3)[:192]
    for worker in (sender, survivor):
        worker.close()


def test_the_threads_end_with_their_worker() -> None:
    """The receiver's thread, and those of the channels."""
    before = threading.active_count()
    sender, holder = Worker("w0"), Worker("w1")
    sender.serve()
    holder.receive_from(sender)
    sender.send_to(holder)
    sender.compute(1, 0, 40)
    until(holder.copied)
    sender.close()
    holder.close()
    until(lambda: threading.active_count() <= before)


def test_a_bug_in_the_receiver_ends_the_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the code for a restart: a worker that silently takes no copies would deceive the broker."""
    monkeypatch.setattr(FakeExecutor, "fits_kv", lambda _, data: 1 // 0)
    sender, holder = Worker("w0"), Worker("w1")
    sender.serve()
    sender.compute(1, 0, 40)
    holder.receive_from(sender)
    sender.send_to(holder)
    until(lambda: isinstance(holder.thread.failure, ZeroDivisionError))
    until(lambda: not holder.thread.is_alive)
    for worker in (sender, holder):
        worker.close()
