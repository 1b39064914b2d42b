"""Models without weights, and whether a model's files belong to its ``config.json``: numbers of layers and shapes of
tensors, by headers alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.pytorch_utils import Conv1D

from swarm.errors import refusing_model
from swarm.stage.model.build import ModelSkeleton, check_shape
from swarm.stage.model.checkpoint import Checkpoint, HeadKind
from swarm.stage.model.configuration import read_config
from swarm.stage.model.conversion import ModelSource
from swarm.stage.model.kinds import check_folder, is_classifier
from swarm.stage.model.model_settings import ModelSettings


def build_unloaded(folder: Path, checkpoint: Checkpoint | None = None) -> ModelSkeleton:
    """Return the model's skeleton on a CPU, by its configuration alone. Raises ``UnservedModel`` if there can't be one,
    whatever the weights; ``ModelError`` if those of ``checkpoint`` contradict it."""
    check_folder(folder)
    settings = ModelSettings(folder) if checkpoint is None else checkpoint
    settings.check_sizes()
    device, dtype = torch.device("cpu"), torch.float32
    if checkpoint is not None:
        skeleton = ModelSkeleton.from_checkpoint(checkpoint, device, dtype)
        check_files(checkpoint, skeleton, skeleton.source(checkpoint))
        return skeleton
    head: HeadKind = "scores" if is_classifier(settings.architecture) else "vocabulary"
    with refusing_model():
        return ModelSkeleton(read_config(folder), device, dtype, head=head)


def import_family(folder: Path, checkpoint: Checkpoint | None = None) -> None:
    """Import the code of this kind of model in advance, which otherwise happens when the first one is built.

    Raises ``ModelError`` if a model of this folder can't be built, or if the files of ``checkpoint`` contradict it.
    """
    get_model_conversion_mapping(build_unloaded(folder, checkpoint).model)


def check_files(checkpoint: Checkpoint, skeleton: ModelSkeleton, source: ModelSource) -> None:
    """Raise ``ModelError`` if the files contradict the configuration, also where their contents are still on a hub.

    Tensors that only a conversion of their contents can tell about are left to the loader, and so are missing ones.
    """
    checkpoint.check_layers()
    parts = skeleton.parts
    layers = (f"{parts.layers}.{layer}" for layer in range(skeleton.num_layers))
    for module in (*parts.embed, *layers, *parts.tail, *parts.shared):
        for leaf, tensor in skeleton.model.get_submodule(module).state_dict().items():
            name = f"{module}.{leaf}"
            stored = next((each for each in skeleton.candidates(name) if each in source), None)
            shape = None if stored is None else source.shape(stored)
            if shape is not None and not _is_turned(skeleton, name, shape, tensor.shape):
                check_shape(name, shape, tensor.shape)


def _is_turned(skeleton: ModelSkeleton, name: str, shape: Sequence[int], expected: Sequence[int]) -> bool:
    """Whether this is a matrix of a ``Conv1D``, which has its inputs first unless it is stored quantized."""
    module = skeleton.model.get_submodule(name.rpartition(".")[0])
    return isinstance(module, Conv1D) and tuple(shape) == tuple(reversed(expected))
