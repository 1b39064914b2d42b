"""Who would hold which layers if the plan were made now."""

from __future__ import annotations

from swarm.broker.partition import Candidate, Shortage, partition
from swarm.broker.state import State, Worker, WorkerState
from swarm.wire.messages import LayerRange


def wanted_shares(state: State, *, without: Worker | None = None) -> list[tuple[str, LayerRange]] | Shortage:
    """(incarnation, layers) in pipeline order. Nobody gets what it has refused; with fewer workers the others' ranges
    change, so they are looked at again."""
    manifest = state.manifest
    workers = [w for w in _candidates(state) if w is not without]
    refusing: list[Worker] = []
    while manifest is not None and workers:
        shares = partition(manifest, [Candidate(w.name, w.hello.memory_bytes, w.hello.device) for w in workers])
        if isinstance(shares, Shortage):
            return Shortage(shares.text + _refusals(refusing, " ({})"), shares.missing_bytes)
        refused = next((s.candidate for s in shares if workers[s.candidate].refuses(s.layers)), None)
        if refused is None:
            return [(workers[s.candidate].incarnation, s.layers) for s in shares]
        refusing.append(workers.pop(refused))
    text = _refusals(refusing, "a worker that can load the model: {}")
    nobody = "a worker: none has joined yet" if without is None else "another worker, since this is the only one"
    return Shortage(text or nobody, 0)


def _candidates(state: State) -> list[Worker]:
    """Members in pipeline order: those of the present plan first, where they are, then by arrival."""
    current = state.book.current
    place = {s.incarnation: i for i, s in enumerate(current.stages)} if current else {}
    members = [w for w in state.workers.values() if w.state in (WorkerState.MEMBER, WorkerState.REFUSED)]
    return sorted(members, key=lambda w: (place.get(w.incarnation, len(place)), _held_first(w), w.joined_at, w.name))


def _refusals(workers: list[Worker], text: str) -> str:
    """The text with everybody's reason; empty if nobody refuses."""
    return text.format("; ".join(f"{w.name} refused: {w.reason}" for w in workers))[:3000] if workers else ""


def _held_first(worker: Worker) -> int:
    """Workers that hold layers already (they outlived the broker) keep their order."""
    held = worker.hello.held_layers
    return held.first if held is not None else 1 << 30
