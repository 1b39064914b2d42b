"""Every command of ``swarm`` and ``swarmctl``: what its help has, what it can print, how it fails."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from swarm.cli.app import app as swarm_app
from swarm.cli.main import run as swarm
from swarm.cli.output import EXIT_CODES
from swarm.config import defaults, setting_names
from swarm.ctl.commands import app as swarmctl_app
from swarm.ctl.main import run as swarmctl

PROGRAMS = {"swarm": (swarm_app, swarm), "swarmctl": (swarmctl_app, swarmctl)}
SERVICES = {
    ("swarm", "broker"),
    ("swarm", "worker"),
    ("swarm", "gateway"),
}  # they print nothing: what they say goes to the log
NOBODY = "tcp://127.0.0.1:9"  # nothing of ours listens there

# For each command that talks to a broker, arguments that are right.
ASKING: dict[tuple[str, ...], tuple[str, ...]] = {
    ("swarm", "generate"): ("hello",),
    ("swarm", "attach"): ("r",),
    ("swarm", "chat"): (),
    ("swarm", "embed"): ("hello",),
    ("swarm", "profile"): (),
    ("swarmctl", "status"): (),
    ("swarmctl", "nodes"): (),
    ("swarmctl", "plan"): (),
    ("swarmctl", "stats"): (),
    ("swarmctl", "trace"): (),
    ("swarmctl", "requests"): (),
    ("swarmctl", "cancel"): ("r",),
    ("swarmctl", "recoveries"): (),
    ("swarmctl", "events"): (),
    ("swarmctl", "version"): (),
    ("swarmctl", "top"): (),
    ("swarmctl", "doctor"): (),
    ("swarmctl", "config", "show"): (),
    ("swarmctl", "join"): (),
    ("swarmctl", "stop"): ("w0",),
    ("swarmctl", "invite"): ("--role", "worker"),
    ("swarmctl", "cordon"): ("w0",),
    ("swarmctl", "uncordon"): ("w0",),
    ("swarmctl", "drain"): ("w0",),
    ("swarmctl", "rebalance"): (),
    ("swarmctl", "standby"): (),
    ("swarmctl", "upgrade"): ("--rolling",),
    ("swarmctl", "adapters", "load"): ("red", "owner/red"),
    ("swarmctl", "adapters", "drop"): ("red",),
}

KEYS = {("swarmctl", "keys", name) for name in ("add", "list", "revoke", "rotate", "show")}  # on a file, too


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No settings from the machine that runs the tests, and wide lines."""
    for name in [name for name in os.environ if name.startswith("SWARM_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setattr("sys.stdin", io.StringIO())


def walk(command: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Commands that do something, with the words that call them."""
    inner = getattr(command, "commands", None)
    if inner is None:
        yield path, command
    else:
        for name, child in inner.items():
            yield from walk(child, (*path, name))


COMMANDS = dict(entry for name, (app, _) in PROGRAMS.items() for entry in walk(typer.main.get_command(app), (name,)))
NAMES = [" ".join(path) for path in COMMANDS]


def run(words: str, *more: str) -> int:
    program, *arguments = words.split()
    return PROGRAMS[program][1]([*arguments, *more])


def only_line(capsys: pytest.CaptureFixture[str], program: str) -> str:
    """The one line on stderr; nothing is on stdout."""
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    assert line.startswith(f"{program}: ")
    return line


def test_these_are_the_commands() -> None:
    """A new one is seen by the tests below; one that talks to a broker is listed for them."""
    others = {
        *(("swarm", name) for name in ("demo", "up", "ps", "logs", "down", "pull")),
        *(("swarm", "models", name) for name in ("list", "check")),
        ("swarm", "sim"),
        ("swarm", "bench"),
        *(("swarm", "batch", name) for name in ("run", "list", "show", "cancel")),
        ("swarm", "discover"),
        ("swarm", "doctor"),
        ("swarm", "config", "check"),
        ("swarm", "config", "show"),
        ("swarm", "completion"),
        ("swarmctl", "completion"),
        *(("swarm", "systemd", name) for name in ("install", "uninstall", "status")),
    }
    assert set(ASKING) | SERVICES | KEYS | others == set(COMMANDS)


@pytest.mark.parametrize("words", NAMES)
def test_help(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit code 0; what it is for, an example that begins with it, and every option explained."""
    for flag in ("--help", "-h"):
        assert run(words, flag) == 0
        shown = capsys.readouterr()
        assert shown.err == ""
    assert f"Usage: {words}" in shown.out
    example = shown.out.split("Example: ")[1]
    assert words in example


def test_summaries_fit_a_line() -> None:
    """Of commands and of their groups: a list of commands on a terminal of 80 columns shows each one whole."""

    def summaries(command: Any, path: str) -> Iterator[tuple[str, str]]:
        for name, child in getattr(command, "commands", {}).items():
            yield f"{path} {name}", child.get_short_help_str(limit=1000)
            yield from summaries(child, f"{path} {name}")

    found = dict(entry for name, (app, _) in PROGRAMS.items() for entry in summaries(typer.main.get_command(app), name))
    assert set(NAMES) < set(found)
    assert "swarmctl keys" in found
    assert {name: text for name, text in found.items() if len(text) > 55 or not text.endswith(".")} == {}


@pytest.mark.parametrize("words", NAMES)
def test_every_option_says_what_it_does(words: str) -> None:
    """As a sentence; also arguments."""
    for parameter in COMMANDS[tuple(words.split())].params:
        assert parameter.help, f"{words}: {parameter.name} has no help"
        assert parameter.help.endswith((".", "]")), parameter.help


@pytest.mark.parametrize("words", NAMES)
def test_whoever_prints_can_print_json(words: str) -> None:
    """All but the two services."""
    path = tuple(words.split())
    options = {option for parameter in COMMANDS[path].params for option in parameter.opts}
    assert ("--json" in options) != (path in SERVICES)


@pytest.mark.parametrize("program", PROGRAMS)
def test_exit_codes_are_documented(program: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In the program's own help, which also comes without any argument."""
    assert run(program) == 0
    assert EXIT_CODES in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("words", NAMES)
def test_an_unknown_option_is_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In one line that says where to read on."""
    assert run(words, "--colour") == 2
    line = only_line(capsys, words.split(maxsplit=1)[0])
    assert "--colour" in line
    assert f"try '{words} --help'" in line


@pytest.mark.parametrize("words", ["swarm", "swarmctl", "swarm config"])
def test_an_unknown_command_is_2(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    """As above."""
    assert run(words, "dance") == 2
    assert "dance" in only_line(capsys, words.split(maxsplit=1)[0])


@pytest.mark.slow
@pytest.mark.parametrize("path", list(ASKING))
def test_no_broker_is_1(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Within the time that the settings give it, in one line that names the address and what to do."""
    monkeypatch.setenv("SWARM_CLIENT__CONNECT_TIMEOUT_S", "0.2")
    assert run(" ".join(path), *ASKING[path], "--url", NOBODY) == 1
    assert f"no broker answers at {NOBODY}" in only_line(capsys, path[0])


@pytest.mark.parametrize("path", list(ASKING))
def test_a_wrong_url_is_2(path: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    """It is refused before anything is tried."""
    assert run(" ".join(path), *ASKING[path], "--url", "here") == 2
    assert "write it as tcp://HOST:PORT" in only_line(capsys, path[0])


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in ASKING if path != ("swarm", "profile")])  # which may start its own
def test_the_settings_file_says_where_the_broker_is(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Also for those that only ask."""
    (tmp_path / "config").mkdir()
    (tmp_path / "config" / "swarm.toml").write_text(f"[client]\nurl = '{NOBODY}'\nconnect_timeout_s = 0.2\n")
    assert run(" ".join(path), *ASKING[path]) == 1
    assert f"no broker answers at {NOBODY}" in only_line(capsys, path[0])


@pytest.mark.parametrize("path", [*ASKING, ("swarm", "config", "check"), ("swarm", "config", "show"), ("swarm", "up")])
def test_wrong_settings_are_1(
    path: tuple[str, ...], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads them names what is wrong."""
    monkeypatch.setenv("SWARM_BROKER__PROT", "1")
    assert run(" ".join(path), *ASKING.get(path, ())) == 1
    line = only_line(capsys, path[0])
    assert "SWARM_BROKER__PROT" in line
    assert "did you mean broker.port?" in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["swarm", "up", "--port", "70000"],
        ["swarm", "up", "--workers", "many"],
        ["swarm", "up", "--threads", "-1"],
        ["swarm", "generate", "x", "--temperature", "hot"],
        ["swarm", "generate", "x", "--max-tokens", "0"],
        ["swarm", "generate", "x", "--n", "0"],
        ["swarm", "generate", "x", "--priority", "royal"],
        ["swarm", "generate", ""],
        ["swarm", "generate", "x", "--detach", "--hops"],
        ["swarm", "attach", ""],
        ["swarm", "attach", "r", "--from", "-1"],
        ["swarm", "attach", "x" * 200],
        ["swarm", "profile", "--workers", "0"],
        ["swarm", "sim", "--seed", "1", "--schedules", "2"],
        ["swarm", "--log-level", "loud", "sim"],
        ["swarm", "config", "check", "a", "b"],
        ["swarm", "config", "check", "a", "--config", "b"],
        ["swarm", "config", "show", "a", "--config", "b"],
        ["swarmctl", "stats", "--watch", "0"],
        ["swarmctl", "events", "--follow", "--every", "0"],
        ["swarmctl", "completion"],
        ["swarm", "completion", "tcsh"],
        ["swarmctl", "top", "--every", "0"],
        ["swarmctl", "plan", "--without", "w0"],
        ["swarmctl", "plan", "--dry-run", "--objective", "beauty"],
        ["swarmctl", "join", "--count", "65"],
        ["swarmctl", "join", "--memory-limit", "0"],
        ["swarmctl", "stop", ""],
        ["swarmctl", "trace", "x" * 200],
        ["swarmctl", "cancel", ""],
        ["swarmctl", "keys", "list", "--api", "--machine"],
        ["swarmctl", "keys", "revoke", "x", "--machine", "--keys-file", "f"],
        ["swarmctl", "invite"],
        ["swarmctl", "invite", "--role", "king"],
        ["swarmctl", "invite", "--role", "worker", "--for", "0h"],
        ["swarmctl", "invite", "--role", "worker", "--for", "soon"],
        ["swarmctl", "invite", "--role", "worker", "--uses", "0"],
        ["swarmctl", "invite", "--role", "worker", "--address", "a b"],
        ["swarmctl", "invite", "--role", "worker", "--address", "h:70000"],
    ],
)
def test_a_wrong_value_is_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Refused before anybody is asked: there is no broker here, and nobody notices."""
    assert run(" ".join(arguments[:1]), *arguments[1:]) == 2
    only_line(capsys, arguments[0])


def test_config_check(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Right: a word, or all settings as JSON; wrong: 1, and the file's fault is named."""
    path = tmp_path / "mine.toml"
    path.write_text("[broker]\nport = 5800\n")
    assert run("swarm config check", str(path)) == 0
    assert str(path) in capsys.readouterr().out
    assert run("swarm config check", "--config", str(path)) == 0
    assert str(path) in capsys.readouterr().out
    assert run("swarm config check", str(path), "--json") == 0
    assert json.loads(capsys.readouterr().out)["broker"]["port"] == 5800
    path.write_text("[broker]\nport = 'x'\n")
    assert run("swarm config check", str(path), "--json") == 1
    assert f"broker.port = 'x' from the file {path} is wrong" in only_line(capsys, "swarm")


def test_config_show(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every setting with its origin; the highest one counts. Passwords and credentials are hidden."""
    path = tmp_path / "mine.toml"
    path.write_text(
        "[broker]\nport = 5800\n[log]\nlevel = 'info'\n[[upstream]]\nurl = 'https://me:secret@other/v1'\n"
        "[worker]\nthreads = 2\n"
    )
    monkeypatch.setenv("SWARM_WORKER__THREADS", "3")
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    (tmp_path / "swarm.key").write_text("secret")
    assert run("swarm --log-level debug config show", str(path), "--json") == 0
    out = capsys.readouterr().out
    assert "secret" not in out
    body = json.loads(out)
    assert [row["name"] for row in body["settings"]] == list(setting_names())
    found = {row["name"]: (row["value"], row["from"]) for row in body["settings"]}
    assert found["broker.port"] == (5800, f"the file {path}")
    assert found["worker.threads"] == (3, "the environment variable SWARM_WORKER__THREADS")
    assert found["log.level"] == ("debug", "the command line")
    assert found["broker.min_workers"] == (defaults()["broker"]["min_workers"], "the defaults")
    assert found["upstream"][0][0]["url"] == "https://…@other/v1"
    [credential] = body["credentials"]
    assert (credential["name"], credential["from"]) == ("swarm.key", f"the credential {tmp_path / 'swarm.key'}")

    assert run("swarm config show --changed --config", str(path)) == 0
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert lines[0] == ["broker.port", "5800", "the", "file", str(path)]
    shown = [line[0] for line in lines if line[0] in setting_names()]
    assert shown == ["broker.port", "worker.threads", "log.level", "upstream"]
    assert sum("(hidden)" in line for line in lines) == 1


def test_config_show_of_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("swarm config show --changed") == 0
    assert capsys.readouterr().out == "every setting is at its default\n"
