"""Model folders that bring Python code of their own: no command runs it, whatever is answered on standard input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from swarm.demo import model_path
from tests.integration.processes import START_S, free_ports
from tests.standin_hub import NAME, standin

YES = b"y\n" * 4096
TO_REFUSE_S = 3 * START_S  # torch and transformers are imported first
TO_START_S = 5.0  # for services that read no model and would go on for ever
OWN_CODE = "code of its own"
EVIL = "import os, pathlib\npathlib.Path(os.environ['RAN_BY_MODEL']).touch()\n"
CLASSES = ("AutoConfig", "AutoModel", "AutoModelForCausalLM", "AutoTokenizer", "AutoProcessor")


def add_own_code(folder: Path, **config: object) -> Path:
    """Make the embedded model, in this folder, ask for its own Python by every way that transformers has."""
    shutil.copytree(model_path(), folder)
    (folder / "evil.py").write_text(EVIL)
    (folder / "__init__.py").write_text(EVIL)
    asks = {"auto_map": dict.fromkeys(CLASSES, "evil.Evil"), "custom_pipelines": {"evil": {"impl": "evil.Evil"}}}
    written = json.loads((folder / "config.json").read_text()) | asks | config
    (folder / "config.json").write_text(json.dumps(written))
    path = folder / "tokenizer_config.json"
    tokenizer = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(tokenizer | {"auto_map": {"AutoTokenizer": ["evil.Evil", "evil.Evil"]}}))
    (folder / "generation_config.json").write_text(json.dumps({"custom_generate": "evil"}))
    return folder


@pytest.fixture
def unknown(tmp_path: Path) -> Path:
    """A kind of model that transformers doesn't have: its own code is the only way to build it."""
    return add_own_code(tmp_path / "unknown", model_type="evil", architectures=["Evil"])


@pytest.fixture
def ran(tmp_path: Path, unknown: Path) -> Iterator[Path]:
    """The file that the models' code would make. The test fails at its end if it is there."""
    mark = tmp_path / "ran"
    environment = {**os.environ, "RAN_BY_MODEL": str(mark)}
    code = (unknown / "evil.py").read_text()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert mark.exists(), "the code would not be noticed"
    mark.unlink()
    yield mark
    assert not mark.exists(), "the model's code was run"


def environment_of(ran: Path, **more: str) -> dict[str, str]:
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "SWARM_"))}
    home = str(ran.parent / "home")
    return {**clean, "HF_HOME": home, "XDG_STATE_HOME": home, "RAN_BY_MODEL": str(ran), **more}


def run_with_yes(ran: Path, *words: str, **more: str) -> tuple[int, str]:
    """Run ``swarm`` with a "y" for every question. Return its exit code and all that it wrote."""
    done = subprocess.run(
        [sys.executable, "-m", "swarm", *words],
        input=YES,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=TO_REFUSE_S,
        check=False,
        cwd=ran.parent,
        env=environment_of(ran, **more),
    )
    return done.returncode, done.stdout.decode(errors="replace")


def logs_in(folder: Path) -> str:
    return "".join(path.read_text(errors="replace") for path in sorted(folder.rglob("*.log")))


def test_a_worker_refuses_it(unknown: Path, ran: Path) -> None:
    code, said = run_with_yes(ran, "worker", "--url", f"tcp://127.0.0.1:{free_ports()}", "--model", str(unknown))
    assert code == 78, said
    assert OWN_CODE in said
    assert "Do you wish to run" not in said


def test_up_refuses_it(unknown: Path, ran: Path, tmp_path: Path) -> None:
    """The nursery imports the family before a worker is born, so both must refuse it."""
    state = tmp_path / "state"
    words = ("--model", str(unknown), "--port", str(free_ports()), "--no-http", "--state-dir", str(state))
    code, said = run_with_yes(ran, "up", "--workers", "1", *words)
    assert code != 0, said
    assert OWN_CODE in said + logs_in(state)


def test_profile_refuses_it(unknown: Path, ran: Path) -> None:
    code, said = run_with_yes(ran, "profile", "--quick", "--workers", "1", "--model", str(unknown))
    assert code != 0, said


def test_the_doctor_names_it(unknown: Path, ran: Path, tmp_path: Path) -> None:
    code, said = run_with_yes(ran, "doctor", "--json", "--state-dir", str(tmp_path), "--model", str(unknown))
    assert code == 1, said
    assert OWN_CODE in said


def test_a_known_family_is_built_by_transformers_own_classes(ran: Path, tmp_path: Path) -> None:
    """Its own code is left aside, as if the folder had none."""
    folder = add_own_code(tmp_path / "known")
    code, said = run_with_yes(ran, "doctor", "--json", "--state-dir", str(tmp_path), "--model", str(folder))
    decoded, _ = json.JSONDecoder().raw_decode(said[said.index("{") :])
    found = {each["about"]: each for each in decoded["findings"]}
    assert "layers, by sequences that decode together" in found["outlook"]["text"], (code, said)


@pytest.mark.parametrize("words", [("broker", "--port"), ("gateway", "--port"), ("generate", "Once", "--url")])
def test_who_reads_no_model_runs_no_model(unknown: Path, ran: Path, words: tuple[str, ...]) -> None:
    """The setting names the model for all of them; broker, gateway and clients never look into its folder."""
    port = free_ports()
    last = f"tcp://127.0.0.1:{port}" if words[-1] == "--url" else str(port)
    process = subprocess.Popen(
        [sys.executable, "-m", "swarm", *words, last],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=ran.parent,
        env=environment_of(ran, SWARM_MODEL=str(unknown)),
    )
    try:
        process.communicate(YES, timeout=TO_START_S)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGTERM)
    finally:
        try:
            process.wait(START_S)
        finally:
            process.kill()
            process.wait()


def test_a_hubs_code_is_not_even_fetched(unknown: Path, ran: Path) -> None:
    files = {path.name: path.read_bytes() for path in unknown.iterdir() if path.is_file()}
    with standin(files) as hub:
        words = ("--url", f"tcp://127.0.0.1:{free_ports()}", "--model", NAME)
        code, said = run_with_yes(ran, "worker", *words, HF_ENDPOINT=hub.endpoint)
    assert code == 78, said
    assert OWN_CODE in said
    assert "config.json" in hub.fetched()
    assert not [name for name in hub.fetched() if name.endswith(".py")]
    assert not list((ran.parent / "home").rglob("*.py"))
