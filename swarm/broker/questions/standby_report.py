"""Progress of a worker in loading the layers that it keeps warm for others, and the expected end."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Worker
from swarm.wire.messages import Json, Manifest, layers_of, ranges_of


@dataclass(frozen=True, slots=True)
class Warming:
    """Layers that a worker was asked to keep warm and has not all loaded yet."""

    wanted_bytes: int
    warm_bytes: int
    ready_in_s: float | None  # at the rate since the broker's order; None: no layer was loaded since

    @property
    def in_words(self) -> str:
        done = f"{100 * self.warm_bytes / max(1, self.wanted_bytes):.0f} % of it is loaded"
        if self.ready_in_s is None:
            return f"{done}, the rest as far as steps leave time for it"
        return f"{done}, the rest in about {max(1.0, self.ready_in_s):.0f} s at the rate so far"


def warming_of(worker: Worker, manifest: Manifest, now: float) -> Warming | None:
    """Return the worker's progress; None if nothing is missing."""
    # before the first order, what it has is what it should have
    wanted = layers_of(worker.kept if worker.asked_to_keep is None else worker.asked_to_keep)
    warm = wanted & layers_of(worker.kept)
    if worker.is_gone or warm == wanted:
        return None
    wanted_bytes, warm_bytes = (sum(map(manifest.weight_bytes, ranges_of(part))) for part in (wanted, warm))
    passed_s = now - worker.warms_since
    missing_bytes = wanted_bytes - warm_bytes
    ready_in_s = passed_s * missing_bytes / worker.warmed_bytes if worker.warmed_bytes else None
    return Warming(wanted_bytes, warm_bytes, ready_in_s)


def warming_as_json(worker: Worker, manifest: Manifest | None, now: float) -> Json | None:
    found = None if manifest is None else warming_of(worker, manifest, now)
    if found is None:
        return None
    ready_in_s = None if found.ready_in_s is None else round(found.ready_in_s, 1)
    return {"wanted_bytes": found.wanted_bytes, "warm_bytes": found.warm_bytes, "ready_in_s": ready_in_s}
