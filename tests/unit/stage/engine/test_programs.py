"""A program's step beside that of its modules: one bit that differs, and the modules compute."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")

from swarm.stage.engine import dry_runs  # noqa: E402
from swarm.stage.model import program  # noqa: E402

WHY = "a step as one call has other bits than its modules"


@pytest.mark.parametrize("off", [0.0, 2**-23])
def test_other_bits_turn_programs_off(off: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the whole process, with the reason; equal bits change nothing."""
    monkeypatch.setattr(program, "_refusals", [])
    rows = torch.tensor([[1.0, 0.5], [0.25, 3.0]])
    other = rows.clone()
    other[0, 0] += off
    dry_runs._compare_program(rows, other)
    assert program.disabled_reason() == (WHY if off else "")
