"""``swarmctl top``: what is on the screen, and what a key does, without a terminal."""

from __future__ import annotations

import pytest

from swarm.ctl.top.keys import TopCommand, TopState, drop_missing, handle_key
from swarm.ctl.top.view import KEYS, StatusLine, TopData, TopItem, render_bar, render_screen, selectable_items
from swarm.wire.messages import Json

W0, W1, R1 = TopItem("worker", "w0"), TopItem("worker", "w1"), TopItem("request", "r1")


def known(num_requests: int = 1, away_s: float | None = None, **status: object) -> TopData:
    """Two stages, which joined in the other order, a worker that is gone, and requests of which one has ended."""
    workers: list[Json] = [
        {"name": "w1", "state": "member", "layers": [4, 8], "verdict": "slow", "resident_bytes": 2 << 20},
        {"name": "w0", "state": "member", "layers": [0, 4], "verdict": "well", "kv_used": 5, "kv_capacity": 10},
        {"name": "w9", "state": "out", "layers": None, "verdict": "dead"},
    ]
    requests: list[Json] = [
        {"request_id": f"r{i + 1}", "state": "running", "num_tokens": 3, "max_tokens": 9} for i in range(num_requests)
    ]
    requests.append({"request_id": "r0", "state": "ended"})
    return TopData(
        {"state": "serving", "model": "village", "epoch": 4, "uptime_s": 90.0, "num_queued": 2, "kv_reserved": 512}
        | {"kv_capacity": 1024}
        | status,
        {"workers": workers},
        {"scheduler": {"tokens_per_s": 12.5}, "recoveries": {"ended": 3, "under_way": 1}},
        {"requests": requests},
        away_s,
    )


def drawn(of: TopData, chosen: TopItem | None = None, said: str = "", columns: int = 80, lines: int = 24) -> list[str]:
    return [line.text for line in render_screen(of, chosen, StatusLine(said), columns, lines)]


def test_a_screen_of_80_by_24() -> None:
    """The chain is in the order of a token's way; who is gone, or has ended, is not there; who is not well has
    a mark."""
    lines = drawn(known(), W1)
    assert len(lines) == 24
    assert [line.rstrip() for line in lines[:10]] == [
        "swarm  serving village, epoch 4  up 90.0 s",
        "tokens/s 12.5  running 0  queued 2  recoveries 3, one under way",
        "KV ██████████░░░░░░░░░░ 512 of 1,024 positions",
        "[w0 0–3] → [w1 4–7]",
        "  worker          layers   verdict       memory  KV",
        "  w0              0–3      well             0 B  █████░░░░░",
        "> w1              4–7      !slow        2.0 MiB  ░░░░░░░░░░",
        "  request                           state          tokens  tenant",
        "  r1                                running         3 / 9",
        "",
    ]
    assert lines[-1] == KEYS


@pytest.mark.parametrize(("columns", "lines"), [(200, 60), (80, 24), (40, 8), (39, 8), (1, 1), (0, 0)])
def test_nothing_leaves_the_screen(columns: int, lines: int) -> None:
    """Whatever the size, the names and how many there are; and no control character reaches the terminal."""
    many = known(num_requests=500, model="v\x1b[2J" * 50, waits_for="x" * 900)
    found = drawn(many, TopItem("request", "r400"), "said\n" * 90, columns, lines)
    assert len(found) <= lines
    assert all(len(line) <= columns for line in found)
    assert all(line.isprintable() for line in found)


def test_a_long_name_is_whole_if_the_screen_has_room() -> None:
    name = "build-server-07.rack3.example-w0"
    worker: Json = {"name": name, "state": "member", "layers": [0, 4], "verdict": "well", "resident_bytes": 2 << 30}
    data = TopData({}, {"workers": [worker]}, {}, {})
    assert name in " ".join(drawn(data)).split()
    assert all("…" not in line for line in drawn(data))


def test_what_is_chosen_is_seen() -> None:
    """Among more than fit: at the beginning, in the middle and at the end."""
    many = known(num_requests=500)
    for name in ("r1", "r250", "r500"):
        lines = render_screen(many, TopItem("request", name), StatusLine(), 80, 24)
        [line] = [line for line in lines if line.is_selected]
        assert line.text.split()[:2] == [">", name]
        assert len(lines) == 24


def test_an_absence_is_told_with_the_last_figures() -> None:
    """Whatever was said before. Only a question goes before it, which waits for an answer."""
    lines = drawn(known(away_s=7.2))
    assert lines[-1].startswith("the broker has not answered for 7 s")
    assert "serving village" in lines[0]
    assert drawn(known(away_s=7.2), said="cancel r1: done")[-1] == lines[-1]
    assert drawn(known(), said="cancel r1: done")[-1] == "cancel r1: done"
    [*_, asked] = render_screen(known(away_s=7.2), W0, StatusLine("drain worker w0?", is_question=True), 80, 24)
    assert asked.text == "drain worker w0?"


def test_a_broker_that_tells_nothing_yet() -> None:
    """A waiting swarm, and answers of another version."""
    assert drawn(TopData({"state": "waiting", "waits_for": "a worker"}, {}, {}, {}))[0].startswith(
        "swarm  waiting: a worker"
    )
    assert len(drawn(TopData({}, {}, {}, {}))) == 24


def test_bars() -> None:
    assert [render_bar(used, of, 4) for used, of in ((0, 0), (1, 2), (9, 2), (None, 3))] == [
        "░░░░",
        "██░░",
        "████",
        "░░░░",
    ]


# --- keys -------------------------------------------------------------------------------------------------------------


def press(keys: str, start: TopState | None = None) -> tuple[TopState, list[TopCommand]]:
    """``-`` is down, ``+`` up."""
    state, orders = drop_missing(start or TopState(), [W0, W1, R1]), []
    for key in keys:
        state, order = handle_key(state, {"-": "down", "+": "up"}.get(key, key), [W0, W1, R1])
        orders += [order] if order else []
    return state, orders


def test_items_are_in_the_order_of_the_screen() -> None:
    assert selectable_items(known()) == [W0, W1, R1]


@pytest.mark.parametrize(
    ("keys", "chosen"), [("", W0), ("-", W1), ("--", R1), ("-----", R1), ("--+", W1), ("+++", W0)], ids=str
)
def test_moving_stops_at_the_ends(keys: str, chosen: TopItem) -> None:
    state, orders = press(keys)
    assert (state.chosen, orders) == (chosen, [])


@pytest.mark.parametrize(
    ("keys", "orders"),
    [
        ("d", []),
        ("dy", [TopCommand("drain", W0)]),
        ("dn", []),
        ("dny", []),  # a yes belongs to the question before it
        ("dd", []),
        ("dq", []),
        ("-dy", [TopCommand("drain", W1)]),
        ("--cy", [TopCommand("cancel", R1)]),
        ("--dy", []),  # a request is not drained
        ("cy", []),  # nor a worker cancelled
        ("u", [TopCommand("uncordon", W0)]),  # ends nothing
        ("yyy", []),
    ],
)
def test_what_ends_something_asks_first(keys: str, orders: list[TopCommand]) -> None:
    assert press(keys)[1] == orders


def test_a_question_names_what_it_is_about() -> None:
    assert press("-d")[0].said == "drain worker w1? y: yes, any other key: no"
    assert press("-dn")[0].said == "cancelled"
    assert press("--d")[0].said == "drain: choose a worker first (↑↓)"


def test_who_goes_while_it_is_asked_about_is_not_replaced_by_the_next() -> None:
    """The yes would be for somebody else."""
    state, _ = press("-d")
    state, order = handle_key(state, "y", [W0, R1])
    assert (order, state.asked, state.chosen) == (None, None, W0)


def test_q_ends_it_but_only_answers_a_question() -> None:
    assert press("q")[0].ends
    assert not press("dq")[0].ends
    assert press("dqq")[0].ends


def test_nothing_to_choose() -> None:
    assert handle_key(TopState(W0), "down", []) == (TopState(None), None)
