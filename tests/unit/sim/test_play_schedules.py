"""The tool for long runs: what was played is not played again, and the figures of all ranges are told together."""

from __future__ import annotations

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parents[3] / "tools" / "play_schedules.py"


def test_it_goes_on_behind_what_was_played(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line per range; a range that is there is left out, and a violation is told with its seed."""
    spec = spec_from_file_location("play_schedules", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = module_from_spec(spec)
    spec.loader.exec_module(tool)
    monkeypatch.setattr(tool, "RANGE", 2)
    log, played = tmp_path / "played.jsonl", []
    real = tool.run_many

    def watched(first: int, count: int) -> object:
        played.append((first, count))
        return real(first, count)

    monkeypatch.setattr(tool, "run_many", watched)
    tool.play(log, 10, 3, None)
    assert played == [(10, 2), (12, 1)]
    tool.play(log, 10, 3, None)
    tool.play(log, 10, 9, "00:00")
    assert played == [(10, 2), (12, 1)]
    assert tool.summary(log).startswith("3 schedules, ")
    assert tool.summary(log).count("0 violations") == 1
    log.write_text(log.read_text().replace('"violations": []', '"violations": [[12, "I1: lost"]]', 1))
    assert tool.summary(log).endswith("seed 12: I1: lost")
