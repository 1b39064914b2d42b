"""Refuses what is no pipeline.

Pins and a mode that can't go together are refused before the search (``planner.lacking``, ``candidates``), with what to
change; a device that nobody serves is refused at the worker's hello. What the search finds is checked once more here:
a plan that is no pipeline is a bug, and nobody may hear of it.
"""

from __future__ import annotations

from collections.abc import Sequence

from swarm.errors import StageSetError
from swarm.wire.messages import LayerRange

DEVICES = ("cpu", "cuda", "mps")


def is_supported(device: str) -> bool:
    """``device`` is one of DEVICES, perhaps with a number: ``cuda:1``."""
    return device.partition(":")[0] in DEVICES


def check_pipeline(stages: Sequence[LayerRange], num_layers: int) -> None:
    """Raise StageSetError unless these stages, in this order, hold every layer once."""
    expected = 0
    for index, layers in enumerate(stages):
        if layers.stop <= layers.first:
            raise StageSetError("empty_stage", f"stage {index}: the layer range {layers} is empty")
        if layers.first != expected:
            kind = "gap" if layers.first > expected else "overlap"
            raise StageSetError(kind, f"stage {index}: {kind}, its layers {layers} should begin at {expected}")
        expected = layers.stop
    if expected != num_layers:
        raise StageSetError("wrong_total", f"the stages end at layer {expected}, the model has {num_layers}")
