"""The worked example in ``docs/how-to/operations.md`` (Sizing) has the figures that the planner and a worker reckon."""

from __future__ import annotations

import re
from pathlib import Path

from swarm.broker.planner.problem import Device, Model, Problem, Shortage
from swarm.broker.planner.solve import solve
from swarm.stage.shell.budget import share_out
from swarm.wire.messages import LayerRange

PAGE = (Path(__file__).parents[4] / "docs" / "how-to" / "operations.md").read_text()
MIB = 1 << 20
GRID = 32  # positions of a block, in which room is counted
HIDDEN, INTERMEDIATE, HEADS, SIZE, WORDS = 4096, 14336, 8, 128, 128_256
LAYER = 2 * (2 * HIDDEN**2 + 2 * HIDDEN * HEADS * SIZE + 3 * HIDDEN * INTERMEDIATE + 2 * HIDDEN)
VOCABULARY = 2 * WORDS * HIDDEN
MODEL = Model(
    name="8b",
    layer_bytes=(LAYER,) * 32,
    embed_bytes=VOCABULARY,
    head_bytes=VOCABULARY + 2 * HIDDEN,
    kv_bytes=(2 * HEADS * SIZE * 2,) * 32,
    layer_weights=(1.0,) * 32,
)


def left_of(limit_bytes: int) -> int:
    return share_out(limit_bytes, 400 * MIB, 256 * MIB).model_bytes


def planned(limit_bytes: int) -> list[tuple[str, LayerRange, int]]:
    """(worker, layers, positions) of three like machines."""
    memory = left_of(limit_bytes)
    devices = tuple(
        Device(name=f"w{n}", memory_bytes=memory, layer_s=0.005, head_s=0.010, host=f"host {n}") for n in range(3)
    )
    line = solve(Problem(MODEL, devices, kv_positions=4096))
    assert not isinstance(line, Shortage)
    return [
        (devices[each.device].name, each.layers, MODEL.kv_positions(each.layers, memory) // GRID * GRID)
        for each in line
    ]


def test_the_table() -> None:
    told = re.findall(r"^\| (w\d) \| (\d+)–(\d+) \| (.*) \|$", PAGE, re.MULTILINE)
    found = []
    for name, layers, positions in planned(8 << 30):
        weights = MODEL.weight_bytes(layers)
        left = left_of(8 << 30) - weights
        cells = [f"{int(value):,}" for value in (weights / MIB, left / MIB, left / 4 / MIB, positions)]
        found.append((name, str(layers.first), str(layers.stop - 1), " | ".join(cells)))
    assert told == found


def test_the_words_around_it() -> None:
    """What the text says beside the table: sizes of parts, what a worker has, how many sequences fit."""
    words = " ".join(PAGE.split())
    least = min(positions for _, _, positions in planned(8 << 30))
    more = min(positions for _, _, positions in planned(12 << 30))
    assert f"A layer takes {LAYER / MIB:.0f} MiB, embedding and head {VOCABULARY / MIB:,.0f} MiB each" in words
    assert MODEL.kv_bytes[0] == 4 << 10
    assert f"Of 8,192 MiB a worker has {left_of(8 << 30) // MIB:,} for weights" in words
    fits = [least // (-(-tokens // GRID) * GRID) for tokens in (500, 2000)]
    assert f"{least:,} positions at a time: {fits[0]} sequences of 500 tokens, or {fits[1]} of 2,000" in words
    assert f"With 12 GiB each it would be {more:,}" in words
