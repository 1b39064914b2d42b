"""``swarm bench``: what the command itself says. With real processes it is tried in tests/integration/test_bench.py."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from swarm.bench.processes.pipe_messages import ShareProgress
from swarm.cli.bench import JsonLinesView
from swarm.cli.main import run as swarm


def test_without_aiohttp_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "aiohttp", None)
    assert swarm(["bench", "http://127.0.0.1:9"]) == 1
    assert "pip install 'swarm-llm[bench]'" in capsys.readouterr().err


def test_other_commands_do_without_aiohttp() -> None:
    """It is an extra: a machine that only runs workers has none."""
    code = "import sys; sys.modules['aiohttp'] = None; import swarm.cli.app, swarm.cli.bench"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0


def test_progress_for_programs_is_one_line_a_second_at_most() -> None:
    told: list[str] = []
    view = JsonLinesView(lambda lines, data: told.append(json.dumps(data)))
    view.begin("8 in flight for 2 s", 2.0, None)
    for _ in range(50):
        view.progress(ShareProgress(1, 2, 3, 4))
    assert [json.loads(text)["event"] for text in told] == ["load", "progress"]
    assert json.loads(told[1])["num_failed"] == 2
