"""Asking workers to keep layers warm for others: when a plan serves, and nobody waits for anything.

What a worker has warm is only what it said it has; what it was asked for counts for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.actions import OrderWorker, Outbox
from swarm.broker.drafts.candidates import Proposal
from swarm.broker.state import State, Worker
from swarm.wire.messages import Keep, Kept, LayerRange, layers_of

LEAST_BYTES = 1 << 20  # what takes less says nothing about how quickly a worker loads


@dataclass(slots=True)
class Standby:
    """Keeps ``worker.kept``. Appends orders to ``out``."""

    state: State
    out: Outbox

    def ask(self, wanted: Proposal | None) -> None:
        """Tell everybody what to keep. Those with a part in the plan in force have room for what that plan says;
        ``wanted``, the plan that would be made now, tells it of the others."""
        current = self.state.book.current
        if current is None:
            return
        spares = {} if wanted is None else dict(wanted.standby)
        for worker in self.state.workers.values():
            if worker.is_gone:
                continue
            is_member = worker.incarnation in current.members
            layers = current.standby_of(worker.incarnation) if is_member else spares.get(worker.incarnation, ())
            known = worker.kept if worker.asked_to_keep is None else worker.asked_to_keep
            if layers != known:
                worker.asked_to_keep = layers
                self.out.append(OrderWorker(worker.peer, Keep(epoch=self.state.book.written, layers=layers)))

    def forget(self) -> None:
        """Another plan: whoever loads for others stops, and must be asked again."""
        for worker in self.state.workers.values():
            worker.asked_to_keep = None

    def told(self, worker: Worker, message: Kept) -> None:
        """A worker says what it has."""
        new = layers_of(message.layers) - layers_of(worker.kept)
        worker.hold(message.layers, worker.believed)
        took = sum(self._bytes(layer) for layer in new)
        self.loaded(worker, took, message.load_s)
        missing = layers_of(message.wanted) - layers_of(message.layers)
        self.out.note(
            "standby_warm",
            worker=worker.name,
            layers=[str(layers) for layers in message.layers],
            missing=sorted(missing),
            load_s=round(message.load_s, 3),
        )

    def loaded(self, worker: Worker, num_bytes: int, seconds: float) -> None:
        """So many bytes were loaded and warmed in so long: what the next load is expected to take."""
        if num_bytes >= LEAST_BYTES and seconds > 0:
            worker.load_bytes_per_s = num_bytes / seconds

    def _bytes(self, layer: int) -> int:
        assert self.state.manifest is not None
        return self.state.manifest.weight_bytes(LayerRange(layer, layer + 1))
