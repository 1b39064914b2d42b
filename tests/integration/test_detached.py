"""``swarm up --detach`` with ``ps``, ``logs`` and ``down``, and ``swarm demo``, as processes."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.processes import KEEPER, free_ports

ROOT = Path(__file__).parents[2]
PATIENCE_S = 120.0


class Terminal:
    """A user's shell in a directory of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.environment = {
            **{name: value for name, value in os.environ.items() if name != "SWARM_URL"},
            "PYTHONPATH": str(ROOT),
            "TMPDIR": str(directory),
            "XDG_STATE_HOME": str(directory),
            "OMP_NUM_THREADS": "1",
        }

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "swarm", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=self.directory,
            env=self.environment,
        )

    def run(self, *arguments: str) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        with self.start(*arguments) as process:
            try:
                out, error = process.communicate(timeout=PATIENCE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                raise
        return process.returncode, out, error

    def processes(self) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter():
            try:
                if process.cwd() == str(self.directory) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except psutil.Error:
                continue
        return found

    def until_empty(self) -> None:
        """Wait until no process of this directory is left."""
        _, left = psutil.wait_procs(self.processes(), timeout=30)
        assert [process.cmdline() for process in left] == []


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    one = Terminal(tmp_path)
    yield one
    for process in one.processes():
        process.kill()


def test_a_detached_swarm_is_listed_logged_and_ended(terminal: Terminal) -> None:
    """It returns when it serves; a second one on its ports is refused; a killed one is not listed."""
    port = free_ports(2)
    code, out, error = terminal.run("up", "-d", "--workers", "1", "--no-http", "--port", str(port))
    assert (code, error) == (0, ""), out
    assert "serving village on 1 worker" in out
    assert "Ctrl-C" not in out

    code, out, error = terminal.run("ps", "--json")
    (row,) = json.loads(out)
    assert (row["name"], row["state"], row["workers"]) == ("village", "serving", 1)
    assert row["url"] == f"tcp://127.0.0.1:{port}"
    assert terminal.run("ps")[1].splitlines()[1].split()[:3] == ["village", "serving", "1"]
    assert "serving village on 1 worker" in terminal.run("logs", "village")[1]

    code, out, error = terminal.run("up", "-d", "--no-http", "--port", str(port))
    assert code == 1
    assert error.startswith(f"swarm: port {port} is in use")

    following = terminal.start("logs", "--follow", str(port))
    assert terminal.run("down") == (0, f"stopped village (port {port})\n", "")
    out, error = following.communicate(timeout=PATIENCE_S)
    assert (following.returncode, error) == (0, "")
    assert out.splitlines()[-1] == "stopping (at most 5 s)"
    terminal.until_empty()
    assert not list(terminal.directory.glob("swarm-up-*"))
    assert terminal.run("ps") == (0, "", "no swarm up runs; start one with: swarm up --detach\n")
    code, _, error = terminal.run("down")
    assert (code, error.count("\n")) == (1, 1)
    assert "stopping" in terminal.run("logs", "-n", "1", str(port))[1]


def test_several_swarms_and_one_that_was_killed(terminal: Terminal) -> None:
    """Without workers, up to the broker's first answer. A name that fits several is refused."""
    ports = free_ports(2), free_ports(2)
    for port in ports:
        code, _, error = terminal.run("up", "-d", "--workers", "0", "--no-http", "--port", str(port))
        assert (code, error) == (0, "")
    rows = json.loads(terminal.run("ps", "--json")[1])
    assert [row["state"] for row in rows] == ["waiting", "waiting"]
    code, _, error = terminal.run("down", "village")
    assert code == 1
    assert "several swarms run" in error
    os.kill(rows[0]["pid"], signal.SIGKILL)
    psutil.Process(rows[0]["pid"]).wait(PATIENCE_S)
    assert [row["pid"] for row in json.loads(terminal.run("ps", "--json")[1])] == [rows[1]["pid"]]
    assert terminal.run("down", str(ports[1]))[0] == 0
    terminal.until_empty()


def test_a_wrong_model_fails_with_one_line(terminal: Terminal) -> None:
    code, _, error = terminal.run("up", "--detach", "--model", "./nowhere")
    assert (code, error.count("\n")) == (1, 1)
    assert error.startswith("swarm: there is no directory ./nowhere")
    terminal.until_empty()


def test_a_wrong_command_line_has_the_same_exit_code_as_without_detach(terminal: Terminal) -> None:
    arguments = ("up", "--model", "a", "--model", "b", "--adapter", "red=c")
    code, _, error = terminal.run(*arguments, "--detach")
    assert (code, error.count("\n")) == (2, 1)
    assert "adapters go with one model: give one --model, or no adapter" in error
    assert terminal.run(*arguments) == (code, "", error)


def test_without_a_state_directory_it_fails_with_one_line(terminal: Terminal) -> None:
    terminal.environment["XDG_STATE_HOME"] = os.devnull
    code, _, error = terminal.run("up", "--detach", "--workers", "0", "--no-http", "--port", str(free_ports(2)))
    assert (code, error.count("\n")) == (1, 1)
    assert error.endswith("can't be written (Not a directory); run without --detach\n")
    terminal.until_empty()


def test_a_terminal_shows_a_death_in_words(terminal: Terminal) -> None:
    """A worker under swarm up is killed: lines for people, and none of the log's JSON; swarm generate shows the prompt
    and the figures."""
    port = free_ports(2)
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "swarm", "up", "--workers", "2", "--no-http", "--port", str(port)]
    environment = {**terminal.environment, "TERM": "xterm"}
    with subprocess.Popen(command, stdout=its, stderr=its, cwd=terminal.directory, env=environment) as up:
        shown = read_until(ours, "Ctrl-C stops it")
        (worker,) = (process for process in terminal.processes() if is_worker(process, "w1"))
        worker.kill()
        shown = read_until(ours, "serving with a new plan")
        assert "w1 was ended by SIGKILL; restarting it in 0.05 s" in shown
        assert not any(line.lstrip().startswith("{") or '{"' in line for line in shown.splitlines()), shown

        url = f"tcp://127.0.0.1:{port}"
        asking = [*command[:3], "generate", "Once upon", "--max-tokens", "5", "--url", url]
        done = subprocess.run(asking, stdout=its, stderr=its, check=False, timeout=PATIENCE_S, env=environment)
        assert done.returncode == 0
        shown = read_until(ours, "first token after")
        assert "\x1b[2mOnce upon\x1b[22m" in shown
        assert re.search(r"5 tokens, \d+\.\d tokens/s, first token after", shown)
        piped = terminal.run("generate", "Once upon", "--max-tokens", "5", "--url", url)
        assert (piped[0], piped[2]) == (0, "")
        asked = terminal.run("generate", "Once upon", "--max-tokens", "5", "--url", url, "--stats")
        assert asked[1] == piped[1]
        assert asked[2].startswith("5 tokens, ")
        up.send_signal(signal.SIGINT)
    os.close(its)
    os.close(ours)
    assert up.returncode == 0


def is_worker(process: psutil.Process, name: str) -> bool:
    return f"--name {name} " in " ".join(process.cmdline()) + " " and process.name() != KEEPER


def read_until(terminal: int, words: str) -> str:
    """What a terminal shows, up to these words."""
    shown, until = b"", time.monotonic() + PATIENCE_S
    while words not in shown.decode(errors="replace"):
        ready, _, _ = select.select([terminal], [], [], until - time.monotonic())
        assert ready, shown
        shown += os.read(terminal, 4096)
    return shown.decode(errors="replace")


def test_demo(terminal: Terminal) -> None:
    """Without a terminal: a worker dies in the middle, the answers are the same, lines are short, nothing is left."""
    code, out, error = terminal.run("demo")
    assert (code, error) == (0, ""), out
    assert max(map(len, out.splitlines())) <= 80
    victim, pid = re.search(r"kill -9 (\d+): (w\d) is dead", out).group(2, 1)  # type: ignore[union-attr]
    assert f"{victim} has layers" in out
    assert f"(process {pid})" in out
    assert re.search(rf"{victim} died after 40 tokens\. The answer paused for \d+\.\d\d s and went on", out)
    with_death, without = re.findall(r"^with\w* .* tokens, SHA-256 ([0-9a-f]{16})$", out, re.MULTILINE)
    assert with_death == without
    assert "The tokens are the same." in out
    assert [line.split("  ")[1] for line in out.splitlines()[-3:]] == [
        "swarm up --detach",
        'swarm generate "Once upon a time"',
        "swarm up --model DIR",
    ]
    terminal.until_empty()
    assert not list(terminal.directory.glob("swarm-up-*"))


def test_demo_cleans_up_after_an_interrupt(terminal: Terminal) -> None:
    """While workers start, and while they answer."""
    for words in ("Starting", "process"):
        with terminal.start("demo") as process:
            assert process.stdout is not None
            while words not in (line := process.stdout.readline()):
                assert line
            process.send_signal(signal.SIGINT)
            _, error = process.communicate(timeout=PATIENCE_S)
        assert (process.returncode, error) == (130, "")
        terminal.until_empty()
        assert not list(terminal.directory.glob("swarm-up-*"))
