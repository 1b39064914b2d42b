"""Layer ranges from memory: which worker holds which layers.

The rule of this version: every worker that can hold at least one layer takes part, in the order given; each gets an
even share, unless its memory is smaller; what it can't take goes to the others. ``check_stages`` is the other half: it
refuses a set of stages that is not a pipeline, by the name of the rule it breaks, before anything is loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange, Manifest

# A stage's memory must also hold activations, the sender's log and the interpreter's own heap.
OVERHEAD_BYTES = 64 << 20
DEVICES = ("cpu", "cuda", "mps")
MODES = ("batch", "overlapped", "auto")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A worker that could hold layers. ``memory_bytes`` is all that it may use."""

    name: str
    memory_bytes: int
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Share:
    candidate: int  # index into the candidates
    layers: LayerRange
    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Shortage:
    """The model does not fit: in words, and how many bytes are missing."""

    text: str
    missing_bytes: int


def weight_bytes(manifest: Manifest, layers: LayerRange) -> int:
    """What a stage with these layers loads, embedding on the first and head on the last counted."""
    total = sum(manifest.layer_bytes[layers.first : layers.stop])
    if layers.first == 0:
        total += manifest.embed_bytes
    if layers.stop == manifest.num_layers:
        total += manifest.head_bytes
    return total


def partition(manifest: Manifest, candidates: Sequence[Candidate]) -> list[Share] | Shortage:
    """Shares in pipeline order, covering every layer once; or why the model does not fit."""
    if not candidates:
        return Shortage("a worker: none has joined yet", 0)
    for num in range(min(len(candidates), manifest.num_layers), 0, -1):
        shares = _even(manifest, candidates[:num]) or _greedy(manifest, candidates[:num])
        if shares is not None:
            return shares
    return _greedy(manifest, candidates) or _shortage(manifest, candidates)


def _even(manifest: Manifest, candidates: Sequence[Candidate]) -> list[Share] | None:
    base, extra = divmod(manifest.num_layers, len(candidates))
    counts = [base + (i < extra) for i in range(len(candidates))]
    return _cut(manifest, candidates, counts)


def _cut(manifest: Manifest, candidates: Sequence[Candidate], counts: list[int]) -> list[Share] | None:
    shares, first = [], 0
    for index, count in enumerate(counts):
        layers = LayerRange(first, first + count)
        needed = weight_bytes(manifest, layers)
        if count == 0 or needed + OVERHEAD_BYTES > candidates[index].memory_bytes:
            return None
        shares.append(Share(index, layers, needed))
        first += count
    return shares


def _greedy(manifest: Manifest, candidates: Sequence[Candidate]) -> list[Share] | None:
    """Unequal memories: give each at most its fill, as even as the fills allow (the smallest cap that still covers)."""
    for cap in range(1, manifest.num_layers + 1):
        counts, first = [], 0
        for candidate in candidates:
            count = _most(manifest, candidate, first, cap)
            counts.append(count)
            first += count
        if first >= manifest.num_layers:
            used = [i for i, count in enumerate(counts) if count]
            shares = _cut(manifest, [candidates[i] for i in used], [counts[i] for i in used])
            return shares and [Share(used[s.candidate], s.layers, s.weight_bytes) for s in shares]
    return None


def _most(manifest: Manifest, candidate: Candidate, first: int, cap: int) -> int:
    """How many layers from ``first`` on this candidate can take, at most ``cap``."""
    for stop in range(min(first + cap, manifest.num_layers), first, -1):
        if weight_bytes(manifest, LayerRange(first, stop)) + OVERHEAD_BYTES <= candidate.memory_bytes:
            return stop - first
    return 0


def _shortage(manifest: Manifest, candidates: Sequence[Candidate]) -> Shortage:
    needed = weight_bytes(manifest, LayerRange(0, manifest.num_layers)) + OVERHEAD_BYTES * len(candidates)
    have = sum(c.memory_bytes for c in candidates)
    missing = max(0, needed - have)
    where = ", ".join(f"{c.name} {c.memory_bytes / 2**20:.0f} MiB" for c in candidates)
    if not missing:
        return Shortage(f"workers with more memory each: the layers don't pack into {where}", 0)
    text = (
        f"{missing / 2**20:.0f} MiB more memory: {manifest.name} needs {needed / 2**20:.0f} MiB "
        f"on {len(candidates)} workers, joined are {where}"
    )
    return Shortage(text, missing)


@dataclass(frozen=True, slots=True)
class StageSpec:
    """A stage as it is going to be announced, by the planner or by hand, to be checked."""

    layers: LayerRange
    device: str
    hidden_size: int
    has_embedding: bool
    has_head: bool


def planned_stage(manifest: Manifest, layers: LayerRange, device: str) -> StageSpec:
    """The planner's stage: a worker loads the embedding with the first layer, and the head with the last."""
    return StageSpec(
        layers=layers,
        device=device,
        hidden_size=manifest.hidden_size,
        has_embedding=layers.first == 0,
        has_head=layers.stop == manifest.num_layers,
    )


def is_supported(device: str) -> bool:
    """``device`` is one of DEVICES, perhaps with a number: ``cuda:1``."""
    return device.partition(":")[0] in DEVICES


def check_stages(stages: Sequence[StageSpec], manifest: Manifest, mode: str, num_expected: int | None = None) -> None:
    """Raise StageSetError unless the stages make a pipeline for this model in this mode."""
    if mode not in MODES:
        raise StageSetError("unknown_mode", f"unknown mode {mode!r}: choose one of {', '.join(MODES)}")
    if not stages or (mode == "overlapped" and len(stages) < 2):
        raise StageSetError("stage_count", f"mode {mode} needs {2 if stages else 1} stages or more, not {len(stages)}")
    if num_expected is not None and len(stages) != num_expected:
        raise StageSetError("stage_count", f"{num_expected} stages are expected, not {len(stages)}")
    for index, stage in enumerate(stages):
        _check_stage(index, stage, manifest)
    _check_ranges(stages, manifest)
    if not stages[0].has_embedding:
        raise StageSetError("no_embedding", "the first stage lacks the embedding")
    if not stages[-1].has_head:
        raise StageSetError("no_head", "the last stage lacks the head")


def _check_stage(index: int, stage: StageSpec, manifest: Manifest) -> None:
    if not is_supported(stage.device):
        known = ", ".join(DEVICES)
        raise StageSetError("unsupported_device", f"stage {index}: device {stage.device!r} is none of {known}")
    if stage.hidden_size != manifest.hidden_size:
        raise StageSetError(
            "unlike_dimensions",
            f"stage {index}: hidden size {stage.hidden_size}, but the model has {manifest.hidden_size}",
        )
    if stage.layers.stop <= stage.layers.first:
        raise StageSetError("empty_stage", f"stage {index}: the layer range {stage.layers} is empty")


def _check_ranges(stages: Sequence[StageSpec], manifest: Manifest) -> None:
    expected = 0
    for index, stage in enumerate(stages):
        if stage.layers.first != expected:
            kind = "gap" if stage.layers.first > expected else "overlap"
            raise StageSetError(kind, f"stage {index}: {kind}, its layers {stage.layers} should begin at {expected}")
        expected = stage.layers.stop
    if expected != manifest.num_layers:
        raise StageSetError("wrong_total", f"the stages end at layer {expected}, the model has {manifest.num_layers}")
