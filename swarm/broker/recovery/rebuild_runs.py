"""Which layers of a sequence must be rebuilt after a change of plan, from which positions, and from whose log.

Layers that changed hands begin at the position that their new holder has copies for, or at 0. They are rebuilt from the
nearest log before them, through all layers between. Layers that lag differently are rebuilt together from the lowest
of their positions, unless that would compute many positions again in layers that hold them: then the first positions go
through the deepest layer that lacks them only, and the others follow.
"""

from __future__ import annotations

from collections.abc import Mapping

from swarm.broker.state import Plan, Rebuild, Sequence
from swarm.wire.messages import Activated, HeldSequence, LayerRange, SequenceRange, to_ranges

# Fewest positions for which a run is split: each part reads all its weights at least once.
MIN_SPLIT = 256


def find_rebuild_runs(
    sequence: Sequence, plan: Plan, reports: Mapping[str, Activated], *, shared: int = 0, from_tokens: bool = False
) -> list[Rebuild] | int:
    """Return the replays that are needed until every layer holds ``sequence.kv`` positions, in their order. If most of
    that work would go through all layers, return instead the position from which the sequence is to be computed again
    like a prompt, in steps shared with others. ``shared``: positions that every layer gets from another sequence."""
    target = sequence.kv
    positions = [max(shared, position) for position in layer_positions(sequence, plan, reports)]
    lacking = [layer for layer, position in enumerate(positions) if position < target]
    start = min((positions[layer] for layer in lacking), default=target)
    wanted = SequenceRange(sequence.id, start, target)
    parts: list[tuple[str | None, LayerRange]] = []  # a log, and the layers through which it goes
    for lost in to_ranges(lacking):
        source, boundary = (None, 0)
        if not from_tokens:
            source, boundary = _find_nearest_log(wanted, lost.first, plan, reports)
        # it would go through layers of the part before: merge both
        if parts and boundary < parts[-1][1].stop:
            source, before = parts.pop()
            boundary = before.first
        parts.append((source, LayerRange(boundary, lost.stop)))
    runs = [run for source, through in parts for run in _split(source, through, positions, target)]
    whole = sum(run.cost for run in runs if run.through == LayerRange(0, len(positions)))
    return start if 2 * whole > sum(run.cost for run in runs) else runs


def _split(source: str | None, through: LayerRange, positions: list[int], target: int) -> list[Rebuild]:
    """Return the runs that rebuild the lagging layers in ``through``, whose first layer the log enters."""
    held = {layer: positions[layer] for layer in range(through.first, through.stop)}
    lacking = {layer: position for layer, position in held.items() if position < target}
    runs: list[Rebuild] = []
    start = min(lacking.values())
    while start < target:
        # a position from which on deeper layers are needed than before it
        cuts = [p for p in lacking.values() if p >= start + MIN_SPLIT and _deepest(lacking, p) < max(lacking)]
        stop = min(cuts, default=target)
        needed = LayerRange(through.first, _deepest(lacking, stop) + 1)
        num_lost = sum(position < stop for position in lacking.values())
        runs.append(Rebuild(source, needed, num_lost, stop, start, start))
        start = stop
    return runs


def _deepest(lacking: Mapping[int, int], position: int) -> int:
    """Return the deepest layer that lacks positions before ``position``."""
    return max(layer for layer, held in lacking.items() if held < position)


def layer_positions(sequence: Sequence, plan: Plan, reports: Mapping[str, Activated]) -> list[int]:
    """Return the position up to which each layer of the model holds the sequence."""
    positions: list[int] = []
    for stage in plan.stages:
        held = next((h for h in reports[stage.incarnation].held if h.sequence == sequence.id), None)
        positions.extend(_position(held, layer) for layer in range(stage.layers.first, stage.layers.stop))
    return positions


def _position(held: HeldSequence | None, layer: int) -> int:
    if held is None:
        return 0
    return next((r.position for r in held.kv if r.layers.first <= layer < r.layers.stop), 0)


def _find_nearest_log(
    wanted: SequenceRange, layer: int, plan: Plan, reports: Mapping[str, Activated]
) -> tuple[str | None, int]:
    """Return the stage whose log has the inputs of ``layer``, or of a layer before it, at these positions, and can send
    them there: a stage reaches the next stage, and its own layers. (None, 0): there is no such log, and the tokens must
    serve."""
    best: tuple[str | None, int] = (None, 0)
    for stage in plan.stages:
        for entry in reports[stage.incarnation].logs:
            reaches = stage.layers.first < entry.boundary <= stage.layers.stop
            whole = entry.sequence == wanted.sequence and entry.start <= wanted.start and wanted.stop <= entry.stop
            if reaches and whole and best[1] < entry.boundary <= layer:
                best = stage.incarnation, entry.boundary
    return best
