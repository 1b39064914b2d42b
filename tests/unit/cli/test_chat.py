"""Commands of ``swarm chat``, against a client that repeats the last message."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest

from swarm.cli.generate.chat import ChatSession
from swarm.client.blocking import Client
from swarm.client.results import Piece
from swarm.errors import Unavailable


class Answer:
    """A stream of one piece, or of an error."""

    completion = None

    def __init__(self, text: str, *, fails: bool) -> None:
        self._text, self._fails = text, fails

    def __iter__(self) -> Iterator[Piece]:
        if self._fails:
            raise Unavailable("no broker")
        yield Piece(1, self._text, 0)

    def close(self) -> None:
        """Nothing is open."""


class Parrot:
    """Answers with the number of the request and the last message; fails where it should."""

    def __init__(self, fails: tuple[int, ...] = ()) -> None:
        self.requests: list[list[dict[str, str]]] = []
        self._fails = fails

    def stream_chat(self, messages: list[dict[str, str]], **_options: object) -> Answer:
        self.requests.append(messages)
        number = len(self.requests)
        return Answer(f"{number}:{messages[-1]['content']}", fails=number in self._fails)


def talk(
    monkeypatch: pytest.MonkeyPatch, lines: list[str], *, fails: tuple[int, ...] = (), temperature: float = 1.0
) -> tuple[ChatSession, Parrot]:
    """Type these lines at a terminal; return the session at its end, and what was asked."""
    parrot = Parrot(fails)
    typed = iter([*lines, "/quit"])
    monkeypatch.setattr("builtins.input", lambda _prompt: next(typed))
    options: Any = {"temperature": temperature, "seed": None}
    session = ChatSession(cast(Client, parrot), options, None, at_terminal=True)
    session.run()
    return session, parrot


def turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def test_the_system_message_is_replaced_and_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The turns stay."""
    _, parrot = talk(monkeypatch, ["/system be  brief", "a", "/system", "b"])
    assert parrot.requests == [
        [turn("system", "be  brief"), turn("user", "a")],
        [turn("user", "a"), turn("assistant", "1:a"), turn("user", "b")],
    ]


def test_a_retry_replaces_the_answer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """It is sent with the turns before it; without a message there is nothing to send."""
    session, parrot = talk(monkeypatch, ["/retry", "a", "b", "/retry"])
    assert parrot.requests[2] == parrot.requests[1]
    assert session.turns == [turn("user", "a"), turn("assistant", "1:a"), turn("user", "b"), turn("assistant", "3:b")]
    shown = capsys.readouterr().err
    assert "(no message to send again)" in shown
    assert "the same answer" not in shown


def test_a_retry_after_a_failure_sends_the_failed_message(monkeypatch: pytest.MonkeyPatch) -> None:
    """And /reset forgets it."""
    session, parrot = talk(monkeypatch, ["a", "b", "/retry"], fails=(2,))
    assert parrot.requests[2] == parrot.requests[1]
    assert session.turns[-2:] == [turn("user", "b"), turn("assistant", "3:b")]
    _, parrot = talk(monkeypatch, ["a", "/reset", "/retry"], fails=(1,))
    assert len(parrot.requests) == 1


def test_a_message_after_a_failure_is_the_one_to_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    session, _ = talk(monkeypatch, ["a", "b", "/retry"], fails=(1,))
    assert session.turns == [turn("user", "b"), turn("assistant", "3:b")]


def test_a_retry_that_cannot_differ_has_a_note(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk(monkeypatch, ["a", "/retry"], temperature=0.0)
    assert "(the same answer: --temperature is 0, or there is a --seed)" in capsys.readouterr().err


def test_a_conversation_is_saved_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """As messages of the API; an existing file is never overwritten."""
    path = tmp_path / "my talk.json"
    talk(monkeypatch, ["/system be brief", "é", f"/save {path}", "b", f"/save {path}", "/save", "/save ~nobody1/x"])
    saved = [turn("system", "be brief"), turn("user", "é"), turn("assistant", "1:é")]
    assert json.loads(path.read_text("utf-8")) == saved
    shown = capsys.readouterr().err
    assert f"(saved to {path})" in shown
    assert f"can't write {path}: File exists" in shown
    assert "/save needs the name of a file" in shown
    assert "can't write ~nobody1/x: " in shown


def test_an_unknown_command_is_no_message(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _, parrot = talk(monkeypatch, ["/x y", "/help"])
    shown = capsys.readouterr().err
    assert parrot.requests == []
    assert "unknown command /x; /help lists them" in shown
    listed = {line.split()[0] for line in shown.splitlines() if line.startswith("/")}
    assert listed == {"/system", "/retry", "/reset", "/save", "/help", "/quit"}


def test_commands_work_without_a_terminal(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("/system s\na\n"))
    parrot = Parrot()
    ChatSession(cast(Client, parrot), {}, None, at_terminal=False).run()
    assert parrot.requests == [[turn("system", "s"), turn("user", "a")]]
    assert capsys.readouterr().out == "1:a\n"
