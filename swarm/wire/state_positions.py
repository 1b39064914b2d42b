"""Positions at which a copy holds states. A stage's records and its memory follow the same rule.

A copy that has arrived part by part holds a state at the end of each part: at every multiple of the stride, because
each of them ends a part; and at the ends of the last two parts. The broker may count fewer positions than the last
part has, since the sender was some steps ahead of the last stage. Then the part before it counts.
"""

from __future__ import annotations

from collections.abc import Collection

from swarm.wire.messages import BLOCK, num_blocks


def positions_after_part(held: Collection[int], stop: int, stride: int) -> set[int]:
    """Return the positions at which a copied layer holds states once a part up to ``stop`` is written.

    Positions behind the part, in its last block, may be lost, and their states with them.
    """
    end = num_blocks(stop) * BLOCK
    left = {position for position in held if position <= stop or position >= end} | {stop}
    newest = sorted(left)[-2:]
    return {position for position in left if position % stride == 0 or position in newest}


def last_held(held: Collection[int], position: int) -> int:
    """Return the last of these positions that is not behind ``position``; 0 if there is none."""
    return max((each for each in held if each <= position), default=0)
