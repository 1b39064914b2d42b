"""``swarm systemd``: what it does where systemd does not answer, in an image, and with what can't be removed."""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import typer

from swarm.cli.main import run

NO_BUS = "Failed to connect to bus: No medium found"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Of a user, whose systemd can be asked by a script of ours."""
    place = tmp_path / "home"
    place.mkdir()
    monkeypatch.setenv("HOME", str(place))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    return place


def systemctl(home: Path, script: str) -> None:
    """From now on it is this."""
    path = home.parent / "bin/systemctl"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f'#!/bin/sh\necho "$@" >> {home.parent}/asked\n{script}\n')
    path.chmod(0o755)


def files_in(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if path.is_file())


def test_without_a_bus_nothing_is_installed(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It is asked before the first file is written: what it does not see is no installation."""
    systemctl(home, f"echo '{NO_BUS}' >&2; exit 1")
    assert run(["systemd", "install", "--user"]) == 1
    assert NO_BUS in capsys.readouterr().err
    assert files_in(home) == []


def test_what_is_there_goes_without_a_bus_too(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And it is said that nobody was asked to stop anything, with an exit code for scripts."""
    systemctl(home, "exit 0")
    assert run(["systemd", "install", "--user"]) == 0
    assert len(files_in(home)) > 5
    systemctl(home, f"echo '{NO_BUS}' >&2; exit 1")
    capsys.readouterr()
    assert run(["systemd", "uninstall", "--user", "--purge"]) == 1
    said = capsys.readouterr()
    assert f"{NO_BUS}: it was not asked to stop anything" in said.err
    assert len(said.err.splitlines()) == 1
    assert files_in(home) == []


def test_who_will_not_stop_keeps_its_files(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where systemd answers, and a unit does not end: neither its unit nor its state is taken away under it."""
    systemctl(home, "exit 0")
    run(["systemd", "install", "--user"])
    before = files_in(home)
    systemctl(
        home,
        'case "$*" in *list-units*) echo swarm-broker.service loaded;; *stop*) echo it hangs >&2; exit 1;; esac',
    )
    assert run(["systemd", "uninstall", "--user", "--purge"]) == 1
    assert "it hangs" in capsys.readouterr().err
    assert files_in(home) == before


def test_what_can_not_be_removed_is_said(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The rest goes."""
    systemctl(home, "exit 0")
    run(["systemd", "install", "--user"])
    state = home / ".local/state/swarm"
    state.mkdir(parents=True)
    (state / "journal.sqlite").touch()
    real, kept = os.unlink, str(state / "journal.sqlite")

    def unlink(path: str, *, dir_fd: int | None = None) -> None:
        if os.path.basename(path) == os.path.basename(kept):
            raise PermissionError(1, "Operation not permitted", path)
        real(path, dir_fd=dir_fd)

    monkeypatch.setattr(os, "unlink", unlink)
    capsys.readouterr()
    assert run(["systemd", "uninstall", "--user", "--purge", "--json"]) == 1
    said = capsys.readouterr()
    told = json.loads(said.out)
    assert told["purged"] is True
    assert told["left"] == [f"{kept} can't be removed (Operation not permitted)"]
    assert f"{kept} can't be removed" in said.err
    assert files_in(home) == [".local/state/swarm/journal.sqlite"]


@pytest.mark.slow
def test_purging_asks_on_a_terminal(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Keys and requests are gone by it. Whoever says no has lost nothing; --yes is not asked, nor who keeps them."""
    systemctl(home, "exit 0")
    run(["systemd", "install", "--user"])
    before = files_in(home)
    asked: list[str] = []
    monkeypatch.setattr(sys, "stdin", type("Terminal", (), {"isatty": lambda _: True})())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setattr(typer, "confirm", lambda question, **_: asked.append(question))
    capsys.readouterr()
    assert run(["systemd", "uninstall", "--user", "--purge"]) == 1
    assert capsys.readouterr().err == "swarm: nothing was done: the answer was no\n"
    assert f"{home}/.config/swarm" in asked[0]
    assert files_in(home) == before
    assert run(["systemd", "uninstall", "--user"]) == 0
    assert files_in(home) == [".config/swarm/swarm.toml"]
    assert run(["systemd", "uninstall", "--user", "--purge", "--yes"]) == 0
    assert files_in(home) == []
    assert len(asked) == 1


def image(tmp_path: Path, program: str = "", python: str = "/usr/bin/python3") -> Path:
    root = tmp_path / "image"
    root.mkdir()
    if program:
        path = root / program.removeprefix("/")
        path.parent.mkdir(parents=True)
        path.write_text(f"#!{python}\n")
    return root


def started_by(root: Path) -> str:
    unit = (root / "etc/systemd/system/swarm-broker.service").read_text()
    return next(line for line in unit.splitlines() if line.startswith("ExecStart=")).removeprefix("ExecStart=")


def test_an_image_s_own_program_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However this machine's Python is installed: in somebody's home, say."""
    monkeypatch.setattr("sys.executable", "/root/venv/bin/python")
    root = image(tmp_path, "/usr/local/bin/swarm")
    assert run(["systemd", "install", "--root", str(root)]) == 0
    assert started_by(root).startswith("/usr/local/bin/swarm ")


def test_an_image_without_the_program_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.executable", "/root/venv/bin/python")
    root = image(tmp_path)
    assert run(["systemd", "install", "--root", str(root)]) == 0
    assert f"there is no swarm in {root} yet: install the package there, as /opt/swarm/" in capsys.readouterr().out
    assert started_by(root).startswith("/opt/swarm/bin/swarm ")


def test_an_image_s_program_that_units_can_not_run_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = image(tmp_path, "/usr/local/bin/swarm", "/home/ann/venv/bin/python")
    assert run(["systemd", "install", "--root", str(root)]) == 1
    assert "runs by /home/ann/venv/bin/python, in a home directory" in capsys.readouterr().err
    assert not (root / "etc").exists()


@pytest.mark.skipif(shutil.which("systemctl") is None, reason="not installed: systemd (Debian)")
def test_the_units_of_an_image_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Which there are, and whether they start at boot; systemd needs not run for that."""
    root = image(tmp_path, "/usr/local/bin/swarm")
    run(["systemd", "install", "--root", str(root)])
    capsys.readouterr()
    assert run(["systemd", "status", "--root", str(root), "--json"]) == 0
    rows = {row["Id"]: row["UnitFileState"] for row in json.loads(capsys.readouterr().out)}
    assert rows["swarm-broker.service"] == "disabled"
    assert {"swarm-gateway.service", "swarm-worker@.service", "swarm.target"} <= set(rows)
    assert run(["systemd", "status", "--root", str(root)]) == 0
    assert ["swarm-broker.service", "disabled"] in [line.split() for line in capsys.readouterr().out.splitlines()]
