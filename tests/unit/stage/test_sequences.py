"""How far a sequence has come in every layer: whatever comes over it, as if each layer were counted by itself."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swarm.params import SamplingParams
from swarm.stage.sequences import StoredSequence
from swarm.wire.messages import LayerRange, Open, RangePosition

NUM_LAYERS = 9
ranges = st.tuples(st.integers(0, NUM_LAYERS - 1), st.integers(1, NUM_LAYERS)).filter(lambda r: r[0] < r[1])
verbs = st.tuples(st.sampled_from(["advance", "truncate", "take_over"]), ranges, st.integers(0, 40))


@pytest.mark.slow
@given(st.lists(verbs, max_size=12), ranges)
def test_positions_are_those_of_single_layers(
    done: list[tuple[str, tuple[int, int], int]], asked: tuple[int, int]
) -> None:
    """Layers that stand alike are told as one range, neighbours in order, none twice and none missing."""
    opened = Open(1, SamplingParams(), 0, 3, 100, (1, 2, 3), None, 0)
    held = StoredSequence(opened, [1, 2, 3], [RangePosition(LayerRange(0, NUM_LAYERS), 0)])
    layers = dict.fromkeys(range(NUM_LAYERS), 0)
    for verb, (first, stop), position in done:
        match verb:
            case "advance":
                held.advance(LayerRange(first, stop), position)
                layers |= {layer: max(at, position) for layer, at in layers.items() if first <= layer < stop}
            case "truncate":
                held.truncate(position)
                layers = {layer: min(at, position) for layer, at in layers.items()}
            case _:
                held.change_layers(LayerRange(first, stop))
                layers = {layer: layers.get(layer, 0) for layer in range(first, stop)}
        told = {layer: r.position for r in held.kv for layer in range(r.layers.first, r.layers.stop)}
        assert told == layers
        assert [r.layers.stop for r in held.kv[:-1]] == [r.layers.first for r in held.kv[1:]]
        assert all(a.position != b.position for a, b in zip(held.kv, held.kv[1:], strict=False))
        assert held.position() == (next(iter(layers.values())) if len(set(layers.values())) == 1 else None)
        among = [at for layer, at in layers.items() if asked[0] <= layer < asked[1]]
        assert held.min_position(LayerRange(*asked)) == min(among, default=0)
