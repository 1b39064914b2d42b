"""A draft model in whole swarms with accidents: right or wrong, late or dead, it changes no answer."""

from __future__ import annotations

from collections import Counter
from typing import get_args

import msgspec
import pytest

from swarm.broker.speculation import drafts
from swarm.sim.run import run
from swarm.sim.schedules.schedule import DraftBehaviour
from swarm.wire.draft_messages import AskedSequence
from tests.unit.sim.groups import NUM, in_groups, with_and_without_disks


@in_groups
@with_and_without_disks
def test_accidents_beside_a_draft_model(first_seed: int, spills: bool) -> None:
    """Its tokens are proposed, and it misbehaves in every way (in other groups than the first, in most ways), although
    workers, connections and brokers are lost."""
    played = [run(seed, drafts=True, spills=spills) for seed in range(first_seed, first_seed + NUM)]
    assert [(o.seed, o.failure) for o in played if o.failure] == []
    assert sum(o.num_drafted for o in played) > 10 * NUM
    done: Counter[str] = sum((Counter(o.faults) for o in played), Counter())
    behaviours = {f"draft {behaviour}" for behaviour in get_args(DraftBehaviour)}
    assert len(behaviours - done.keys()) <= (4 if first_seed else 0), behaviours - done.keys()


def test_without_it_nothing_is_drafted() -> None:
    assert run(5).num_drafted == 0


def test_other_tokens_in_the_draft_model_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Here the broker leaves out the first token of each request."""

    def leave_out(wish: drafts._Wish) -> AskedSequence:
        entry = make(wish)
        return msgspec.structs.replace(entry, tokens=entry.tokens[1:])

    make = drafts._entry
    monkeypatch.setattr(drafts, "_entry", leave_out)
    failures = (run(seed, drafts=True).failure for seed in range(NUM))
    assert "the draft model has other tokens" in next((failure for failure in failures if failure is not None), "")
