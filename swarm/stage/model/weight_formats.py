"""Formats of a model's quantized matrices, without their contents."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.stage.model.build import ModelSkeleton
from swarm.stage.model.conversion import WeightSource
from swarm.stage.quantization.formats import WeightFormat

_Formats = tuple[tuple[str, WeightFormat], ...]  # by the names of the matrices


@dataclass(frozen=True, slots=True)
class WeightFormats:
    """Formats of the matrices of each layer, by their names within the layer, and of the matrices outside of layers.

    Other matrices are plain.
    """

    layers: tuple[_Formats, ...] = ()
    others: _Formats = ()

    def distinct(self) -> tuple[WeightFormat, ...]:
        """Return each format once, in the order of their names."""
        every = {form for part in (*self.layers, self.others) for _, form in part}
        return tuple(sorted(every, key=lambda form: (form.name, form.group)))

    def by_name(self, stack: str) -> dict[str, WeightFormat]:
        """Return the formats by the names of the model's matrices; ``stack`` is the name of its list of layers."""
        layers = enumerate(self.layers)
        return {f"{stack}.{index}.{leaf}": form for index, layer in layers for leaf, form in layer} | dict(self.others)

    def kinds_by_name(self, stack: str, num_layers: int) -> dict[str, WeightFormat]:
        """Return formats by name for a model with other layers in ``stack``: each kind of layer in turn."""
        kinds = tuple(dict.fromkeys(self.layers)) or ((),)
        formats = {
            f"{stack}.{index}.{leaf}": form for index in range(num_layers) for leaf, form in kinds[index % len(kinds)]
        }
        return formats | dict(self.others)


PLAIN = WeightFormats()


def find_formats(skeleton: ModelSkeleton, source: WeightSource) -> WeightFormats:
    """Return the formats of the matrices that stay quantized when this model is loaded."""
    if not skeleton.has_quantized_products:
        return PLAIN
    layers: list[list[tuple[str, WeightFormat]]] = [[] for _ in range(skeleton.num_layers)]
    others: list[tuple[str, WeightFormat]] = []
    prefix = f"{skeleton.parts.layers}."
    for name in skeleton.model.state_dict():
        form = source.weight_format(name)
        if form is None:
            continue
        if name.startswith(prefix):
            index, _, leaf = name.removeprefix(prefix).partition(".")
            layers[int(index)].append((leaf, form))
        else:
            others.append((name, form))
    return WeightFormats(tuple(map(tuple, layers)), tuple(others)) if others or any(layers) else PLAIN
