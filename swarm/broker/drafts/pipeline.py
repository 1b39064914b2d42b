"""What is a pipeline, and what is not.

``check_stages`` refuses a set of stages that can't serve a model, by the name of the rule it breaks, before anything is
loaded. Who gets which layers is decided in ``plan``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange, Manifest

DEVICES = ("cpu", "cuda", "mps")
MODES = ("batch", "overlapped", "auto")


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
