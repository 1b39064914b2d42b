"""Records of ``swarm up``: which process is meant, what is kept, and that no other process is signalled."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from swarm.cli.output import ConsoleProgress, JsonProgress
from swarm.cli.up import runs
from swarm.cli.up.manage import ps
from swarm.cli.up.processes import LogFile
from swarm.cli.up.runs import NUM_ENDED, RecordedSwarm, Run, RunRecorder, read_runs, select_run, start_time, stop_run
from swarm.ctl.main import run as swarmctl
from swarm.errors import ConfigError, SwarmError

VILLAGE, LLAMA = RecordedSwarm("village", "tcp://127.0.0.1:5700"), RecordedSwarm("llama", "tcp://127.0.0.1:5702")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return runs.runs_folder()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) as process:
        yield process
        process.kill()


def run_of(pid: int, *swarms: RecordedSwarm, started: str | None = None, since: float = 0.0) -> Run:
    return Run(pid, start_time(pid) if started is None else started, since, swarms or (VILLAGE,), "/state")


def recorder(**options: bool) -> RunRecorder:
    return RunRecorder(
        [VILLAGE], Path("/state"), **{"has_workers": True, "has_http": False, "is_logged": False, **options}
    )


def mine() -> Run:
    (run,) = read_runs()
    assert run.pid == os.getpid()
    return run


def test_a_process_is_known_by_its_number_and_start(sleeper: subprocess.Popen[bytes]) -> None:
    own = start_time(sleeper.pid)
    assert own == start_time(sleeper.pid) != start_time(os.getpid())
    assert run_of(sleeper.pid).is_alive
    assert not run_of(sleeper.pid, started="another boot 1").is_alive
    sleeper.kill()
    os.waitid(os.P_PID, sleeper.pid, os.WEXITED | os.WNOWAIT)
    assert start_time(sleeper.pid) == ""  # a zombie has ended, too
    sleeper.wait()
    assert start_time(sleeper.pid) == ""
    assert not run_of(sleeper.pid).is_alive  # without a start time, no process is meant


def test_another_process_with_the_number_is_not_signalled(sleeper: subprocess.Popen[bytes]) -> None:
    assert stop_run(run_of(sleeper.pid, started="an earlier process"), 1.0)
    assert sleeper.poll() is None
    assert stop_run(run_of(sleeper.pid), 10.0)
    assert sleeper.wait(10) == -15
    assert stop_run(run_of(sleeper.pid, started="gone"), 1.0)


def test_one_that_does_not_end_is_reported_after_the_deadline() -> None:
    code = "import signal, sys; signal.signal(15, signal.SIG_IGN); print(1, flush=True); sys.stdin.read()"
    command = [sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as deaf:
        assert deaf.stdout is not None
        assert deaf.stdout.readline() == b"1\n"
        began = time.monotonic()
        assert not stop_run(run_of(deaf.pid), 0.2)
        assert time.monotonic() - began >= 0.2
        deaf.kill()


def test_a_run_is_chosen_by_model_port_or_number() -> None:
    both, other = run_of(1, VILLAGE, LLAMA), run_of(2, RecordedSwarm("village", "tcp://[::1]:5800"))
    assert select_run([both], None) == both
    assert select_run([both, other], "llama") == select_run([both, other], "5702") == both
    assert select_run([both, other], "5800") == select_run([both, other], "2") == other
    for name in (None, "village"):
        with pytest.raises(SwarmError, match=r"several swarms run: village \(port 5700\) and llama .*name one by its"):
            select_run([both, other], name)
    with pytest.raises(SwarmError, match="no swarm cat runs here; these do: village"):
        select_run([both], "cat")
    with pytest.raises(SwarmError, match="no swarm up runs"):
        select_run([], "cat")


def test_it_is_ready_once_it_serves_and_its_gateway_answers(folder: Path) -> None:
    observe = recorder(has_http=True).observe
    observe((), {"event": "progress"})
    observe(("serving",), {"event": "serving"})
    assert not mine().is_ready
    observe(("http",), {"event": "http", "url": "http://127.0.0.1:8000", "console": "http://127.0.0.1:8000/"})
    run = mine()
    assert (run.is_ready, run.http, run.console) == (True, "http://127.0.0.1:8000", "http://127.0.0.1:8000/")
    assert run.is_alive
    assert (folder / f"{run.pid}.json").stat().st_mode & 0o777 == 0o600


def test_a_gateway_that_can_never_work_is_not_awaited() -> None:
    observe = recorder(has_http=True).observe
    observe(("serving",), {"event": "serving"})
    observe(("w1 can't work",), {"event": "note", "given_up": "w1"})
    assert not mine().is_ready
    observe(("gateway can't work",), {"event": "note", "given_up": "gateway"})
    assert mine().is_ready


def test_a_log_that_was_cut_is_followed_from_its_new_beginning(tmp_path: Path) -> None:
    log = LogFile(tmp_path / "log")
    log.path.write_text("one\ntwo\n")
    assert log.new_lines() == ["one", "two"]
    log.path.write_text("three\n")
    assert log.new_lines() == ["three"]


def test_without_workers_it_is_ready_once_the_broker_answers() -> None:
    observe = recorder(has_workers=False).observe
    observe(("starting",), {"event": "starting"})
    assert not mine().is_ready
    observe((), {"event": "progress"})
    assert mine().is_ready


@pytest.mark.parametrize("kind", [ConsoleProgress, JsonProgress])
def test_the_log_has_the_lines_for_people(kind: type[ConsoleProgress], tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as out:
        progress = kind(out, recorder().observe)
        progress.set_status("loading")
        progress.print_line("w1 died")
        progress.report(["serving", "url"], {"event": "serving"})
    assert runs.log_path(os.getpid()).read_text() == "w1 died\nserving\nurl\n"


def test_output_that_is_in_the_log_is_not_written_twice() -> None:
    recorder(is_logged=True).observe(("line",), {"event": "note"})
    assert not runs.log_path(os.getpid()).exists()


def test_the_latest_of_those_that_ended_are_kept(folder: Path) -> None:
    folder.mkdir(parents=True)
    first = 1 << 22  # no process has such a number
    for number in range(NUM_ENDED + 3):
        run = run_of(first + number, started="before", since=float(number))
        (folder / f"{run.pid}.json").write_bytes(msgspec.json.encode(run))
        (folder / f"{run.pid}.log").touch()
    starting = os.getppid()  # it runs, and has no record yet
    for name in ("rubbish.json", f"{first + 99}.log", f"{first + 99}.json", f".{first}.json.ab12", f"{starting}.log"):
        (folder / name).write_text("{")
    recorder()
    ended = [run.pid for run in read_runs() if not run.is_alive]
    assert ended == [first + number for number in range(3, NUM_ENDED + 3)]
    logs = {f"{pid}.log" for pid in (*ended, starting)}
    assert {path.name for path in folder.iterdir()} == logs | {f"{pid}.json" for pid in (*ended, os.getpid())}


def test_machines_that_share_a_home_have_a_folder_each(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither sees the other's records, whose numbers mean nothing here, nor removes them."""
    recorder()
    monkeypatch.setattr(os, "uname", lambda: SimpleNamespace(nodename="other"))
    assert read_runs() == []
    recorder()
    assert [path.name for path in folder.iterdir()] == [f"{os.getpid()}.json"]


def test_nothing_is_recorded_without_a_start_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "start_time", lambda _pid: "")
    recorder().observe(("line",), {"event": "serving"})
    assert read_runs() == []
    with pytest.raises(ConfigError, match="run without --detach"):
        runs.redirect_output()


def test_without_room_for_a_record_it_does_not_go_into_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """No other command could find it. Its stderr is still the user's."""

    def fail(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(runs.private_files, "write", fail)
    with pytest.raises(ConfigError, match=r"No space left on device\); run without --detach"):
        runs.redirect_output()
    assert not runs.log_path(os.getpid()).exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSYS, "not implemented"), AttributeError("pidfd_open")])
def test_where_no_process_can_be_signalled_safely_the_user_is_told_how(
    error: Exception, sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_pid: int) -> int:
        raise error

    monkeypatch.setattr(os, "pidfd_open", fail)
    with pytest.raises(SwarmError, match=f"kill {sleeper.pid} ends it"):
        stop_run(run_of(sleeper.pid), 1.0)


def test_without_a_directory_nothing_is_recorded_and_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    recorder().observe(("line",), {"event": "serving"})
    assert read_runs() == []
    monkeypatch.setattr(runs, "default_state_dir", has_no_home)
    recorder().observe(("line",), {"event": "serving"})
    assert read_runs() == []


def test_a_full_disk_costs_the_log_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "log_path", lambda _pid: Path("/dev/full"))
    monkeypatch.setattr(Path, "unlink", lambda *_args, **_kwargs: None)  # of a device, by root
    recorder().observe(("line",), {"event": "serving"})
    assert mine().is_ready


def has_no_home() -> Path:
    raise RuntimeError("Could not determine home directory.")


def test_one_that_was_killed_is_not_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder.mkdir(parents=True)
    (folder / "1.json").write_bytes(msgspec.json.encode(run_of(1, started="before")))
    ps(as_json=True)
    assert capsys.readouterr().out == "[]\n"


def test_the_keys_of_a_running_swarm_are_in_its_state_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chosen by the broker's address, as for all other commands."""
    monkeypatch.delenv("SWARM_STATE_DIR", raising=False)
    state = tmp_path / "state"
    RunRecorder([LLAMA], state, has_workers=True, has_http=True, is_logged=True)
    assert swarmctl(["--url", LLAMA.url, "keys", "add", "alice", "--json"]) == 0
    assert (state / "keys.json").exists()
    capsys.readouterr()
    assert swarmctl(["keys", "list", "--api", "--url", LLAMA.url, "--json"]) == 0
    assert [row["name"] for row in msgspec.json.decode(capsys.readouterr().out)["keys"]] == ["alice"]
    assert swarmctl(["keys", "add", "bob"]) == 2
    assert "no swarm up of this broker runs here: set gateway.keys_file" in " ".join(capsys.readouterr().err.split())
