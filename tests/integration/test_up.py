"""``swarm up`` with real broker and workers: one command, one swarm, and nothing left of it."""

from __future__ import annotations

import asyncio
import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue

import psutil
import pytest
import zmq
from safetensors.torch import load_file, save_file

from swarm.cli.output import ConsoleProgress
from swarm.cli.up.host import HostConnection
from swarm.cli.up.supervisor import AnswerRequest, Event, SwarmServing, WorkersRequested
from swarm.demo import model_path
from swarm.wire.channel import BindAddress, RouterChannel
from swarm.wire.codec import CLIENT, SERVER
from swarm.wire.messages import (
    ClientMessage,
    HostDone,
    HostHello,
    Query,
    Report,
    ServerMessage,
    StartWorkers,
)
from swarm.wire.transport.peers import MessageReceived
from tests.files_of_models import TINY_CONFIG, safetensors
from tests.integration.processes import KEEPER

ROOT = Path(__file__).parents[2]
PATIENCE_S = 60.0  # torch alone takes seconds to import, on a busy machine many


def free_ports() -> int:
    """The first of two free ports in a row, below the ephemeral range."""
    for port in random.SystemRandom().sample(range(10000, 20000, 2), 500):
        with socket.socket() as one, socket.socket() as two, contextlib.suppress(OSError):
            one.bind(("127.0.0.1", port))
            two.bind(("127.0.0.1", port + 1))
            return port
    raise AssertionError("no free ports")


def _name(command: list[str]) -> str:
    if command[:2] == ["swarm", "nursery"]:
        return "nursery"
    return command[command.index("--name") + 1] if "--name" in command else "broker"


class Up:
    """A running ``swarm up``. Its private directory, and so every child's command line, lies under ``directory``."""

    def __init__(self, directory: Path, *arguments: str) -> None:
        self.directory = directory
        self.port = free_ports()
        self._environment = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(directory), "OMP_NUM_THREADS": "1"}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "swarm", "up", "--port", str(self.port), "--no-http", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=self._environment,
            cwd=directory,
        )
        self._lines: Queue[str | None] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    @property
    def url(self) -> str:
        return f"tcp://127.0.0.1:{self.port}"

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def wait_for(self, words: str) -> str:
        """The next line with these words in it."""
        until = time.monotonic() + PATIENCE_S
        seen: list[str] = []
        while (line := self._lines.get(timeout=max(0.01, until - time.monotonic()))) is not None:
            seen.append(line)
            if words in line:
                return line
        raise AssertionError(f"{words!r} was not said, but: {seen}; {self.error()}")

    def rest(self) -> list[str]:
        """The lines that were not read yet, once it has ended."""
        return list(iter(self._lines.get, None))

    def error(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read()

    def end(self) -> tuple[int, str]:
        return self.process.wait(PATIENCE_S), self.error()

    def children(self) -> dict[str, psutil.Process]:
        """By name, found in the machine's process table; without those that keep a worker's memory."""
        found = {}
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                command = " ".join(process.cmdline()).split()
                if process.name() == KEEPER:
                    continue
                if process.pid != self.process.pid and str(self.directory) in " ".join([*command, process.cwd()]):
                    found[_name(command)] = process
        return found

    def run(self, *arguments: str, program: str = "cli") -> subprocess.CompletedProcess[str]:
        """``swarm`` (cli) or ``swarmctl`` (ctl) against this swarm."""
        return subprocess.run(
            [sys.executable, "-c", f"from swarm.{program}.main import main; main()", *arguments],
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
            env={**self._environment, "SWARM_URL": self.url},
        )

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for child in self.children().values():
            child.kill()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()


StartUp = Callable[..., Up]


@pytest.fixture
def up(tmp_path: Path) -> Iterator[StartUp]:
    started: list[Up] = []

    def start(*arguments: str) -> Up:
        started.append(Up(tmp_path, *arguments))
        return started[-1]

    yield start
    for one in started:
        one.close()


def test_one_command_is_a_swarm(up: StartUp) -> None:
    """It serves, replaces a worker that died or was ended by hand, takes one more worker, and leaves nothing behind."""
    swarm = up("--workers", "2")
    swarm.wait_for("serving")
    assert swarm.wait_for("w").split()[0] == "worker"
    answer = swarm.run("generate", "Once upon a time", "--max-tokens", "5", "--json")
    assert (answer.returncode, len(json.loads(answer.stdout)["tokens"])) == (0, 5)

    before = swarm.children()
    assert sorted(before) == ["broker", "nursery", "w0", "w1"]
    own = [before[name].memory_full_info().uss >> 20 for name in ("w0", "w1")]
    assert max(own) < 80, "what all workers import is shared: one that started by itself has some 290 MiB"
    before["w1"].kill()
    swarm.wait_for("w1 was ended by SIGKILL; restarting it in 0.05 s")
    swarm.wait_for("serving with a new plan")
    swarm.wait_for("  w1 ")  # its row in the plan's table
    assert swarm.run("generate", "Once", "--max-tokens", "3").returncode == 0

    swarm.children()["w1"].terminate()  # by hand: nobody told the swarm to do without it
    swarm.wait_for("w1 ended after SIGTERM; restarting it in 0.1 s")
    swarm.wait_for("serving with a new plan")
    swarm.wait_for("  w1 ")

    joined = swarm.run("--json", "join", "--count", "1", program="ctl")
    assert joined.returncode == 0, joined.stderr
    assert json.loads(joined.stdout)["started"] == ["w2"]

    absurd = swarm.run("join", "--memory-limit", "100MiB", program="ctl")
    assert (absurd.returncode, absurd.stdout) == (1, "")
    assert "w3 can't work: a memory limit of 100 MiB is too small" in absurd.stderr

    children = swarm.children()
    assert sorted(children) == ["broker", "nursery", "w0", "w1", "w2"]
    swarm.process.send_signal(signal.SIGINT)
    assert swarm.end() == (0, "")
    assert psutil.wait_procs(children.values(), timeout=PATIENCE_S)[1] == []
    assert not list(swarm.directory.glob("swarm-up-*"))


def test_the_quickstart_shows_a_swarm(tmp_path: Path) -> None:
    """The README's first command: the demo, and where the commands are."""
    made = ROOT / ".venv" / "installed"
    if not made.exists() or not made.read_text().endswith(" dev\n"):
        pytest.skip("this checkout has no environment of its own, which tools/check makes")
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [str(ROOT / "tools" / "quickstart")]
    done = subprocess.run(
        command, capture_output=True, text=True, env=environment, timeout=3 * PATIENCE_S, check=False, cwd=tmp_path
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert f"export PATH={ROOT}/.venv/bin:$PATH" in done.stdout
    assert "The tokens are the same." in done.stdout
    assert not list(tmp_path.glob("swarm-up-*"))


def test_without_workers_it_says_what_it_waits_for(up: StartUp) -> None:
    """``--workers 0`` is a broker alone."""
    swarm = up("--workers", "0")
    swarm.wait_for("no worker is here")
    assert list(swarm.children()) == ["broker"]


def test_up_for_programs(up: StartUp) -> None:
    """--json: an object per line; whoever starts a swarm can wait for the one that says it serves, and where."""
    swarm = up("--workers", "1", "--json")
    starting = json.loads(swarm.wait_for('"starting"'))
    assert (starting["url"], starting["num_workers"]) == (swarm.url, 1)
    assert Path(starting["logs"]).is_dir()
    assert json.loads(swarm.wait_for('"progress"'))["text"]
    serving = json.loads(swarm.wait_for('"serving"'))
    assert serving == {
        "event": "serving",
        "url": swarm.url,
        "model": "village",
        "epoch": 1,
        "stages": [{"worker": "w0", "layers": [0, 8]}],
    }
    swarm.children()["w0"].kill()
    note = json.loads(swarm.wait_for("restarting it"))
    assert note["event"] == "note"
    assert json.loads(swarm.wait_for('"serving"'))["epoch"] > 1
    swarm.process.send_signal(signal.SIGTERM)
    assert swarm.end() == (0, "")


def test_kill_9_of_up_leaves_no_process_and_the_next_one_tidies_up(up: StartUp) -> None:
    """The children die with it; its private directory is removed by the next ``swarm up``."""
    swarm = up("--workers", "1")
    swarm.wait_for("workers: w0")
    children = swarm.children()
    assert sorted(children) == ["broker", "nursery", "w0"]
    swarm.process.kill()
    assert psutil.wait_procs(children.values(), timeout=PATIENCE_S)[1] == []
    (left,) = swarm.directory.glob("swarm-up-*")
    again = up("--workers", "0")
    again.wait_for("starting")
    assert not left.exists()


@pytest.mark.parametrize("moment_s", [0.0, 0.1, 0.2, 0.4])
def test_interrupt_at_any_moment_before_the_start(up: StartUp, moment_s: float) -> None:
    """From the interpreter's first instruction on: it ends, and leaves nobody and nothing. In its very first instants
    the interpreter itself dies in its own way, before it knows of us."""
    swarm = up("--workers", "2")
    time.sleep(moment_s)  # there is no event for "somewhere in the middle of the interpreter's start"
    swarm.process.send_signal(signal.SIGINT)
    code, error = swarm.end()
    assert code in (0, 130, -signal.SIGINT) or "Fatal Python error: init_" in error, error
    assert swarm.children() == {}
    assert list(swarm.directory.iterdir()) == []


@pytest.mark.parametrize(
    ("number", "moment_s"),
    [
        *((signal.SIGINT, moment_s) for moment_s in (0.0, 0.3, 1.0)),
        (signal.SIGTERM, 0.3),  # by the same handler, so that one moment suffices
        *(pytest.param(signal.SIGTERM, moment_s, marks=pytest.mark.long) for moment_s in (0.0, 1.0)),
    ],
)
def test_interrupt_at_any_moment_of_the_start(up: StartUp, number: signal.Signals, moment_s: float) -> None:
    """While children start, import and load: quiet, exit code 0 (130 until the first child), and nobody is left."""
    swarm = up("--workers", "2")
    swarm.wait_for("starting")
    time.sleep(moment_s)  # as above
    swarm.process.send_signal(number)
    code, error = swarm.end()
    assert code == 0 or (moment_s == 0.0 and code == 130)
    assert error == ""
    assert swarm.children() == {}
    assert not list(swarm.directory.glob("swarm-up-*"))


def test_a_model_that_no_worker_can_use_ends_it_with_one_error(up: StartUp, tmp_path: Path) -> None:
    """Files that fit each other, of a model that can't be built: each worker gives up, and the command fails with the
    reason."""
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(TINY_CONFIG | {"model_type": "unheard-of"}))
    (model / "model.safetensors").write_bytes(safetensors("embed.weight", "model.layers.0.q", "model.layers.1.q"))
    swarm = up("--workers", "2", "--model", str(model))
    code, error = swarm.end()
    assert code == 1
    (line,) = error.splitlines()
    assert line.startswith("swarm: ")


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"hidden_act": "unheard-of"}, "can't build this model (unknown value 'unheard-of' of hidden_act)"),
        ({"vocab_size": 900}, "config.json requires [900, 128]; the folder's files don't belong together"),
        ({"num_key_value_heads": 3}, "could not be computed in stages"),
    ],
    ids=["without weights", "by their headers", "as a tiny model"],
)
def test_a_model_that_transformers_cannot_build_is_refused_in_one_line(
    changes: dict[str, object], problem: str, up: StartUp, tmp_path: Path
) -> None:
    """Once, with the line of ``swarm models check``. What shows without weights is found before a worker is born."""
    model = tmp_path / "model"
    shutil.copytree(model_path(), model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | changes))
    if "num_key_value_heads" in changes:  # without the tensors that contradict it
        state = load_file(model / "model.safetensors")
        save_file({name: state[name] for name in state if "_proj" not in name}, model / "model.safetensors")
    swarm = up("--workers", "3", "--model", str(model), "--state-dir", str(tmp_path / "state"), "--json")
    code, error = swarm.end()
    assert code == 1
    assert problem in error
    assert error.count("\n") == 1
    assert [event for event in swarm.rest() if "can't" in event] == []
    if "num_key_value_heads" not in changes:
        assert [path.name for path in (tmp_path / "state/logs").glob("w*.log") if path.stat().st_size] == []
    check = swarm.run("models", "check", str(model))
    assert (check.returncode, check.stderr) == (1, error)


# --- the word with the broker -----------------------------------------------------------------------------------------


class Broker:
    """The clients' door of a broker that says what the test wants."""

    def __init__(self, port: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = RouterChannel([BindAddress("127.0.0.1")], port, CLIENT.frame_limit_bytes)
        self._peer = b""
        self.status: dict[str, object] = {"state": "waiting", "waits_for": "a worker", "epoch": 0, "model": "demo"}

    async def hears(self, kind: type[ClientMessage]) -> ClientMessage:  # type: ignore[valid-type]
        """The next message of this kind; questions on the way are answered."""
        async with asyncio.timeout(PATIENCE_S):
            async for event in self._router:
                if isinstance(event, MessageReceived):
                    self._peer = event.peer
                    message, _ = CLIENT.decode(event.frames)
                    if isinstance(message, Query):
                        self._report(message.what)
                    if isinstance(message, kind):
                        return message
        raise AssertionError("the channel ended")

    def _report(self, what: str) -> None:
        stage = {"worker": "w0", "layers": [0, 8], "weight_bytes": 1}
        bodies = {"status": self.status, "plan": {**self.status, "stages": [stage]}, "nodes": {"workers": []}}
        self.says(Report(what=what, ok=True, body=bodies[what]))

    def says(self, message: ServerMessage) -> None:
        assert self._router.send(self._peer, SERVER.encode(message))

    def close(self) -> None:
        self._router.close()
        self._context.term()  # so that the port is free again


async def test_host_says_hello_starts_workers_and_follows() -> None:
    """Hello, an order with its answer, what the swarm waits for, the plan once it serves; and once more after a restart
    of the broker."""
    port, shown, events = free_ports(), io.StringIO(), asyncio.Queue[Event]()
    link = HostConnection(f"tcp://127.0.0.1:{port}", ConsoleProgress(shown), "Ctrl-C stops it")
    task = asyncio.create_task(link.run(events.put_nowait))
    for epoch in (1, 2):
        broker = Broker(port)
        hello = await broker.hears(HostHello)
        assert isinstance(hello, HostHello)
        assert hello.pid == os.getpid()
        broker.says(StartWorkers(ticket=epoch, count=2, memory_limit=1000))
        assert await asyncio.wait_for(events.get(), PATIENCE_S) == WorkersRequested(epoch, 2, 1000)
        link.answer(AnswerRequest(epoch, ("w0", "w1")))
        assert await broker.hears(HostDone) == HostDone(ticket=epoch, started=("w0", "w1"))
        assert await broker.hears(Query) != await broker.hears(Query)  # for nodes and for the status, in either order
        broker.status |= {"state": "serving", "waits_for": "", "epoch": epoch}
        answering = asyncio.create_task(broker.hears(HostDone))
        assert await asyncio.wait_for(events.get(), PATIENCE_S) == SwarmServing()
        answering.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await answering
        broker.close()
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
    lines = shown.getvalue().splitlines()
    assert "no worker is here" in lines
    assert "serving demo on 1 worker" in lines
    assert "serving with a new plan (epoch 2)" in lines
