"""Real processes under the supervisor: restarts, giving up, stopping, and nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
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

from swarm.cli.up.forkserver.client import MAX_SHORT_RUNS, ForkedProcess, ForkServer, adopt_orphans
from swarm.cli.up.processes import Lifeline, LogFile, Process

ROOT = Path(__file__).parents[2]
PATIENCE_S = 20.0  # far above anything that should happen; a loaded machine is slow


class Child:
    """A scripted child, seen from the test."""

    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._file = link.makefile("r")
        name, pid = self._file.readline().split()
        self.name, self.pid = name, int(pid)

    def says(self, text: str) -> None:
        self._link.sendall(f"say {text}".encode())
        assert self._file.readline() == "said\n"

    def goes_on(self) -> None:
        """For a nursery that halts."""
        self._link.sendall(b"on")

    def exits(self, code: int) -> None:
        self._link.sendall(f"exit {code}".encode())

    def is_gone(self, wait_s: float = PATIENCE_S) -> bool:
        """Waits for its end; False if it does not come."""
        self._link.settimeout(wait_s)
        try:
            return self._link.recv(1) == b""
        except ConnectionResetError:
            return True
        except TimeoutError:
            return False

    def close(self) -> None:
        self._file.close()
        self._link.close()


@pytest.fixture
def orphanage() -> Iterator[None]:
    """This process takes in orphans for the time of a test."""
    adopt_orphans()
    yield
    ctypes.CDLL(None).prctl(36, 0)  # PR_SET_CHILD_SUBREAPER


def _command(process: psutil.Process) -> list[str]:
    """A title that is shorter than the command line it replaces has empty words behind it."""
    return " ".join(process.cmdline()).split()


class Supervised:
    """A supervisor process and its children."""

    def __init__(self, directory: Path, num_workers: int, behaviour: str, nursery: str) -> None:
        self.directory = directory
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(directory / "s"))
        self._listener.listen(64)
        self._listener.settimeout(PATIENCE_S)
        self._children: list[Child] = []
        command = [sys.executable, str(Path(__file__).parent / "supervised.py")]
        self.process = subprocess.Popen(
            [*command, str(directory / "s"), str(directory), str(num_workers), behaviour, nursery],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": f"{ROOT}:{Path(__file__).parent}"},
        )
        self._lines: Queue[str] = Queue()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.rstrip("\n"))

    def next_child(self) -> Child:
        link, _ = self._listener.accept()
        link.settimeout(PATIENCE_S)
        self._children.append(Child(link))
        return self._children[-1]

    def next_children(self, count: int) -> dict[str, Child]:
        return {child.name: child for child in (self.next_child() for _ in range(count))}

    def next_line(self) -> str:
        return self._lines.get(timeout=PATIENCE_S)

    def send(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> tuple[int, str]:
        """Wait for the supervisor; its exit code and what it wrote on stderr."""
        code = self.process.wait(PATIENCE_S)
        assert self.process.stderr is not None
        return code, self.process.stderr.read()

    def lines(self) -> list[str]:
        """The lines on stdout that were not read yet, once the supervisor has ended."""
        self._reader.join()
        return [self._lines.get() for _ in range(self._lines.qsize())]

    def born(self) -> list[str]:
        """Names of the children that have connected and were not asked for yet, once the supervisor has ended."""
        self._listener.setblocking(False)
        names = []
        with contextlib.suppress(BlockingIOError):
            while True:
                self._children.append(Child(self._listener.accept()[0]))
                names.append(self._children[-1].name)
        return names

    def left(self) -> list[psutil.Process]:
        """Children of this supervisor that live, found without their help: the nursery, too."""
        address = str(self._listener.getsockname())
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if address in _command(process) and process.pid != self.process.pid:
                    found.append(process)
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for child in self._children:
            child.close()
        for process in self.left():
            process.kill()
        self._reader.join()
        for stream in (self.process.stdout, self.process.stderr):
            assert stream is not None
            stream.close()
        self._listener.close()


Supervise = Callable[..., Supervised]


@pytest.fixture(params=["none", "nursery"])
def supervise(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Supervise]:
    """Starts one. Each test with children that start by themselves, and with workers that a nursery forks."""
    started: list[Supervised] = []

    def start(num_workers: int, behaviour: str = "obedient", nursery: str = request.param) -> Supervised:
        started.append(Supervised(tmp_path, num_workers, behaviour, nursery))
        return started[-1]

    yield start
    for supervised in started:
        supervised.close()


def test_what_dies_is_started_again(supervise: Supervise) -> None:
    """A crashed worker and a killed broker come back as new processes; the crash is shown with the log's last lines:
    events as text, and what it said to people whole, since what to do stands at its end."""
    swarm = supervise(1)
    first = swarm.next_children(2)
    event = f'{{"event": "it_began", "level": "info", "why": "{"because of this and that " * 9}"}}'
    event_text = f"info it_began why={'because of this and that ' * 9}"
    refused = f"swarm: the journal can't be written ({'because of this and that ' * 9}): make room"
    for said in (event, "Traceback: something broke", refused):
        first["w0"].says(said)
    first["w0"].exits(3)
    second = swarm.next_child()
    assert (second.name, second.pid != first["w0"].pid) == ("w0", True)
    assert swarm.next_line() == "w0 ended with code 3; restarting it in 0.05 s"
    assert swarm.next_line() == f"  w0 | {event_text[:159]}…"
    assert swarm.next_line() == "  w0 | Traceback: something broke"
    assert swarm.next_line() == f"  w0 | {refused}"
    os.kill(first["broker"].pid, signal.SIGKILL)
    assert swarm.next_child().name == "broker"
    assert "its log" in swarm.next_line()
    assert swarm.next_line() == "broker was ended by SIGKILL; restarting it in 0.05 s"


def test_a_worker_that_cannot_work_is_not_started_again(supervise: Supervise) -> None:
    """Exit code 78: its own error is shown; the others are not touched, and nobody new appears."""
    swarm = supervise(2)
    children = swarm.next_children(3)
    children["w0"].says("swarm: the file x.safetensors is cut off")
    children["w0"].exits(78)
    assert swarm.next_line() == "w0 can't work: the file x.safetensors is cut off"
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert children["w1"].is_gone()
    assert children["broker"].is_gone()


def test_the_last_worker_that_cannot_work_ends_all(supervise: Supervise) -> None:
    """Nobody is left who could ever serve: exit code 1 and one line that says why."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    children["w0"].says("swarm: the file x.safetensors is cut off")
    children["w0"].exits(78)
    assert swarm.end() == (1, "swarm: the file x.safetensors is cut off\n")
    assert children["broker"].is_gone()


def test_the_first_worker_whose_model_no_worker_can_serve_ends_all(supervise: Supervise) -> None:
    """One line, and not one of each worker."""
    swarm = supervise(2)
    children = swarm.next_children(3)
    children["w1"].says("swarm: the model has no attention")
    children["w1"].exits(65)
    assert swarm.end() == (1, "swarm: the model has no attention\n")
    assert swarm.lines() == []
    assert children["w0"].is_gone()


def test_a_broker_that_cannot_work_ends_all(supervise: Supervise) -> None:
    """The broker's 78 ends the workers too, with the broker's reason."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    children["broker"].says("swarm: port 5700 is in use")
    children["broker"].exits(78)
    assert swarm.end() == (1, "swarm: port 5700 is in use\n")
    assert children["w0"].is_gone()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_one_signal_stops_all_in_order(supervise: Supervise, number: signal.Signals) -> None:
    """Ctrl-C, SIGTERM and a closed terminal: every child is gone, exit code 0."""
    swarm = supervise(2)
    children = swarm.next_children(3)
    swarm.send(number)
    assert swarm.end() == (0, "")
    assert all(child.is_gone() for child in children.values())


def test_second_interrupt_kills_at_once(supervise: Supervise) -> None:
    """Children that don't listen are killed by the second Ctrl-C, without waiting for the grace to pass."""
    swarm = supervise(1, "deaf")
    children = swarm.next_children(2)
    swarm.send(signal.SIGINT)
    assert swarm.next_line().startswith("stopping")
    swarm.send(signal.SIGINT)
    assert swarm.end() == (130, "")
    assert all(child.is_gone() for child in children.values())


def test_children_that_do_not_listen_are_killed_after_the_grace(supervise: Supervise) -> None:
    """One signal is enough, also for children that ignore theirs or are stopped; it takes the grace."""
    swarm = supervise(1, "deaf")
    children = swarm.next_children(2)
    os.kill(children["broker"].pid, signal.SIGSTOP)
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert all(child.is_gone() for child in children.values())


def test_interrupt_while_children_start(supervise: Supervise) -> None:
    """The first child is there, the others are still on their way: none of them stays."""
    swarm = supervise(6)
    first = swarm.next_child()
    swarm.send(signal.SIGINT)
    assert swarm.end() == (0, "")
    assert first.is_gone()
    assert swarm.left() == []


def test_interrupt_during_backoff(supervise: Supervise) -> None:
    """A child that waits for its restart is not started any more."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    children["w0"].exits(3)
    assert swarm.next_line() == "w0 ended with code 3; restarting it in 0.05 s"
    swarm.send(signal.SIGINT)
    assert swarm.end() == (0, "")
    assert swarm.left() == []


@pytest.mark.parametrize("behaviour", ["obedient", "deaf"])
def test_a_killed_supervisor_leaves_nobody(supervise: Supervise, behaviour: str) -> None:
    """kill -9 of the supervisor: the children end at once, stopped ones too."""
    swarm = supervise(2, behaviour)
    children = swarm.next_children(3)
    os.kill(children["w1"].pid, signal.SIGSTOP)
    swarm.send(signal.SIGKILL)
    assert swarm.end()[0] == -signal.SIGKILL
    assert all(child.is_gone() for child in children.values())


def test_a_supervisor_killed_while_children_start_leaves_nobody(supervise: Supervise) -> None:
    """Children that have not yet got to watching their parent notice when they do."""
    swarm = supervise(6)
    swarm.next_child()
    swarm.send(signal.SIGKILL)
    swarm.end()
    _, alive = psutil.wait_procs(swarm.left(), timeout=PATIENCE_S)
    assert alive == []


def test_the_tests_see_who_stays_behind(supervise: Supervise) -> None:
    """The control: children that don't watch their parent do survive it, and the tests above would notice."""
    swarm = supervise(1, "forgetful")
    children = swarm.next_children(2)
    swarm.send(signal.SIGKILL)
    swarm.end()
    forgetful = {child.pid for child in children.values()}
    psutil.wait_procs([each for each in swarm.left() if each.pid not in forgetful], timeout=PATIENCE_S)  # the nursery
    assert {each.pid for each in swarm.left()} == forgetful
    assert not children["w0"].is_gone(wait_s=0.3)


# --- the nursery -----------------------------------------------------------------------------------------------------

nurseries = pytest.mark.parametrize("supervise", ["nursery"], indirect=True)


@nurseries
def test_who_is_forked_is_as_one_that_started_by_itself(supervise: Supervise) -> None:
    """A child of the supervisor, in a session of its own, that holds no more open than another."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    forked, plain = (psutil.Process(children[name].pid) for name in ("w0", "broker"))
    assert (forked.ppid(), os.getsid(forked.pid)) == (swarm.process.pid, forked.pid)
    assert forked.num_fds() == plain.num_fds()
    assert Path(f"/proc/{forked.pid}/fd/0").readlink() == Path(os.devnull)
    assert _command(forked)[:3] == ["swarm", "--child", "w0"]


def _is_forked(child: Child) -> bool:
    return "-m" not in _command(psutil.Process(child.pid))


@nurseries
def test_workers_outlive_their_nursery(supervise: Supervise) -> None:
    """It is killed: nobody else is touched, another one is there at once, and forks who dies afterwards."""
    swarm = supervise(2)
    children = swarm.next_children(3)
    assert _is_forked(children["w0"])
    (nursery,) = _nurseries(swarm)
    nursery.kill()
    assert swarm.next_line() == "the fork server was ended by SIGKILL; restarting it"
    children["w0"].exits(3)
    again = swarm.next_child()
    assert (again.name, _is_forked(again)) == ("w0", True)
    assert [each.pid for each in _nurseries(swarm)] != [nursery.pid]
    children["w1"].says("still here")
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert swarm.left() == []


@nurseries
def test_a_nursery_that_keeps_ending_is_given_up(supervise: Supervise) -> None:
    """That is said, once; who dies afterwards is started as a process of its own."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    for _ in range(MAX_SHORT_RUNS):
        _kill_nursery(swarm)
        assert swarm.next_line() == "the fork server was ended by SIGKILL; restarting it"
    _kill_nursery(swarm)
    said = swarm.next_line()
    assert said.startswith(
        "workers start as separate processes from now on, a few seconds more slowly: the fork server was ended"
    )
    children["w0"].exits(3)
    again = swarm.next_child()
    assert (again.name, _is_forked(again)) == ("w0", False)
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert swarm.left() == []


def _kill_nursery(swarm: Supervised) -> None:
    """As soon as there is one: its process has another name until it runs."""
    until = time.monotonic() + PATIENCE_S
    while not (found := _nurseries(swarm)):
        assert time.monotonic() < until
        time.sleep(0.02)
    found[0].kill()


@nurseries
def test_a_nursery_of_a_former_installation_is_replaced(supervise: Supervise) -> None:
    """What it has imported is no longer what is installed: who is started again is of the new one."""
    swarm = supervise(1)
    children = swarm.next_children(2)
    (former,) = _nurseries(swarm)
    (swarm.directory / "version.py").touch()
    children["w0"].exits(75)
    assert swarm.next_line() == "w0 was asked to restart; restarting it in 0.05 s"
    assert _is_forked(swarm.next_child())
    (new,) = _nurseries(swarm)
    assert new.pid != former.pid


def _nurseries(swarm: Supervised) -> list[psutil.Process]:
    return [each for each in swarm.left() if _command(each)[:2] == ["swarm", "nursery"]]


@nurseries
@pytest.mark.parametrize(
    ("kind", "why"), [("threaded", "has threads, so it can't fork"), ("late", "did not answer within 0.3 s")]
)
def test_without_a_nursery_workers_start_by_themselves(supervise: Supervise, kind: str, why: str) -> None:
    """One that must not fork, and one that doesn't answer in time: another one would be no better."""
    swarm = supervise(1, "obedient", kind)
    worker = swarm.next_children(2)["w0"]
    assert not _is_forked(worker)
    said = swarm.next_line()
    assert said.startswith(
        f"workers start as separate processes from now on, a few seconds more slowly: the fork server {why} (its log: "
    )
    if kind == "threaded":
        assert "the fork server has threads" in (swarm.directory / "nursery.log").read_text()


@nurseries
def test_a_model_that_the_nursery_refuses_ends_all_before_a_worker_starts(supervise: Supervise) -> None:
    swarm = supervise(3, "obedient", "refusing")
    assert swarm.end() == (1, "swarm: the model has no attention\n")
    assert swarm.lines() == []
    assert [name for name in swarm.born() if name != "broker"] == []
    assert swarm.left() == []


@nurseries
def test_interrupt_before_workers_are_born(supervise: Supervise) -> None:
    """Nobody waits for them, and nobody is left."""
    swarm = supervise(2, "obedient", "deaf")
    broker = swarm.next_child()
    swarm.send(signal.SIGINT)
    assert swarm.end() == (0, "")
    assert broker.is_gone()
    assert swarm.left() == []


@nurseries
def test_a_worker_that_dies_before_its_number_is_known_is_started_again(supervise: Supervise) -> None:
    """The supervisor looks at its children in between, and must not lose the end of one that it can't name yet."""
    swarm = supervise(1, "obedient", "before")
    broker, nursery, number = _halted_at_a_birth(swarm)
    os.kill(number, signal.SIGKILL)
    broker.exits(3)
    assert swarm.next_line() == "broker ended with code 3; restarting it in 0.05 s"
    assert "its log" in swarm.next_line()
    assert swarm.next_child().name == "broker"
    nursery.goes_on()
    assert swarm.next_line() == "w0 was ended by SIGKILL; restarting it in 0.05 s"
    again = swarm.next_child()
    again.goes_on()
    assert swarm.next_child().name == "w0"
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert swarm.left() == []


@nurseries
def test_a_nursery_that_dies_before_it_names_a_worker_takes_it_along(supervise: Supervise) -> None:
    """Another one is started instead, so that there is one of this name, and the supervisor is its parent.

    The children are "forgetful": a worker that ran too early would not die with the process between it and its
    nursery, so the test finds it.
    """
    swarm = supervise(1, "forgetful", "before")
    _, nursery, number = _halted_at_a_birth(swarm)
    newborn = psutil.Process(number)
    os.kill(nursery.pid, signal.SIGKILL)
    worker = swarm.next_child()
    assert (worker.name, _is_forked(worker)) == ("w0", False)
    assert _is_over(newborn)
    assert [each.pid for each in swarm.left() if "w0" in _command(each)] == [worker.pid]


@nurseries
def test_a_worker_that_is_named_and_never_released_is_started_again(supervise: Supervise) -> None:
    """Its nursery died between the two: the supervisor knows the worker, and hears of its end as of any other."""
    swarm = supervise(1, "obedient", "after")
    _, nursery, _ = _halted_at_a_birth(swarm)
    os.kill(nursery.pid, signal.SIGKILL)
    lines = {swarm.next_line() for _ in range(3)}
    assert "w0 ended with code 1; restarting it in 0.05 s" in lines
    assert "the fork server was ended by SIGKILL; restarting it" in lines
    again = swarm.next_child()
    again.goes_on()
    worker = swarm.next_child()
    assert worker.name == "w0"
    assert [each.pid for each in swarm.left() if "w0" in _command(each)] == [worker.pid]


@nurseries
def test_workers_killed_at_birth_come_back(supervise: Supervise) -> None:
    """At whatever moment they are killed, as by a machine without memory: some before their numbers are known."""
    swarm = supervise(12)
    children = swarm.next_children(13)
    for child in children.values():
        if child.name != "broker":
            child.exits(3)
    spared = {child.pid for child in children.values()} | {each.pid for each in _nurseries(swarm)}
    listed = Path(f"/proc/{swarm.process.pid}/task/{swarm.process.pid}/children")
    killed: set[int] = set()
    until = time.monotonic() + PATIENCE_S
    while len(killed) < 24:
        assert time.monotonic() < until
        for pid in {int(each) for each in listed.read_text().split()} - spared - killed:
            killed.add(pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    assert swarm.process.poll() is None
    swarm.send(signal.SIGTERM)
    assert swarm.end() == (0, "")
    assert swarm.left() == []


def _halted_at_a_birth(swarm: Supervised) -> tuple[Child, Child, int]:
    """The broker, a nursery that halts at its first birth, and the number of the newborn."""
    ends = swarm.next_children(2)
    broker = ends.pop("broker")
    ((number, nursery),) = ends.items()
    return broker, nursery, int(number)


def _is_over(process: psutil.Process) -> bool:
    """Wait for its end."""
    gone, _ = psutil.wait_procs([process], timeout=PATIENCE_S)
    return bool(gone)


@pytest.mark.parametrize("end", [ForkedProcess.terminate, ForkedProcess.kill])
def test_who_was_ended_before_it_is_born_does_not_live(end: Callable[[ForkedProcess], None]) -> None:
    life = ForkedProcess(lambda: pytest.fail("it is not started"))
    end(life)
    assert life.poll() in (-signal.SIGTERM, -signal.SIGKILL)
    child = subprocess.Popen(["sleep", "60"])
    life.on_started(child.pid)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL


async def test_who_is_born_when_a_nursery_is_ended_is_known(
    tmp_path: Path, orphanage: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its number has been sent and nobody has read it yet: the worker lives on, and no other of its name is started."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{Path(__file__).parent}")
    command = [sys.executable, "-m", "supervised", "--nursery", "nursery", str(tmp_path / "s")]
    worker = [sys.executable, "-m", "supervised", "--child", "w0", str(tmp_path / "s"), "obedient"]
    lifeline = Lifeline()
    with contextlib.closing(lifeline), socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        nursery = ForkServer(command, lifeline, LogFile(tmp_path / "nursery.log"), lambda: None, print)
        life = nursery.fork(worker, LogFile(tmp_path / "w0.log"))
        link, _ = listener.accept()  # meanwhile the loop reads nothing
        with contextlib.closing(Child(link)) as child:
            nursery.stop()
            assert life.pid == child.pid
            life.kill()
            assert life.wait(PATIENCE_S)


def test_a_life_that_the_machine_cannot_start_says_why() -> None:
    """Instead of the nursery that died: the supervisor hears of it as of one that could not be started at first."""

    def fail() -> Process:
        raise OSError("no more processes")

    life = ForkedProcess(fail)
    life.start_separately()
    assert (life.poll(), life.problem) == (os.EX_OSERR, "no more processes")


def test_pipe_alone_ends_children(tmp_path: Path) -> None:
    """Where there is no PR_SET_PDEATHSIG, end of file on the parent's pipe does it."""
    read_fd, write_fd = os.pipe()
    program = (
        "import sys; sys.platform = 'elsewhere'; from swarm.cli.up.processes import die_with_parent as d; d(); input()"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "SWARM_PARENT_FD": str(read_fd)}
    child = subprocess.Popen(
        [sys.executable, "-c", program], stdin=subprocess.PIPE, pass_fds=(read_fd,), env=variables, cwd=tmp_path
    )
    os.close(write_fd)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    os.close(read_fd)
    assert child.stdin is not None
    child.stdin.close()
