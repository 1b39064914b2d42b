"""Progress of a worker in loading the layers that it keeps warm for others, and the expected end."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.broker.state import Worker
from swarm.wire.messages import Json, Manifest, layers_of, to_ranges


@dataclass(frozen=True, slots=True)
class WarmingProgress:
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


def warming_progress(worker: Worker, manifest: Manifest, now: float) -> WarmingProgress | None:
    """Return the worker's progress; None if nothing is missing."""
    # before the first order, what it has is what it should have
    wanted_layers = layers_of(worker.warm_layers if worker.ordered_warm_layers is None else worker.ordered_warm_layers)
    warm_layers = wanted_layers & layers_of(worker.warm_layers)
    if worker.is_gone or warm_layers == wanted_layers:
        return None
    wanted_bytes, warm_bytes = (
        sum(map(manifest.weight_bytes, to_ranges(part))) for part in (wanted_layers, warm_layers)
    )
    elapsed_s = now - worker.warming_since
    missing_bytes = wanted_bytes - warm_bytes
    ready_in_s = elapsed_s * missing_bytes / worker.warmed_bytes if worker.warmed_bytes else None
    return WarmingProgress(wanted_bytes, warm_bytes, ready_in_s)


def warming_as_json(worker: Worker, manifest: Manifest | None, now: float) -> Json | None:
    progress = None if manifest is None else warming_progress(worker, manifest, now)
    if progress is None:
        return None
    ready_in_s = None if progress.ready_in_s is None else round(progress.ready_in_s, 1)
    return {"wanted_bytes": progress.wanted_bytes, "warm_bytes": progress.warm_bytes, "ready_in_s": ready_in_s}
