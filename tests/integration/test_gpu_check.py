"""tools/gpu_check on a CPU, with tiny sizes: so that the first minute on a GPU is not lost to an error of the tool."""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "gpu_check"


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    loader = importlib.machinery.SourceFileLoader("gpu_check", str(TOOL))
    spec = importlib.util.spec_from_loader("gpu_check", loader)
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def run(out: Path, *options: str) -> dict[str, dict[str, object]]:
    """Run the tool, with a model of its own; return the parts of its report."""
    command = [sys.executable, str(TOOL), "--device", "cpu", "--tiny", "--out", str(out), "--model", str(out / "model")]
    subprocess.run([*command, *options], check=False, timeout=280)
    return json.loads((out / "gpu_check.json").read_text())["parts"]  # type: ignore[no-any-return]


def test_a_part_that_fails_does_not_stop_the_others(tool: ModuleType, tmp_path: Path) -> None:
    """Nor one that takes too long; the page has the figures of those that went well."""
    tool.LIMITS.update(first=60, second=tool.LEAST_S, third=60)
    arguments = argparse.Namespace(out=tmp_path, minutes=1.0, only=None, tiny=True, device="cpu", model=tmp_path)
    check = tool.Check(arguments)
    check.ends_at += 60
    check.run("first", [sys.executable, "-c", "import sys; sys.exit('no such thing')"])
    check.run("facts", [sys.executable, "-c", 'print(\'{"gpu": "H100"}\')'])
    check.run("decode", [sys.executable, "-c", "print('{\"floor_share\": 0.8}'); print('bye')"])
    tool.LEAST_S, tool.LIMITS["second"] = 0, 0.3
    check.run("second", [sys.executable, "-c", "import time; time.sleep(60)"])
    outcomes = {name: result["outcome"] for name, result in check.results.items()}
    assert outcomes == {"first": "failed (1)", "facts": "ok", "decode": "ok", "second": "took longer than 0 s"}
    page = (tmp_path / "gpu_check.md").read_text()
    assert "* gpu: H100" in page
    assert "| decode, 1 sequence: share of the memory floor | >= 0.75 | 0.8 | yes |" in page
    assert "| decode, 64 sequences, over transformers | >= 2.0 | – | not measured |" in page
    assert "no such thing" in page


def test_all_tests_of_a_gpu_are_found(tool: ModuleType) -> None:
    """Those marked as a whole, too, which is decided elsewhere."""
    found = tool.gpu_tests()
    assert "tests/model/test_other_devices.py" in found
    assert {f"tests/model/test_cuda_matmul{part}.py" for part in ("", "_experts", "_models")} <= set(found)
    assert "tests/model/test_kinds.py" not in found


@pytest.mark.long
def test_its_parts_run_on_a_cpu(tmp_path: Path) -> None:
    """Those without a swarm of processes: each ends well, with its figures."""
    parts = run(tmp_path, "--only", "facts,model,decode,pairs,stages")
    assert {name: part["outcome"] for name, part in parts.items()} == dict.fromkeys(
        ("facts", "model", "decode", "pairs", "stages"), "ok"
    )
    assert parts["pairs"]["figures"]["differ"] == 0  # type: ignore[index]


@pytest.mark.long
def test_its_swarms_run_on_a_cpu(tmp_path: Path) -> None:
    """A stage is killed, and each of two unlike workers; and the tests of a GPU are found, and skipped."""
    parts = run(tmp_path, "--only", "model,tests,kill,mixed")
    assert {name: part["outcome"] for name, part in parts.items()} == dict.fromkeys(
        ("model", "tests", "kill", "mixed"), "ok"
    )
