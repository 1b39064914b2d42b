"""Stages that hold copies of each other's keys and values: a pipeline on a bench, and the connection between two."""

from __future__ import annotations

from dataclasses import dataclass, field

from swarm.stage import actions as act
from swarm.stage.events import KvArrived, KvPartsTaken, KvTurn, Loaded, OrderArrived, StageTick, StandbyLoaded
from swarm.stage.kv_sender import LONG_PART_S, MAX_PAUSE_S
from swarm.wire import tensors
from swarm.wire.messages import (
    BLOCK,
    Activate,
    Edge,
    Fence,
    KeepWarm,
    KvHeld,
    KvPart,
    KvSource,
    KvTarget,
    LayerRange,
    Prepare,
    ReceiveKv,
    SendKv,
    SequencePosition,
    num_blocks,
)
from tests.unit.stage.bench import CAPACITY, EDGE, StageBench

LAYERS = LayerRange(0, 3)  # of the sender
HOLDER = Edge("w0.1", "tcp://holder")  # every bench has this incarnation
IDLE = KvTurn(is_idle=True)
BUSY = KvTurn(is_idle=False)
AMPLE = 1 << 30


def positions(**held: int) -> tuple[SequencePosition, ...]:
    """``s1=64``: sequence 1 stands at 64."""
    return tuple(SequencePosition(int(name[1:]), position) for name, position in held.items())


def held_by(actions: list[act.Action]) -> list[KvHeld]:
    return [a.message for a in actions if isinstance(a, act.SendToBroker) and isinstance(a.message, KvHeld)]


def parts_in(actions: list[act.Action]) -> list[act.SendKvPart]:
    return [part for a in actions if isinstance(a, act.SendKvParts) for part in a.parts]


def num_blocks_of(part: act.SendKvPart) -> int:
    return num_blocks(len(part.tokens))


@dataclass(slots=True)
class KvPipe:
    """A connection for copies between two benches. ``waiting``: parts under way."""

    sender: StageBench
    receiver: StageBench
    block_s: float = LONG_PART_S / 2  # for reading a block: a turn has time for two
    waiting: list[KvArrived] = field(default_factory=list)

    def order(self, epoch: int = 1, layers: LayerRange = LAYERS, **target: object) -> None:
        """The broker has the sender send its layers, and the receiver accept them."""
        self.receive(epoch, layers)
        self.send(epoch, layers, **target)

    def send(self, epoch: int = 1, layers: LayerRange = LAYERS, **target: object) -> list[act.Action]:
        return self.sender.order(SendKv(epoch=epoch, targets=(KvTarget(HOLDER, layers, **target),)))  # type: ignore[arg-type]

    def receive(self, epoch: int = 1, layers: LayerRange = LAYERS, **order: object) -> list[act.Action]:
        return self.receiver.order(ReceiveKv(epoch=epoch, sources=(KvSource("w0.1", layers),), **order))  # type: ignore[arg-type]

    def turn(self, turn: KvTurn = IDLE) -> list[act.SendKvPart]:
        """Give the sender a turn, after a while; its parts are on their way. Returns them."""
        self.sender.now += MAX_PAUSE_S
        parts = parts_in(self.sender.feed(turn))
        if parts:
            arrivals = list(map(self.read, parts))
            self.waiting += arrivals
            num_bytes = sum(arrival.data.numbers.nbytes for arrival in arrivals)
            self.sender.feed(KvPartsTaken(parts[0].to.to, num_bytes, self.block_s * sum(map(num_blocks_of, parts))))
        return parts

    def read(self, part: act.SendKvPart, free_bytes: int = AMPLE) -> KvArrived:
        """What arrives of a part."""
        data = self.sender.executor.read_kv(part.sequence, part.layers, part.start, part.start + len(part.tokens))
        message = KvPart(
            epoch=part.epoch,
            lineage=part.lineage,
            sequence=part.sequence,
            layers=part.layers,
            block=part.start // BLOCK,
            tensor=tensors.pack(data.numbers, data.dtype)[0],
            tokens=part.tokens,
            open=part.open,
            sender=self.sender.core.settings.incarnation,
        )
        return KvArrived(message, data, free_bytes)

    def deliver(self) -> list[act.Action]:
        """Everything under way arrives."""
        waiting, self.waiting = self.waiting, []
        return [action for event in waiting for action in self.receiver.feed(event)]

    def copy_all(self) -> list[act.Action]:
        """Everything that can be sent is sent and arrives, after a while."""
        while self.turn():
            pass
        return self.deliver()


def activate(stage: StageBench, epoch: int = 1, *, kept: tuple[LayerRange, ...] = (), **live: int) -> list[act.Action]:
    """The whole procedure of a new plan for the bench's layers; the actions of the activation."""
    stage.order(Prepare(epoch=epoch, layers=stage.layers, standby=kept, edge=EDGE, max_sequences=4))
    stage.feed(Loaded(epoch, CAPACITY))
    stage.order(Fence(epoch=epoch))
    return stage.order(Activate(epoch=epoch, first_step=1, live=positions(**live)))


def keep_warm(stage: StageBench, *layers: LayerRange, epoch: int = 1) -> None:
    """The stage loads these layers as a standby."""
    stage.feed(OrderArrived(KeepWarm(epoch=epoch, layers=layers)))
    kept = stage.executor.keep(layers, lambda done, total: None, lambda warm: False)
    stage.feed(StandbyLoaded(kept, 0.1))


def tick(stage: StageBench, free_bytes: int = AMPLE, after_s: float = 0.1) -> list[act.Action]:
    stage.now += after_s
    return stage.feed(StageTick(free_bytes))
