"""What a part needs that is not installed is named before it starts."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from swarm.cli.meta import packages

ROOT = Path(__file__).parents[3]
# As where a client alone is installed.
WITHOUT = """
import importlib.util, sys
found = importlib.util.find_spec
gone = sys.argv.pop(1).split()
importlib.util.find_spec = lambda name, package=None: None if name in gone else found(name, package)
from swarm.cli.main import main
main()
"""
OF_A_WORKER = "(torch, transformers, safetensors, huggingface_hub, uvloop): pip install 'swarm-llm[worker]'"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["up", "--workers", "1"], 1, "the broker needs packages that are not installed (uvloop): pip install"),
        (["profile"], 1, "the broker needs packages that are not installed (uvloop): pip install"),
        (["broker"], 1, "the broker needs packages that are not installed (uvloop): pip install 'swarm-llm[broker]'"),
        (["worker"], 1, f"a worker needs packages that are not installed {OF_A_WORKER}"),
        (["gateway"], 78, "(fastapi, uvicorn, uvloop, aiohttp, prometheus_client): pip install 'swarm-llm[gateway]'"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_is_not_installed_is_one_line_before_anything_starts(arguments: list[str], code: int, words: str) -> None:
    """A swarm of children that can't begin would be started again and again; a service is, since an upgrade that is
    under way may bring what it lacks."""
    gone = " ".join({name for names in packages._NEEDED.values() for name in names})
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, gone, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout) == (code, "")
    assert line.startswith("swarm: ")
    assert words in line


@pytest.mark.parametrize("part", packages._NEEDED)
def test_an_extra_brings_what_its_part_needs(part: str) -> None:
    wanted = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][part]
    brought = {re.split(r"[<>=;]", each)[0].replace("-", "_") for each in wanted}
    # Without the latter workers start by themselves.
    assert brought - {"setproctitle"} == set(packages._NEEDED[part])
    assert packages.missing_packages(part) == ""
