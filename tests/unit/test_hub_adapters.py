"""Adapters by name: the real package against a stand-in hub on loopback."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.files_of_models import safetensors
from tests.standin_hub import COMMIT, NAME, Hub, standin

ROOT = Path(__file__).parents[2]
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
pytestmark = pytest.mark.slow  # each test starts a process

PROGRAM = """
import sys
from swarm.errors import ModelError
from swarm.hub.adapter_lookup import look_up_adapter
from swarm.hub.names import parse_name

try:
    print(look_up_adapter(parse_name(sys.argv[1])))
except ModelError as error:
    sys.exit(f"error: {error}")
finally:
    assert "torch" not in sys.modules
"""

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def hub() -> Iterator[Hub]:
    """A hub that has an adapter, among files that nobody here needs."""
    module = "base_model.model.model.layers.0.mlp.up_proj"
    files = {
        CONFIG: json.dumps({"peft_type": "LORA"}).encode(),
        WEIGHTS: safetensors(f"{module}.lora_A.weight", f"{module}.lora_B.weight"),
        "README.md": b"# red",
        "adapter_model.bin": b"a pickle",
        "tokenizer.json": b"{}",
        "checkpoint-100/adapter_model.safetensors": b"an earlier one",
    }
    with standin(files) as served:
        yield served


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Look a name up in a process of its own: the package reads its variables once."""

    def run(name: str = NAME, endpoint: str = "http://127.0.0.1:9", **variables: str) -> Any:
        clean = {key: value for key, value in os.environ.items() if not key.startswith("HF_")}
        ours = {"PYTHONPATH": str(ROOT), "HF_HUB_CACHE": str(tmp_path / "cache"), "HF_HOME": str(tmp_path / "home")}
        return subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM, name],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
            env={**clean, **ours, "HF_ENDPOINT": endpoint, **variables},
        )

    return run


def folder_of(process: subprocess.CompletedProcess[str]) -> Path:
    assert (process.returncode, process.stderr) == (0, "")
    return Path(process.stdout.strip())


def error_of(process: subprocess.CompletedProcess[str]) -> str:
    assert (process.returncode, process.stdout) == (1, "")
    (line,) = process.stderr.splitlines()
    return line


@pytest.mark.parametrize("redirects", [False, True])
def test_the_two_files_of_an_adapter_are_fetched(hub: Hub, run: Run, redirects: bool) -> None:
    """Into a folder that has the commit's name. Large files may come from another host."""
    hub.redirects = redirects
    folder = folder_of(run(endpoint=hub.endpoint))
    assert folder.name == COMMIT
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        name: hub.files[name] for name in (CONFIG, WEIGHTS)
    }


@pytest.mark.parametrize("name", [NAME, f"{NAME}@main", f"{NAME}@{COMMIT}"])
def test_the_second_time_no_request_is_made(hub: Hub, run: Run, name: str) -> None:
    """By the branch's name and by the commit's: another worker gets it by the commit's."""
    folder = folder_of(run(endpoint=hub.endpoint))
    assert folder_of(run(name)) == folder
    hub.asked.clear()
    assert folder_of(run(name, hub.endpoint)) == folder
    assert hub.asked == []


def test_an_adapter_is_fetched_by_its_commit(hub: Hub, run: Run) -> None:
    """As workers do that are told what the others have."""
    name = f"{NAME}@{COMMIT}"
    folder = folder_of(run(name, hub.endpoint))
    assert folder.name == COMMIT
    assert folder_of(run(name)) == folder


@pytest.mark.parametrize("file", [CONFIG, WEIGHTS])
def test_a_repository_without_one_of_the_files_is_refused(hub: Hub, run: Run, file: str, tmp_path: Path) -> None:
    """A pickle or a folder's file of this name does not count; nothing is fetched."""
    del hub.files[file]
    error = error_of(run(endpoint=hub.endpoint))
    assert error == f"error: {NAME} has no {file} at the hub; is it an adapter in peft's format?"
    assert hub.fetched() == []


def test_a_download_that_broke_off_is_completed_by_the_next_look_up(hub: Hub, run: Run) -> None:
    """The small file alone in the cache is no adapter."""
    hub.cut[WEIGHTS] = 10
    error = error_of(run(endpoint=hub.endpoint))
    assert f"lacks {WEIGHTS} of {NAME}@{COMMIT}, and fetching from the hub at {hub.endpoint} failed (" in error
    hub.cut.clear()
    hub.asked.clear()
    folder = folder_of(run(endpoint=hub.endpoint))
    assert (folder / WEIGHTS).read_bytes() == hub.files[WEIGHTS]
    assert CONFIG not in hub.fetched()


def test_offline_without_the_weights_the_error_names_the_adapter(hub: Hub, run: Run) -> None:
    hub.cut[WEIGHTS] = 10
    error_of(run(endpoint=hub.endpoint))
    error = error_of(run(HF_HUB_OFFLINE="1"))
    assert f"there is no directory or file {NAME}, the cache " in error
    assert "HF_HUB_OFFLINE forbids to ask the hub; unset it, or name a local directory" in error


@pytest.mark.parametrize(
    ("name", "refusal", "words"),
    [
        (NAME, (403, "GatedRepo"), "is gated (403): accept its terms"),
        ("nobody/red", None, "shows no such model (404): check the name"),
        (f"{NAME}@blue", None, "has no revision blue at"),
    ],
)
def test_the_hub_s_refusals_take_one_line(
    hub: Hub, run: Run, name: str, refusal: tuple[int, str] | None, words: str
) -> None:
    hub.refusal = refusal
    assert words in error_of(run(name, hub.endpoint))
