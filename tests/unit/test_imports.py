"""Who may import what: a client machine and a broker have no torch, and deciding code does no I/O."""

from __future__ import annotations

import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest

import swarm

HEAVY = ("torch", "transformers", "safetensors", "huggingface_hub")
PACKAGE = Path(swarm.__file__).parent


def modules_of(*packages: str) -> list[str]:
    """The packages and every module in them."""
    names = []
    for package in packages:
        names.append(package)
        folder = PACKAGE.parent / package.replace(".", "/")
        names += [found.name for found in pkgutil.walk_packages([str(folder)], package + ".")]
    return names


def imported_by(modules: list[str]) -> set[str]:
    """The names in sys.modules of a fresh interpreter after importing these."""
    code = "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code, *modules],
        cwd=PACKAGE.parent,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return set(done.stdout.splitlines()[-1].split())  # a module that prints its text when run has printed it before


@pytest.mark.slow
@pytest.mark.parametrize(
    "packages",
    [
        ("swarm",),
        ("swarm.client", "swarm.wire", "swarm.config", "swarm.log", "swarm.clock", "swarm.demo"),
        ("swarm.broker",),
        ("swarm.ctl",),
        ("swarm.cli",),
    ],
    ids=" ".join,
)
def test_no_torch_where_none_is_needed(packages: tuple[str, ...]) -> None:
    """Importing every module of the client, the broker and the commands loads neither torch nor transformers."""
    existing = [package for package in packages if _exists(package)]
    assert existing
    heavy = imported_by([m for p in existing for m in modules_of(p)] if existing != ["swarm"] else ["swarm"])
    assert not heavy & set(HEAVY)


def test_importing_swarm_is_light() -> None:
    """``import swarm`` alone doesn't pull the event loop of zmq or the settings library either."""
    assert not imported_by(["swarm"]) & {"zmq", "pydantic", "typer"}


def _exists(package: str) -> bool:
    path = PACKAGE.parent / package.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()
