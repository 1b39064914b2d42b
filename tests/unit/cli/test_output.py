"""How commands fail and print."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from swarm.cli.output import ConsoleProgress, JsonProgress, format_bytes, run_app
from swarm.errors import ConfigError, InvalidRequest, Unavailable

ROOT = Path(__file__).parents[3]


class Terminal(io.StringIO):
    """A stream that takes itself for a terminal."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor

    def isatty(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor


def app_that_raises(error: BaseException) -> typer.Typer:
    app = typer.Typer(rich_markup_mode=None)

    @app.callback()
    def callback() -> None:
        """Let the app have commands."""

    @app.command()
    def go(count: int = 0) -> None:
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (ConfigError("the port\nis wrong"), 1, "tool: the port is wrong\n"),
        (Unavailable("nobody answers"), 1, "tool: nobody answers\n"),
        (InvalidRequest("the prompt is empty"), 2, "tool: the prompt is empty\n"),
        (typer.BadParameter("no such thing"), 2, "tool: Invalid value: no such thing (try 'tool go --help')\n"),
        (KeyboardInterrupt(), 130, ""),
        (typer.Exit(78), 78, ""),
        (typer.Exit(), 0, ""),
    ],
)
def test_each_failure_is_one_line_and_a_code(
    error: BaseException, code: int, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exactly one line on stderr (none after Ctrl-C), nothing on stdout, and the code of its kind."""
    assert run_app(lambda: app_that_raises(error), "tool", ["go"]) == code
    out, err = capsys.readouterr()
    assert (out, err.lstrip("\n")) == ("", line)


@pytest.mark.parametrize("arguments", [["--nix"], ["nix"], ["go", "--count", "many"], ["go", "too", "many"]])
def test_wrong_usage_is_one_line_with_a_hint(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever is wrong with a command line: code 2, one line, and where to read on."""
    assert run_app(lambda: app_that_raises(ConfigError("not reached")), "tool", arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("tool: ")
    assert "--help" in line


def test_an_unknown_error_is_not_hidden() -> None:
    """A bug keeps its traceback."""
    with pytest.raises(ZeroDivisionError):
        run_app(lambda: app_that_raises(ZeroDivisionError()), "tool", ["go"])


def test_a_package_that_is_missing_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """As after an upgrade without what it needs anew; a module of our own is a bug."""
    assert run_app(lambda: app_that_raises(ModuleNotFoundError(name="nacl.bindings")), "tool", ["go"]) == 1
    assert "the package nacl.bindings is missing" in capsys.readouterr().err
    with pytest.raises(ModuleNotFoundError):
        run_app(lambda: app_that_raises(ModuleNotFoundError(name="swarm.lost")), "tool", ["go"])


def test_an_interrupt_during_imports_is_quiet(capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C while the command is still being imported."""

    def load() -> typer.Typer:
        raise KeyboardInterrupt

    assert run_app(load, "tool", ["go"]) == 130
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("module", ["swarm.cli.main", "swarm.ctl.main"])
def test_an_interrupt_in_the_last_instants_is_quiet(module: str) -> None:
    """Behind the command's end it is 130 like any other interrupt; once the exit code stands, nothing changes it."""
    late = (
        f"import os, signal, sys, {module} as m;"
        "m.run = lambda arguments: os.kill(os.getpid(), signal.SIGINT) or sys.stdin.read();"
        "m.main()"
    )
    later = (
        f"import atexit, os, signal, {module} as m; atexit.register(os.kill, os.getpid(), signal.SIGINT);"
        "m.run = lambda arguments: 5; m.main()"
    )
    for program, code in ((late, 130), (later, 5)):
        process = subprocess.run(
            [sys.executable, "-c", program],
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=60,
            check=False,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )
        assert (process.returncode, process.stderr) == (code, "")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback() -> None:
    """``swarm config check --json | head -0``: quiet, and not a success."""
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    process = subprocess.run(
        [sys.executable, "-m", "swarm", "config", "check", "--json"],
        stdout=write_fd,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        cwd="/",
    )
    os.close(write_fd)
    assert (process.returncode, process.stderr) == (1, b"")


def checked(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """``swarm config check``, whose stdout is as the options say; it names a file whose name is no ASCII."""
    return subprocess.run(
        [sys.executable, "-m", "swarm", "config", "check", *arguments],
        text=True,
        timeout=60,
        check=False,
        cwd="/",
        **{"stderr": subprocess.PIPE, "env": {**os.environ, "PYTHONPATH": str(ROOT)}, **options},
    )


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--json",)], ids=["for people", "JSON"])
@pytest.mark.parametrize("buffered", ["", "1"])
def test_an_output_that_can_not_be_written_is_one_line(how: tuple[str, ...], buffered: str) -> None:
    """The disk is full: named, and not a success."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": buffered}
    with Path("/dev/full").open("w") as full:
        done = checked(*how, stdout=full, env=environment)
    assert (done.returncode, done.stderr) == (1, "swarm: can't write the output: No space left on device\n")


@pytest.mark.slow
@pytest.mark.parametrize("closed", [0, 1])
def test_without_stdin_or_stdout_it_is_done_all_the_same(closed: int) -> None:
    """As ``swarm config check >&-``."""
    done = checked(stdout=subprocess.PIPE, preexec_fn=lambda: os.close(closed))
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # the latter is the locale C's
def test_letters_that_an_output_lacks_are_no_traceback(encoding: str, errors: str, tmp_path: Path) -> None:
    """A question mark stands for each; JSON has escapes, and loses nothing; half a letter of a file's name is told."""
    for name, shown in (("Ω", {"utf-8": "Ω"}.get(encoding, "?")), ("\udcff", {"utf-8": "\\udcff"}.get(encoding, "?"))):
        settings = tmp_path / f"{name}.toml"
        settings.write_text('model = "Ω"')
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONIOENCODING": f"{encoding}:{errors}"}
        done = checked(str(settings), stdout=subprocess.PIPE, env=environment, encoding=encoding)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"/{shown}.toml" in done.stdout
        done = checked(str(settings), "--json", stdout=subprocess.PIPE, env=environment, encoding=encoding)
        assert json.loads(done.stdout)["model"] == "Ω"


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (200 << 20, "200 MiB"), (3 << 40, "3.0 TiB")]
)
def test_sizes_for_people(count: int, text: str) -> None:
    """Two or three digits and a unit."""
    assert format_bytes(count) == text


def test_progress_without_a_terminal_is_a_log() -> None:
    """Every line stays, and the same state is not told twice, also with other lines in between."""
    stream = io.StringIO()
    progress = ConsoleProgress(stream)
    progress.set_status("loading")
    progress.set_status("loading")
    progress.print_line("w0 died")
    progress.set_status("loading")
    progress.set_status("loaded")
    progress.clear_status()
    assert stream.getvalue() == "loading\nw0 died\nloaded\n"


def test_progress_on_a_terminal_is_one_line() -> None:
    """The state is overwritten, cut to the width, kept below lines that stay, and gone in the end."""
    main_fd, terminal_fd = os.openpty()
    stream = Terminal(terminal_fd)
    progress = ConsoleProgress(stream)
    progress.set_status("one")
    progress.set_status("two")
    progress.print_line("w0 died")
    progress.clear_status()
    clear = "\r\x1b[2K"
    assert stream.getvalue() == f"one{clear}two{clear}w0 died\ntwo{clear}"
    os.close(main_fd)
    os.close(terminal_fd)


def test_progress_for_programs() -> None:
    """Every line is an object; the same state is not told twice; an event comes as data instead of as lines."""
    stream = io.StringIO()
    progress = JsonProgress(stream)
    progress.set_status("loading")
    progress.set_status("loading")
    progress.print_line("w0 died")
    progress.report(["serving", "w0 has all"], {"event": "serving", "epoch": 2})
    progress.clear_status()
    assert [json.loads(line) for line in stream.getvalue().splitlines()] == [
        {"event": "progress", "text": "loading"},
        {"event": "note", "text": "w0 died"},
        {"event": "serving", "epoch": 2},
    ]


def test_progress_goes_on_without_its_audience() -> None:
    """When the reader has gone, what is shown must not fail for it."""

    class Broken(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError

    progress = ConsoleProgress(Broken())
    progress.print_line("one")
    progress.set_status("two")
