"""``swarm chat``: a conversation with the model, line by line."""

from __future__ import annotations

import contextlib
import sys
from dataclasses import dataclass, field
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

_HELP = "/reset clears the conversation, /quit (or Ctrl-D) leaves, Ctrl-C stops an answer"


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

    /reset clears the conversation, /quit or Ctrl-D leaves, Ctrl-C stops the current answer. Without a terminal, each
    line of stdin is a message. With --json, each answer is one line, an object as swarm generate prints it.
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
    """A chat session: sends each line as a message and keeps the conversation's turns."""

    client: Client
    options: RequestOptions
    system: str | None
    at_terminal: bool
    as_json: bool = False
    turns: list[dict[str, str]] = field(default_factory=list)  # messages of both sides, oldest first

    def run(self) -> None:
        if self.at_terminal:
            with contextlib.suppress(ImportError):  # gives input() line editing; not available everywhere
                import readline  # noqa: F401
            print(_HELP, file=sys.stderr)
        while (line := self._read_line()) is not None:
            if line == "/quit":
                return
            if line == "/reset":
                self.turns.clear()
                print("(conversation cleared)", file=sys.stderr)
            elif line.startswith("/"):
                print(_HELP, file=sys.stderr)
            elif line:
                self._send_turn(line)

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
                print(f"\n({_HELP})", file=sys.stderr)

    def _send_turn(self, line: str) -> None:
        from swarm.errors import ClientError

        self.turns.append({"role": "user", "content": line})
        try:
            answer = self._answer_within_context()
        except ClientError as error:
            self.turns.pop()  # the user may send it again
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
        messages = [{"role": "system", "content": self.system}] if self.system else []
        stream = self.client.stream_chat([*messages, *self.turns], **self.options)
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
