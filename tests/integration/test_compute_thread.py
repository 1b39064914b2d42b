"""The worker's compute thread over real sockets: what it sends, what it keeps, and how it ends."""

from __future__ import annotations

import itertools
import queue
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import pytest
import torch
import zmq

from swarm.broker.members.health import ExpectedTimes, HealthLimits, HeartbeatHistory, Verdict, judge
from swarm.clock import SystemClock
from swarm.errors import IllegalMove, KvFull
from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import OrderArrived
from swarm.stage.executor import Batch, Capacity, ForwardResult, Progress
from swarm.stage.shell.compute import ComputeThread
from swarm.stage.shell.connections import PeerConnector, StepListener
from swarm.stage.shell.heartbeat import HeartbeatThread
from swarm.stage.shell.vitals import Vitals
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire.codec import DATA
from swarm.wire.messages import (
    Activate,
    Activated,
    BlockKey,
    DataPathError,
    Edge,
    Fence,
    LayerRange,
    LoadProgress,
    Open,
    Order,
    Prepare,
    Prepared,
    Refused,
    Row,
    Step,
    Welcome,
)
from swarm.wire.pull import PullChannel
from swarm.wire.push import PushChannel
from swarm.wire.transport.keys import address_and_key, new_pair, with_key
from tests import fake_device

PATIENCE_S = 10.0
LAYERS = LayerRange(0, 3)


@dataclass(slots=True)
class BrittleExecutor(FakeExecutor):
    """Fails to load, or to fork and to compute, as it is told."""

    load_error: BaseException | None = None
    refuses: str = ""
    compute_error: Exception | None = None
    waits_for_device: bool = False

    def fork(self, sequence: int, source: int, position: int, limit: int, *, may_share: bool = True) -> None:
        if self.refuses == "fork":
            raise KvFull("no mapping")
        FakeExecutor.fork(self, sequence, source, position, limit, may_share=may_share)

    def activate(self, layers: LayerRange, kept: tuple[LayerRange, ...] = (), share_unit: int = 0) -> None:
        FakeExecutor.activate(self, layers, kept, share_unit)
        if self.refuses == "activate":
            raise KvFull("no mapping")

    def forward(self, batch: Batch, fenced: Callable[[], bool], progressed: Callable[[], None]) -> ForwardResult:
        if self.refuses == "forward":
            raise KvFull("no mapping")
        if self.compute_error is not None:
            raise self.compute_error
        if self.waits_for_device:
            torch.ones(1, device=fake_device.install()).cpu()
        return FakeExecutor.forward(self, batch, fenced, progressed)

    def prepare(
        self, layers: LayerRange, standby: tuple[LayerRange, ...], max_sequences: int, progress: Progress
    ) -> Capacity:
        if self.load_error is not None:
            raise self.load_error
        return FakeExecutor.prepare(self, layers, standby, max_sequences, progress)


def until(holds: Callable[[], bool]) -> None:
    """Look again and again; fail if it takes too long."""
    give_up_at = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


def welcome(lease_s: float) -> Welcome:
    return Welcome(beat_endpoint="", data_endpoint="", beat_interval_s=1.0, lease_s=lease_s, wants=())


def held(port: int) -> socket.socket:
    """A port that is taken though nobody listens there: other tests run beside this one."""
    place = socket.socket()

    def binds() -> bool:
        try:
            place.bind(("127.0.0.1", port))
        except OSError:
            return False
        return True

    until(binds)
    return place


@dataclass
class Stage:
    """A compute thread, the edge that it receives from, and what it asks of the control loop."""

    context: zmq.Context[zmq.Socket[bytes]]
    executor: BrittleExecutor = field(default_factory=lambda: BrittleExecutor(fake_manifest(6)))
    outward: queue.Queue[act.Action] = field(default_factory=queue.Queue)
    pull: PullChannel = field(init=False)

    def __post_init__(self) -> None:
        self.pull = pull = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
        self.core = StageCore(StageSettings("w0", "w0.1", 6))
        clock = SystemClock()
        self.vitals = Vitals(clock)
        self.thread = ComputeThread(
            PeerConnector(new_pair(), "127.0.0.1"),
            listener=StepListener(pull, pull.endpoint, "127.0.0.1"),
            core=self.core,
            executor=self.executor,
            vitals=self.vitals,
            clock=clock,
            on_control_action=self.outward.put,
        )
        self.before = PushChannel(pull.endpoint)
        self.thread.start()

    def order(self, order: Order) -> None:
        self.thread.post(OrderArrived(order))

    def prepare(self, next_stage: str, epoch: int = 1) -> None:
        edge = Edge("w1.1", next_stage)
        self.order(Prepare(epoch=epoch, layers=LAYERS, standby=(), edge=edge, max_sequences=4))

    def says(self) -> act.Action:
        """The next thing it asks for, progress of loading aside."""
        while True:
            action = self.outward.get(timeout=PATIENCE_S)
            if not (isinstance(action, act.SendToBroker) and isinstance(action.message, LoadProgress)):
                return action

    def close(self) -> None:
        self.before.close()
        assert self.thread.stop(PATIENCE_S)


@pytest.fixture
def stage(context: zmq.Context[zmq.Socket[bytes]]) -> Iterator[Stage]:
    stage = Stage(context)
    yield stage
    stage.close()


def test_a_parked_worker_sends_nothing(context: zmq.Context[zmq.Socket[bytes]], stage: Stage) -> None:
    """A step that was computed but could not be sent stays here while the worker is parked, as it hears
    nothing from the broker, though the next stage would take it; with the broker's next word it goes, once."""
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    endpoint = taker.endpoint
    port = int(endpoint.rpartition(":")[2])
    taker.close()  # the next stage is away
    place = held(port)  # and nobody else may take its place
    stage.prepare(endpoint)
    assert isinstance(stage.says(), act.SendToBroker)
    stage.order(Fence(epoch=1))
    stage.order(Activate(epoch=1, first_step=1, live=()))
    assert isinstance(stage.says(), act.SendToBroker)
    step = Step(
        epoch=1,
        step=1,
        rows=(Row(7, 0, 1, False),),
        tokens=(5,),
        open=(Open(7, SamplingParams(), 0, 1, 8, (5,)),),
    )
    assert stage.before.wait(PATIENCE_S)
    assert stage.before.send(DATA.encode(step))
    until(lambda: stage.vitals.condition == "blocked")
    stage.order(welcome(lease_s=0.1))
    until(lambda: stage.vitals.condition == "parked")
    place.close()
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes, range(port, port + 1), key=address_and_key(endpoint)[1])
    assert not taker.wait(0.5)  # several times what a connection takes
    stage.order(welcome(lease_s=PATIENCE_S))
    assert taker.wait(PATIENCE_S)
    frames = taker.receive()
    assert frames is not None
    sent, _ = DATA.decode(frames)
    assert isinstance(sent, Step)
    assert sent.rows == step.rows
    assert not taker.wait(0.2)
    taker.close()


def test_what_waits_for_who_is_out_for_good_is_not_sent(stage: Stage) -> None:
    """The next stage is away, and its key is revoked meanwhile; another one's being revoked changes nothing."""
    gone, other = new_pair().public, new_pair().public
    with socket.socket() as place:  # where nobody listens
        place.bind(("127.0.0.1", 0))
        stage.prepare(with_key(f"tcp://127.0.0.1:{place.getsockname()[1]}", gone.encode()))
        assert isinstance(stage.says(), act.SendToBroker)
        stage.order(Activate(epoch=1, first_step=1, live=()))
        assert isinstance(stage.says(), act.SendToBroker)
        opening = (Open(7, SamplingParams(), 0, 1, 8, (5,)),)
        step = Step(epoch=1, step=1, rows=(Row(7, 0, 1, False),), tokens=(5,), open=opening)
        assert stage.before.wait(PATIENCE_S)
        assert stage.before.send(DATA.encode(step))
        until(lambda: stage.vitals.condition == "blocked")
        stage.order(BlockKey(epoch=1, key=other))
        until(lambda: other in stage.core.allowed.blocked)
        assert stage.vitals.condition == "blocked"
        stage.order(BlockKey(epoch=1, key=gone))
        until(lambda: stage.vitals.condition == "idle")


def test_a_blocked_worker_waits_though_a_step_has_come(
    context: zmq.Context[zmq.Socket[bytes]], stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can't take the step before it is rid of the one that it has: until then it looks a few times a second, and not
    without a pause. Then both go on, in order."""
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    endpoint = taker.endpoint
    port = int(endpoint.rpartition(":")[2])
    taker.close()  # the next stage is away
    place = held(port)
    stage.prepare(endpoint)
    assert isinstance(stage.says(), act.SendToBroker)
    stage.order(Fence(epoch=1))
    stage.order(Activate(epoch=1, first_step=1, live=()))
    assert isinstance(stage.says(), act.SendToBroker)
    opening = (Open(7, SamplingParams(), 0, 1, 8, (5,)),)
    steps = [
        Step(epoch=1, step=number, rows=(Row(7, number - 1, 1, False),), tokens=(5,), open=opening * (number == 1))
        for number in (1, 2)
    ]
    assert stage.before.wait(PATIENCE_S)
    for step in steps:
        assert stage.before.send(DATA.encode(step))
    until(lambda: stage.vitals.condition == "blocked")
    turns, wait = itertools.count(), stage.pull.wait
    monkeypatch.setattr(stage.pull, "wait", lambda *args, **options: (next(turns), wait(*args, **options)))
    time.sleep(0.5)
    assert next(turns) < 50
    place.close()
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes, range(port, port + 1), key=address_and_key(endpoint)[1])
    found = []
    for _ in steps:
        assert taker.wait(PATIENCE_S)
        frames = taker.receive()
        assert frames is not None
        found.append(DATA.decode(frames)[0])
    assert [step.step for step in found if isinstance(step, Step)] == [1, 2]
    taker.close()


@pytest.mark.parametrize("error", [OSError("the disk is gone"), RuntimeError("no memory on the device")])
def test_what_cannot_be_loaded_is_refused(stage: Stage, error: Exception) -> None:
    """The broker is told why; the worker lives, and loads the next plan."""
    stage.executor.load_error = error
    stage.prepare("tcp://127.0.0.1:20000")
    told = stage.says()
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, Refused)
    assert told.message.reason == str(error)
    stage.executor.load_error = None
    stage.prepare("tcp://127.0.0.1:20000", epoch=2)
    told = stage.says()
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, Prepared)


@pytest.mark.parametrize("error", [KeyError("layers.3"), ValueError("shape"), TypeError("x"), IllegalMove("twice")])
def test_a_bug_in_the_loader_ends_the_worker(stage: Stage, error: Exception) -> None:
    """Anything unexpected ends the process with a code that a supervisor starts again; never a load without an end."""
    stage.executor.load_error = error
    stage.prepare("tcp://127.0.0.1:20000")
    assert stage.says() == act.Exit(1, f"{type(error).__name__}: {error}")
    assert stage.thread.failure is error
    until(lambda: not stage.thread.is_alive)


@pytest.mark.parametrize("refuses", ["fork", "forward"])
def test_memory_that_the_broker_does_not_count_ends_the_epoch_only(stage: Stage, refuses: str) -> None:
    """The thread lives, computes nothing of the step, and blames no row of it."""
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    stage.prepare(taker.endpoint)
    assert isinstance(stage.says(), act.SendToBroker)
    stage.order(Activate(epoch=1, first_step=1, live=()))
    assert isinstance(stage.says(), act.SendToBroker)
    opening = Open(7, SamplingParams(), 0, 2, 8, (5, 6))
    first = Step(epoch=1, step=1, rows=(Row(7, 0, 1, False),), tokens=(5,), open=(opening,))
    fork = Open(8, SamplingParams(), 0, 2, 8, (5, 6), 7, 1)
    second = Step(epoch=1, step=2, rows=(Row(8, 1, 1, False),), tokens=(6,), open=(fork,))
    assert stage.before.wait(PATIENCE_S)
    assert stage.before.send(DATA.encode(first))
    assert taker.wait(PATIENCE_S)
    stage.executor.refuses = refuses
    assert stage.before.send(DATA.encode(second))
    told = stage.says()
    assert isinstance(told, act.SendToBroker)
    assert isinstance(told.message, DataPathError)
    assert (told.message.reason, told.message.kv_overfull, told.message.failed) == ("no mapping", True, None)
    assert sorted(stage.core.sequences) == ([7] if refuses == "fork" else [7, 8])
    assert stage.thread.failure is None
    assert stage.thread.is_alive
    taker.close()


def test_layers_without_memory_for_what_is_in_use_end_the_epoch_only(stage: Stage) -> None:
    """The stage has adopted the plan; the broker then frees memory."""
    stage.prepare("tcp://127.0.0.1:20000")
    assert isinstance(stage.says(), act.SendToBroker)
    stage.executor.refuses = "activate"
    stage.order(Activate(epoch=1, first_step=1, live=()))
    messages = [action.message for action in (stage.says(), stage.says()) if isinstance(action, act.SendToBroker)]
    activated, error = messages
    assert isinstance(activated, Activated)
    assert isinstance(error, DataPathError)
    assert (error.epoch, error.reason, error.kv_overfull, error.failed) == (1, "no mapping", True, None)
    assert stage.thread.failure is None
    assert stage.thread.is_alive


def compute_a_step(stage: Stage, taker: PullChannel) -> None:
    stage.prepare(taker.endpoint)
    assert isinstance(stage.says(), act.SendToBroker)
    stage.order(Activate(epoch=1, first_step=1, live=()))
    assert isinstance(stage.says(), act.SendToBroker)
    opening = Open(7, SamplingParams(), 0, 2, 8, (5, 6))
    step = Step(epoch=1, step=1, rows=(Row(7, 0, 1, False),), tokens=(5,), open=(opening,))
    assert stage.before.wait(PATIENCE_S)
    assert stage.before.send(DATA.encode(step))


LOST = "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be asynchronously reported"


@pytest.mark.parametrize("when", ["loading", "computing"])
def test_a_device_that_is_lost_to_the_process_ends_it(stage: Stage, when: str) -> None:
    """With one line, and a code after which a supervisor starts it again; no request is blamed."""
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    if when == "loading":
        stage.executor.load_error = RuntimeError(LOST)
        stage.prepare(taker.endpoint)
    else:
        stage.executor.compute_error = RuntimeError(LOST)
        compute_a_step(stage, taker)
    text = "device cpu can't be used by this process any more: CUDA error: an illegal memory access was encountered"
    assert stage.says() == act.Exit(1, text)
    until(lambda: not stage.thread.is_alive)
    assert stage.thread.failure is None
    taker.close()


@pytest.mark.parametrize("waits", ["asleep", "spinning"])
def test_a_device_that_never_answers_is_seen(stage: Stage, waits: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A driver may wait for the device in its sleep, or look again and again: the worker is hung either way."""
    gate = threading.Event()

    def spin() -> None:
        while not gate.is_set():
            pass

    monkeypatch.setattr(fake_device, "before_copies", gate.wait if waits == "asleep" else spin)
    stage.executor.waits_for_device = True
    taker = PullChannel("127.0.0.1", DATA.frame_limit_bytes)
    compute_a_step(stage, taker)
    until(lambda: stage.vitals.condition == "computing")
    beats = HeartbeatThread(PeerConnector(new_pair(), "127.0.0.1"), "", 1.0, "w0.1", stage.vitals)
    pulse = HeartbeatHistory(time.monotonic())
    limits = HealthLimits(hang_min_s=0.6, asleep_s=0.3 if waits == "asleep" else PATIENCE_S)

    def is_hung() -> bool:
        now = time.monotonic()
        pulse.record(beats._make_heartbeat(), now)
        return judge(pulse, limits, ExpectedTimes(), now).verdict is Verdict.HUNG

    try:
        assert not is_hung()
        until(is_hung)
    finally:
        gate.set()
    taker.close()
