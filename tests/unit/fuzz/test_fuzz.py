"""A quarter of a minute of fuzzing, by parser that a peer's bytes reach. ``tools/fuzz.py`` does it for longer."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.fuzz.planted import planted
from tests.unit.fuzz.run import WHY_NOT, fuzz
from tests.unit.fuzz.seeds import seeds
from tests.unit.fuzz.targets import TARGETS

guided = pytest.mark.skipif(WHY_NOT is not None, reason=WHY_NOT or "")
SECONDS_OF_WEIGHT = 0.3  # a quarter of a minute in all
FEWEST = 50  # executions: it did something, also on a machine that is busy


@pytest.mark.parametrize("name", TARGETS)
def test_what_real_peers_send_is_no_finding(name: str) -> None:
    """Also without a fuzzer."""
    for data in seeds(name):
        TARGETS[name].run(data)


@pytest.mark.slow
@guided
@pytest.mark.parametrize("name", TARGETS)
def test_nothing_is_found(name: str, tmp_path: Path) -> None:
    outcome = fuzz(name, SECONDS_OF_WEIGHT * TARGETS[name].weight, tmp_path, seed=1)
    assert outcome.findings == []
    assert outcome.executions > FEWEST
    assert outcome.places > 0


@pytest.mark.slow
@guided
def test_what_is_wrong_is_found(tmp_path: Path) -> None:
    """Where only coverage leads to it. The input is kept, and shows it again."""
    outcome = fuzz("planted", 30.0, tmp_path, seed=1, more=("-runs=200000",))
    (finding,) = outcome.findings
    assert finding["kind"].startswith("IndexError at planted.py")
    with pytest.raises(IndexError):
        planted(Path(finding["file"]).read_bytes())
