"""Exit codes: wrong words are 2, whatever the command; what is refused or fails is 1. (Options that a command does not
have, for every command: ``test_commands``.)"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import typer

from swarm.cli import confirm
from swarm.cli.main import run as swarm
from swarm.cli.output import run_app
from swarm.ctl.main import run as swarmctl
from swarm.errors import InvalidRequest, RequestFailed

NOBODY = "tcp://127.0.0.1:9"  # a port where nobody serves: no word of these is to get that far


PROGRAMS: dict[str, Callable[[list[str]], int]] = {"swarm": swarm, "swarmctl": swarmctl}


@pytest.mark.parametrize(
    "words",
    [
        "swarm systemd install --memory-limit rubbish",
        "swarm systemd install --memory-limit -1",
        "swarm systemd install --root {tmp}/nowhere",
        "swarm systemd install --root {tmp} --user",
        "swarm systemd uninstall --root {tmp}/nowhere",
        "swarm systemd uninstall --root {tmp} --user",
        "swarm systemd status --root {tmp}/nowhere",
        "swarm systemd status --root {tmp} --user",
        "swarm generate --join rubbish hello",
        "swarmctl config show --worker w0 --gateway http://127.0.0.1:9",
        "swarm generate --join swarm1:AAAA hello",
        "swarm chat --join rubbish",
        "swarm generate --url rubbish hello",
        "swarm generate --max-tokens rubbish hello",
        "swarm generate --priority rubbish hello",
        "swarm up --workers rubbish",
        "swarm up --workers 1 --memory-limit rubbish --no-http",
        "swarm config show {tmp}/a.toml --config {tmp}/b.toml",
        "swarm config check {tmp}/a.toml --config {tmp}/b.toml",
        "swarm doctor --workers 0",
        "swarm completion rubbish",
        "swarm sim --seed rubbish",
        "swarm run village",
        "swarm bench --concurrency rubbish",
        "swarmctl --join rubbish status",
        "swarmctl status --url rubbish",
        "swarmctl plan --pin rubbish",
        "swarmctl plan --pin w0=3-1",
        "swarmctl plan --cap w0=0",
        "swarmctl plan --dry-run --objective rubbish",
        "swarmctl plan --without w0",
        "swarmctl cordon",
        "swarmctl events --every rubbish",
        "swarmctl join --memory-limit rubbish",
        "swarmctl join --count 0",
        "swarmctl invite --role rubbish",
        "swarmctl invite --role worker --for rubbish",
        "swarmctl invite --role worker --address a/b",
        "swarmctl completion rubbish",
        "swarmctl stats --prometheus --json",
        "swarmctl trace " + 200 * "a",
        "swarmctl stop " + 200 * "a",
    ],
)
def test_wrong_words_are_two(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And one line that says what is wrong; nothing was begun: nobody was asked, and nothing was written."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("SWARM_CLIENT__CONNECT_TIMEOUT_S", "0.2")
    if "--url" not in words:
        monkeypatch.setenv("SWARM_URL", NOBODY)
    program, *rest = words.format(tmp=tmp_path).split()
    assert PROGRAMS[program](rest) == 2
    said = capsys.readouterr()
    assert len(said.err.splitlines()) == 1
    assert not said.out
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidRequest("this request is not known", code="unknown"), 1),
        (RequestFailed("no worker 'w9': the workers are w0"), 1),
        (InvalidRequest("the prompt is empty", code="prompt"), 2),
    ],
)
def test_what_is_not_there_is_refused_alike(error: Exception, code: int) -> None:
    """A request, as a worker or a key: the words are right, and the swarm says no."""
    app = typer.Typer(rich_markup_mode=None)

    @app.command()
    def fail() -> None:
        raise error

    assert run_app(lambda: app, "swarm", ["--"]) == code


def test_an_answer_of_no_is_one_line_and_nothing_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(confirm.sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr(confirm.sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda *_, **__: False)
    with pytest.raises(typer.Exit) as ended:
        confirm.confirm_or_exit("Stop worker w1?", yes=False)
    assert ended.value.exit_code == 1
    assert capsys.readouterr().err.splitlines() == ["swarmctl: nothing was done: the answer was no"]
