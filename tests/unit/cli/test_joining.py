"""Where an invitation may come from: the command line, a file, standard input, the environment."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest
import typer

from swarm.auth.enrol import Enrolment
from swarm.auth.invitation import Invitation, encode
from swarm.auth.memberships import JoinedSwarm
from swarm.cli import joining
from swarm.cli.main import run
from swarm.cli.output import EXIT_USAGE
from swarm.cli.up.processes import child_environment
from swarm.config import load
from swarm.wire.messages import Enrolled
from swarm.wire.transport.keys import new_pair

INVITED = Invitation(("tcp://192.0.2.1:5700",), new_pair().public, new_pair().secret, "worker")
LINE = encode(INVITED)
SHOWN = f"{LINE}\nGood once, for 1h. Run on the other machine, and paste the line there: swarm worker --join -\n"


@pytest.fixture(autouse=True)
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Invitation]:
    """The invitations that a swarm was asked to take; it takes each."""
    found: list[Invitation] = []

    async def enrol(invitation: Invitation, *_: object) -> Enrolment:
        found.append(invitation)
        return Enrolment(invitation.addresses[0], invitation.broker, Enrolled(name="far", role=invitation.role))

    monkeypatch.setattr("swarm.auth.enrol.enrol", enrol)
    return found


def join(given: str, state: Path) -> JoinedSwarm:
    return joining.join(given, state, roles=("worker",))


@pytest.mark.parametrize("content", [LINE, SHOWN, f"\n  {LINE}  \n"])
def test_an_invitation_in_a_file(tmp_path: Path, asked: list[Invitation], content: str) -> None:
    """As it is, or as swarmctl invite prints it."""
    (tmp_path / "invitation").write_text(content)
    assert join(str(tmp_path / "invitation"), tmp_path).name == "far"
    assert asked == [INVITED]


def test_an_invitation_on_standard_input(
    tmp_path: Path, asked: list[Invitation], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One line of it is read: what follows is the command's own."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(f"{LINE}\nOnce upon a time"))
    join("-", tmp_path)
    assert asked == [INVITED]
    assert sys.stdin.read() == "Once upon a time"


def test_an_invitation_that_is_pasted_is_not_shown(
    tmp_path: Path, asked: list[Invitation], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True)
    monkeypatch.setattr("getpass.getpass", lambda _: LINE)
    join("-", tmp_path)
    assert asked == [INVITED]


def test_what_has_no_invitation_is_refused_with_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "empty").touch()
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    monkeypatch.setattr(sys, "stdin", io.StringIO("nothing\n"))
    for given, words in (
        (str(tmp_path / "nowhere"), "there is no file"),
        (str(tmp_path / "empty"), "there is no invitation in it"),
        (str(tmp_path / "binary"), "has no invitation in it"),
        (str(tmp_path), "can't be read"),
        ("-", "there is no invitation in it"),
        (LINE[:-3], "damaged or cut off"),
    ):
        with pytest.raises(typer.BadParameter, match=words):
            join(given, tmp_path)


def test_an_invitation_in_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It counts as if it stood behind --join, and is no setting. (This one is for a worker, and a client asks.)"""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SWARM_INVITATION", LINE)
    assert load().client.url == "tcp://127.0.0.1:5700"
    assert run(["generate", "x"]) == EXIT_USAGE
    assert "this invitation is for a worker" in capsys.readouterr().err


def test_children_of_swarm_up_join_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWARM_INVITATION", LINE)
    monkeypatch.setenv("SWARM_LOG__LEVEL", "debug")
    assert "SWARM_INVITATION" not in child_environment()
    assert child_environment()["SWARM_LOG__LEVEL"] == "debug"
