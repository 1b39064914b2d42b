"""The project's own requirements and the pins that the tools install with."""

from __future__ import annotations

import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from swarm.version import DISTRIBUTION, install_command

REPOSITORY = Path(__file__).parents[2]
HEAVY = {"torch", "transformers", "safetensors"}


def project() -> dict[str, list[Requirement]]:
    """Requirements by extra; the client's, which are everybody's, under the empty name."""
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    groups = {"": table["dependencies"], **table["optional-dependencies"]}
    return {extra: [Requirement(text) for text in texts] for extra, texts in groups.items()}


def pins() -> dict[str, str]:
    """Version by name; every line that is no comment must be an exact pin."""
    found = {}
    for line in (REPOSITORY / "constraints.txt").read_text().splitlines():
        if not line.startswith("#"):
            (specifier,) = Requirement(line).specifier
            assert specifier.operator == "==", line
            found[canonicalize_name(Requirement(line).name)] = specifier.version
    return found


def test_every_requirement_is_pinned_within_its_range() -> None:
    """What pyproject.toml asks for, constraints.txt pins, to a version that pyproject.toml allows."""
    pinned = pins()
    for requirements in project().values():
        for requirement in requirements:
            if requirement.name != DISTRIBUTION:
                assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_an_extra_is_installed_by_the_tool_that_made_the_environment(tmp_path: Path) -> None:
    assert install_command("worker", tmp_path) == "pip install 'swarm-llm[worker]'"
    (tmp_path / "pipx_metadata.json").touch()
    assert install_command("worker", tmp_path) == "pipx install --force 'swarm-llm[all,worker]'"
    (tmp_path / "uv-receipt.toml").touch()
    assert install_command("discover", tmp_path) == "uv tool install 'swarm-llm[all,discover]'"


def test_torch_is_pinned_exactly() -> None:
    """Another torch would replace the installed build and bring gigabytes."""
    assert pins()["torch"] == "2.13.0"


def test_a_client_needs_no_torch() -> None:
    """Only the worker's extra asks for the heavy packages."""
    asking = {extra for extra, found in project().items() if HEAVY & {requirement.name for requirement in found}}
    assert asking == {"worker"}
