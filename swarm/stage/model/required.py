"""Which stored tensors a range of layers needs, so that only the files that hold them are fetched."""

from __future__ import annotations

from collections.abc import Collection

from swarm.stage.model.build import Skeleton
from swarm.stage.model.conversion import ConvertedSource
from swarm.wire.messages import LayerRange


def needed_tensors(
    skeleton: Skeleton, source: ConvertedSource, ranges: Collection[LayerRange], held: Collection[str]
) -> set[str]:
    """Names, as stored, of all that stages of these ranges read; ``held``: modules that are loaded already."""
    modules = {
        name
        for layers in ranges
        for layer in range(layers.first, layers.stop)
        for name in module_names(skeleton, layer)
    }
    modules.update(skeleton.parts.common)
    found: set[str] = set()
    for module in modules - set(held):
        for leaf in skeleton.model.get_submodule(module).state_dict():
            found.update(_stored(skeleton, source, f"{module}.{leaf}"))
    return found


def module_names(skeleton: Skeleton, layer: int) -> frozenset[str]:
    """The modules that only the holder of this layer loads: itself, and with the first one what embeds, with the last
    one the head."""
    parts = skeleton.parts
    names = {f"{parts.layers}.{layer}"}
    names.update(parts.embed if layer == 0 else ())
    names.update(parts.tail if layer == skeleton.num_layers - 1 else ())
    return frozenset(names)


def _stored(skeleton: Skeleton, source: ConvertedSource, name: str) -> list[str]:
    """A tied head that is not stored is the embedding's table."""
    output, tied = f"{skeleton.parts.output_embedding}.weight", f"{skeleton.parts.input_embedding}.weight"
    found = source.stored_names(name)
    if not found and name == output and skeleton.config.get_text_config().tie_word_embeddings:
        return source.stored_names(tied)
    return found
