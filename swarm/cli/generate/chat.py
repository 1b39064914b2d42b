"""``swarm chat``: a conversation with the model, line by line."""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from swarm.cli.generate.generate import (
    MaxTokensOption,
    MinPOption,
    SeedOption,
    TemperatureOption,
    TimeoutOption,
    TopKOption,
    TopPOption,
    completion_data,
    print_text,
    print_wait_reason,
)
from swarm.cli.options import JoinOption, JsonOption, UrlOption, open_client
from swarm.cli.output import print_json_line

if TYPE_CHECKING:
    from swarm.client.blocking import Client
    from swarm.client.request import RequestOptions

_HINT = "/help lists the commands, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"
_COMMANDS = {
    "/system TEXT": "replaces the system message; without TEXT, removes it",
    "/retry": "sends the last message again, in place of its answer",
    "/reset": "clears the conversation",
    "/save FILE": "writes the conversation to a new file, as a JSON list of messages",
    "/help": "lists the commands",
    "/quit": "leaves",
}


def chat(
    context: typer.Context,
    *,
    url: UrlOption = None,
    join: JoinOption = None,
    system: Annotated[
        str | None, typer.Option("--system", help="System message before the conversation.", show_default=False)
    ] = None,
    max_tokens: MaxTokensOption = 256,
    temperature: TemperatureOption = 0.0,
    top_k: TopKOption = 0,
    top_p: TopPOption = 1.0,
    min_p: MinPOption = 0.0,
    seed: SeedOption = None,
    timeout: TimeoutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Talk with the model.

    /help lists the commands (/system, /retry, /reset, /save, /quit). Ctrl-D leaves, Ctrl-C stops the current answer.
    Without a terminal, each line of stdin is a message or a command. With --json, each answer is one line, an object as
    swarm generate prints it.
    """
    options: RequestOptions = {
        "max_tokens": max_tokens,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
        "timeout": timeout,
    }
    with open_client(context, url, join) as client:
        print_wait_reason(client)
        ChatSession(client, options, system, at_terminal=sys.stdin.isatty(), as_json=as_json).run()


@dataclass
class ChatSession:
    """A chat session: sends each line as a message, runs commands, and keeps the conversation's turns."""

    client: Client
    options: RequestOptions
    system: str | None
    at_terminal: bool
    as_json: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)  # messages of both sides, oldest first
    unanswered: str | None = None  # last message, if its request failed; for /retry

    def run(self) -> None:
        if self.at_terminal:
            with contextlib.suppress(ImportError):  # gives input() line editing; not available everywhere
                import readline  # noqa: F401
            print(_HINT, file=sys.stderr)
        while (line := self._read_line()) is not None and line != "/quit":
            if line.startswith("/"):
                self._run_command(*line.split(maxsplit=1))
            elif line:
                self._send_turn(line)

    def _run_command(self, name: str, argument: str = "") -> None:
        match name:
            case "/system":
                self.system = argument or None
                print("(system message replaced)" if argument else "(no system message)", file=sys.stderr)
            case "/retry":
                self._retry()
            case "/reset":
                self.turns.clear()
                self.unanswered = None
                print("(conversation cleared)", file=sys.stderr)
            case "/save":
                self._save(argument)
            case "/help":
                for usage, effect in _COMMANDS.items():
                    print(f"{usage:<14}{effect}", file=sys.stderr)
            case _:
                print(f"unknown command {name}; /help lists them", file=sys.stderr)

    def _retry(self) -> None:
        line = self.unanswered
        if line is None:
            if not self.turns:
                print("(no message to send again)", file=sys.stderr)
                return
            if self.options["temperature"] == 0 or self.options["seed"] is not None:
                print("(the same answer: --temperature is 0, or there is a --seed)", file=sys.stderr)
            line = self.turns[-2]["content"]
            del self.turns[-2:]
        self._send_turn(line)

    def _save(self, name: str) -> None:
        if not name:
            print("/save needs the name of a file", file=sys.stderr)
            return
        try:
            with Path(name).expanduser().open("x", encoding="utf-8") as file:
                file.write(json.dumps(self._messages(), indent=2, ensure_ascii=False) + "\n")
        except (OSError, RuntimeError) as error:  # RuntimeError: there is no home directory of that name
            reason = error.strerror if isinstance(error, OSError) else error
            print(f"can't write {name}: {reason}", file=sys.stderr)
        else:
            print(f"(saved to {name})", file=sys.stderr)

    def _messages(self) -> list[dict[str, str]]:
        return [*([{"role": "system", "content": self.system}] if self.system else []), *self.turns]

    def _read_line(self) -> str | None:
        """Return the next line; None at the end."""
        while True:
            try:
                return input("> ").strip() if self.at_terminal else next(sys.stdin).strip()
            except (EOFError, StopIteration):
                if self.at_terminal:
                    print()
                return None
            except KeyboardInterrupt:
                if not self.at_terminal:
                    raise
                print(f"\n({_HINT})", file=sys.stderr)

    def _send_turn(self, line: str) -> None:
        from swarm.errors import ClientError

        self.unanswered = None
        self.turns.append({"role": "user", "content": line})
        try:
            answer = self._answer_within_context()
        except ClientError as error:
            self.turns.pop()
            self.unanswered = line
            if not self.at_terminal:
                raise
            print(f"swarm: {error}", file=sys.stderr)
        else:
            self.turns.append({"role": "assistant", "content": answer})

    def _answer_within_context(self) -> str:
        """Return the answer. While the conversation exceeds the model's context, drop its oldest turns."""
        from swarm.errors import InvalidRequest

        while True:
            try:
                return self._answer()
            except InvalidRequest as error:
                if error.code != "context" or len(self.turns) < 3:
                    raise
                del self.turns[:2]
                print("(the oldest turn was dropped: the model's context is full)", file=sys.stderr)

    def _answer(self) -> str:
        """Stream an answer. Ctrl-C stops it; the text so far is kept as the answer."""
        stream = self.client.stream_chat(self._messages(), **self.options)
        pieces: list[str] = []
        try:
            for piece in stream:
                pieces.append(piece.text)
                self._show(piece.text)
        except KeyboardInterrupt:
            if not self.at_terminal:
                raise
            self._show(" …")
        finally:
            stream.close()
            if pieces:
                self._show("\n")
        if self.as_json and stream.completion is not None:
            print_json_line(completion_data(stream.completion))
        return "".join(pieces)

    def _show(self, text: str) -> None:
        if not self.as_json:
            print_text(text)
