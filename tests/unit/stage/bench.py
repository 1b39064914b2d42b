"""A stage on a bench: its core with a fake executor, orders and steps by hand, rules checked after every event."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from swarm.params import SamplingParams
from swarm.stage import actions as act
from swarm.stage.core import StageCore, StageSettings
from swarm.stage.events import AdaptersLoaded, Computed, ComputeFailed, Event, Loaded, OrderArrived, StepArrived
from swarm.stage.executor import Capacity
from swarm.testing import FakeExecutor, fake_manifest
from swarm.wire.messages import (
    Activate,
    Edge,
    Fence,
    LayerRange,
    Open,
    Order,
    Prepare,
    Row,
    SequencePosition,
    Step,
    Welcome,
)

NUM_LAYERS = 6
EDGE = Edge("w1.1", "tcp://w1.1")


def hidden_of(num_tokens: int, value: float = 1.0) -> NDArray[np.float32]:
    return np.full((num_tokens, 2), value, np.float32)


def opened(sequence: int, tokens: tuple[int, ...] = (1, 2, 3), num_prompt: int = 3, limit: int = 64) -> Open:
    return Open(sequence, SamplingParams(), 5, num_prompt, limit, tokens)


def step_of(number: int, *rows: Row, epoch: int = 1, **fields: object) -> Step:
    """A step whose tokens are 10 + their position, unless told otherwise."""
    tokens = tuple(10 + r.start + i for r in rows for i in range(r.count))
    return Step(epoch=epoch, step=number, rows=rows, **({"tokens": tokens} | fields))  # type: ignore[arg-type]


@dataclass(slots=True)
class StageBench:
    """The executor does what the core asks; ``compute`` answers the Compute under way."""

    first: int = 0
    stop: int = 3
    log_bytes: int = 1 << 20
    state_stride: int = 0
    sees: bool = False
    now: float = 100.0
    core: StageCore = field(init=False)
    executor: FakeExecutor = field(init=False)
    computing: act.Compute | None = None

    def __post_init__(self) -> None:
        self.core = StageCore(
            StageSettings("w0", "w0.1", NUM_LAYERS, log_bytes=self.log_bytes, state_stride=self.state_stride)
        )
        self.executor = FakeExecutor(fake_manifest(NUM_LAYERS, state_stride=self.state_stride, sees=self.sees))

    @property
    def layers(self) -> LayerRange:
        return LayerRange(self.first, self.stop)

    def feed(self, event: Event) -> list[act.Action]:
        """The core's actions; the executor has carried out its share of them."""
        if isinstance(event, AdaptersLoaded):
            self.executor.adapters |= {entry.key for entry in event.adapters}
        actions = self.core.handle(event, self.now)
        for action in actions:
            self._perform(action)
        self.check()
        return actions

    def order(self, order: Order) -> list[act.Action]:
        return self.feed(OrderArrived(order))

    def step(self, step: Step, hidden: NDArray[np.float32] | None = None) -> list[act.Action]:
        if hidden is None and self.first > 0 and step.rows:
            hidden = hidden_of(len(step.tokens))
        return self.feed(StepArrived(step, hidden, 7))

    def compute(self) -> list[act.Action]:
        """The step under way goes through the layers."""
        assert self.computing is not None
        action, self.computing = self.computing, None
        forwarded = self.executor.forward(action.batch, lambda: False, lambda: None)
        return self.feed(Computed(action.epoch, action.step, forwarded))

    def fail(self, reason: str, *, is_memory: bool = False) -> list[act.Action]:
        """The step under way raises."""
        assert self.computing is not None
        action, self.computing = self.computing, None
        return self.feed(ComputeFailed(action, reason, is_memory))

    def run(self, step: Step) -> list[act.Action]:
        """Take a step and compute it; what comes out."""
        actions = self.step(step)
        return actions + self.compute() if self.computing is not None else actions

    def _perform(self, action: act.Action) -> None:
        match action:
            case act.LoadLayers(_, layers, standby, max_sequences):
                self.executor.prepare(layers, standby, max_sequences, lambda done, total: None)
            case act.DropAdapters(keys):
                self.executor.drop_adapters(keys)
            case act.UseLayers(layers, kept, share_unit):
                self.executor.activate(layers, kept, share_unit)
            case (
                act.OpenSequence()
                | act.ForkSequence()
                | act.SharePrefix()
                | act.ShrinkSequence()
                | act.TruncateSequence()
                | act.ReleaseSequence()
                | act.StoreKv()
                | act.DropKv()
            ):
                act.apply_to_executor(self.executor, action)
            case act.FreeSpareMemory():
                self.executor.drop_spare()
            case act.Compute():
                assert self.computing is None, "two steps at once"
                self.computing = action
            case _:
                pass

    # --- scenes ------------------------------------------------------------------------------------------------------

    def activate(
        self, epoch: int = 1, first_step: int = 1, live: tuple[tuple[int, int], ...] = (), **fields: object
    ) -> list[act.Action]:
        """The whole procedure of a new plan for ``layers``; the actions of the activation."""
        self.order(Prepare(epoch=epoch, layers=self.layers, standby=(), edge=EDGE, max_sequences=4))
        self.feed(Loaded(epoch, CAPACITY))
        self.order(Fence(epoch=epoch))
        positions = tuple(SequencePosition(*p) for p in live)
        return self.order(Activate(epoch=epoch, first_step=first_step, live=positions, **fields))  # type: ignore[arg-type]

    # --- what must hold ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Positions are per range, gap-free and true; the log belongs to sequences held; no old epoch runs."""
        core = self.core
        assert core.active is None or core.active >= core.fence
        copies = core.store.copies
        assert core.sequences.keys() | copies.sequences.keys() == self.executor.chains.keys()
        for sequence, copy in copies.sequences.items():
            assert copy.positions, "nothing is recorded for nothing"
            assert len(copy.tokens) == max(copy.positions.values())
            for layer, held_to in copy.positions.items():
                assert core.active is None or core.layers is None or not core.layers.first <= layer < core.layers.stop
                assert len(self.executor.chains[sequence][layer]) == held_to > 0
        assert copies.num_bytes == self.executor.kv_copy_bytes() or core.active is None
        for sequence, held in core.sequences.items():
            assert core.layers is not None
            assert held.kv[0].layers.first == core.layers.first
            assert held.kv[-1].layers.stop == core.layers.stop
            for before, after in zip(held.kv, held.kv[1:], strict=False):
                assert before.layers.stop == after.layers.first
                assert before.position != after.position, "level ranges are one range"
            for part in held.kv:
                for layer in range(part.layers.first, part.layers.stop):
                    assert len(self.executor.chains[sequence].get(layer, ())) >= part.position
        assert core.log.num_bytes <= self.log_bytes
        assert {r.sequence for r in core.log.ranges()} <= core.sequences.keys()
        if core.active is None:
            assert not core.steps.ready
            assert not core.steps.early


CAPACITY = Capacity(
    kv_tokens=1024, max_sequences=4, load_s=0.5, warm_up_s=0.1, resident_bytes=9, kernels="plain float32, exact"
)
WELCOME = Welcome(
    epoch=0, beat_endpoint="beats", data_endpoint="data", beat_interval_s=0.1, lease_s=10.0, wants=("tokenizer.json",)
)
