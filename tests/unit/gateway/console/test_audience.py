"""What an audience is told: numbered, remembered for those who come back, and bounded."""

from __future__ import annotations

import functools
import json
from typing import Any

from swarm.gateway.console.broadcast import MAX_UPDATE_BYTES, MAX_UPDATES, Broadcast
from swarm.gateway.console.patch import apply_patch

LIFE = "0123456789abcdef"


def read(told: bytes) -> list[tuple[str, str, Any]]:
    """Events as (id, name, data)."""
    found = []
    for block in told.decode().removesuffix("\n\n").split("\n\n"):
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        found.append((fields["id"], fields["event"], json.loads(fields["data"])))
    return found


def audience() -> Broadcast:
    made = Broadcast(LIFE)
    made.set_first_view({"at": 1.0, "n": 0})
    return made


def test_a_change_is_told_as_a_patch_with_a_number() -> None:
    told = audience().publish({"at": 2.0, "n": 1})
    assert [read(each) for each in told] == [[(f"{LIFE}-1", "delta", {"n": 1, "at": 2.0})]]


def test_the_clock_alone_is_no_news() -> None:
    made = audience()
    assert made.publish({"at": 2.0, "n": 0}) == []
    assert made.last_number == 0


def test_who_comes_back_gets_what_it_lacks() -> None:
    """Whatever was the last that it heard, it comes to the same view."""
    made, views = audience(), [{"at": 1.0, "n": 0}]
    for n in range(1, 6):
        made.publish({"at": float(n), "n": n})
        views.append(made.view)
    for heard, view in enumerate(views):
        lacks = made.updates_since(f"{LIFE}-{heard}")
        assert lacks is not None
        patches = [patch for each in lacks for _, _, patch in read(each)]
        assert functools.reduce(apply_patch, patches, view) == made.view
    assert made.updates_since(f"{LIFE}-5") == []


def test_who_names_another_life_or_nothing_known_gets_all() -> None:
    made = audience()
    made.publish({"n": 1})
    for last in ("", "1", f"{'f' * 16}-1", f"{LIFE}-2", f"{LIFE}-", "0" * 200, f"{LIFE}-1\n"):
        assert made.updates_since(last) is None
    (identity, event, view) = read(made.snapshot({"series": {"at": []}}, []))[0]
    assert (identity, event, view) == (f"{LIFE}-1", "snapshot", {"n": 1, "series": {"at": []}})


def test_what_is_remembered_is_bounded() -> None:
    """By number and by size; what is forgotten is given as a whole view."""
    made = audience()
    for n in range(1, MAX_UPDATES + 10):
        made.publish({"n": n})
    assert made.updates_since(f"{LIFE}-8") is None
    assert len(made.updates_since(f"{LIFE}-9") or ()) == MAX_UPDATES
    large = audience()
    for n in range(1, 6):
        large.publish({"n": n, "text": f"{n}" * (MAX_UPDATE_BYTES // 3)})
    assert large.updates_since(f"{LIFE}-2") is None
    assert len(large.updates_since(f"{LIFE}-3") or ()) == 2


def test_events_are_told_beside_changes_and_after_a_whole_view() -> None:
    made = audience()
    told = made.publish({"at": 1.0, "n": 1}, [{"event": "verdict"}])
    assert [read(each)[0][1] for each in told] == ["delta", "events"]
    assert [name for _, name, _ in read(made.snapshot({}, [{"event": "verdict"}]))] == ["snapshot", "events"]
    assert len(made.updates_since(f"{LIFE}-1") or ()) == 1
