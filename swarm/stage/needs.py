"""Which stored tensors a range of layers needs, so that only the files that hold them are fetched."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from swarm.stage.conversion import ConvertedSource
from swarm.stage.model import Skeleton
from swarm.wire.messages import LayerRange


def needed_tensors(
    skeleton: Skeleton, source: ConvertedSource, ranges: Collection[LayerRange], held: Collection[str]
) -> set[str]:
    """Names, as stored, of all that stages of these ranges read; ``held``: modules that are loaded already."""
    modules = {module for layers in ranges for module in _modules(skeleton, layers)}
    found: set[str] = set()
    for module in modules - set(held):
        for leaf in skeleton.model.get_submodule(module).state_dict():
            found.update(_stored(skeleton, source, f"{module}.{leaf}"))
    return found


def _modules(skeleton: Skeleton, layers: LayerRange) -> Iterator[str]:
    parts = skeleton.parts
    yield from (f"{parts.layers}.{index}" for index in range(layers.first, layers.stop))
    yield from parts.common
    if layers.first == 0:
        yield from parts.embed
    if layers.stop == skeleton.num_layers:
        yield from parts.tail


def _stored(skeleton: Skeleton, source: ConvertedSource, name: str) -> list[str]:
    """A tied head that is not stored is the embedding's table."""
    output, tied = f"{skeleton.parts.output_embedding}.weight", f"{skeleton.parts.input_embedding}.weight"
    found = source.stored_names(name)
    if not found and name == output and skeleton.config.get_text_config().tie_word_embeddings:
        return source.stored_names(tied)
    return found
