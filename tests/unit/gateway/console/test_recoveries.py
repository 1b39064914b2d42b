"""Recoveries as they are told: phases while they run, and a sentence behind them."""

from __future__ import annotations

from typing import Any

import pytest

from swarm.gateway.console.recoveries import describe_recovery, format_duration, format_ranges, summarize

ROW: dict[str, Any] = {
    "epoch": 2,
    "cause": "w1 was lost",
    "evidence": "w1: its connection closed",
    "workers": ["w1"],
    "lost": [[3, 6]],
    "choice": "w0 takes layers 3–5 (warm)",
    "warm": True,
    "sequences": 2,
    "predicted": {"load_s": 0.0, "replay_s": 0.15, "total_s": 0.19},
    "measured": {"detect_s": 0.01, "plan_s": 0.002, "load_s": 0.03, "total_s": 0.212},
}
ALL = {
    f"{name}_at": 5.0
    for name in ("detected", "planned", "prepared", "activated", "replayed", "resumed_first", "resumed_all")
}


def test_phases_tick_off_one_after_the_other() -> None:
    """What has its moment is done, the next one runs, the others wait."""
    phases = describe_recovery({**ROW, "detected_at": 3.0, "planned_at": 3.1}, 100.0, {})["phases"]
    assert [(phase["name"], phase["state"]) for phase in phases] == [
        ("verdict", "done"),
        ("plan", "done"),
        ("load", "runs"),
        ("activate", "waits"),
        ("replay", "waits"),
        ("resume", "waits"),
    ]
    assert [phase["took_s"] for phase in phases] == [0.01, 0.002, None, None, None, None]
    assert [phase["predicted_s"] for phase in phases] == [None, None, 0.0, None, 0.15, None]


def test_one_that_begins_anew_goes_back() -> None:
    """Another loss in its middle: what was prepared is none any more, whatever stands behind it."""
    phases = describe_recovery({**ROW, **ALL, "prepared_at": None, "resumed_all_at": None}, None, {})["phases"]
    assert [phase["state"] for phase in phases] == ["done", "done", "runs", "waits", "waits", "waits"]


def test_one_that_is_over_has_a_sentence() -> None:
    body = describe_recovery({**ROW, **ALL}, 100.0, dict.fromkeys(range(6), "w0"))
    assert body["sentence"] == "w1 was lost; w0 took layers 3–5; 2 answers went on after 212 ms."
    assert (body["total_s"], body["sequences"]) == (0.212, 2)
    assert {phase["state"] for phase in body["phases"]} == {"done"}
    assert "sentence" not in describe_recovery({**ROW, **ALL, "resumed_all_at": None}, None, {})


def test_sentences_say_what_is_known() -> None:
    several = {**ROW, "workers": ["w1", "w2"], "lost": [[3, 5], [6, 8]], "sequences": 1, "predicted": {}}
    holders = {3: "w0", 4: "w0", 6: "w3", 7: "w0"}
    assert summarize(several, holders) == (
        "w1 and w2 were lost; w0 took layers 3–4, 7 and w3 took layer 6; 1 answer went on after 212 ms."
    )
    assert summarize({"cause": "the data path broke", "sequences": 0}, {}) == (
        "the data path broke; the plan served again."
    )


@pytest.mark.parametrize(("layers", "text"), [([3], "3"), ([3, 4, 5], "3–5"), ([8, 3, 4], "3–4, 8"), ([], "")])
def test_layers_are_told_as_ranges(layers: list[int], text: str) -> None:
    assert format_ranges(layers) == text


def test_long_times_are_told_in_seconds() -> None:
    assert [format_duration(s) for s in (0.0004, 0.212, 1.5, 12.34)] == ["0 ms", "212 ms", "1 500 ms", "12.3 s"]
