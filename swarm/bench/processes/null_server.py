"""The null server: answers every request immediately with the requested number of canned chunks. A client measures its
own ceiling against it.

Each chunk is a separate write, one per stream and turn of the loop, like a server that generates; a slower client reads
several chunks together, as it would from any server. The server implements only the necessary part of HTTP: POST with a
Content-Length on a persistent connection.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import deque
from typing import cast

import msgspec

from swarm.bench.processes.loops import run_loop
from swarm.bench.processes.pipe_messages import ProcessReady, encode_line

MAX_BODY_BYTES = 64 * 1024 * 1024
MAX_TOKENS = 1_000_000


class _RequestBody(msgspec.Struct):
    max_tokens: int = 16
    max_completion_tokens: int | None = None
    stream: bool = False
    messages: list[object] | None = None


_decode_request = msgspec.json.Decoder(_RequestBody).decode


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _event(chat: bool, finish: str | None) -> bytes:
    choice: dict[str, object] = {"index": 0, "finish_reason": finish}
    if chat:
        choice["delta"] = {} if finish else {"content": " word"}
    else:
        choice["text"] = "" if finish else " word"
    kind = "chat.completion.chunk" if chat else "text_completion"
    data = {"id": "cmpl-0123456789abcdef", "object": kind, "created": 1, "model": "null", "choices": [choice]}
    return _chunk(b"data: " + msgspec.json.encode(data) + b"\n\n")


PIECE = {chat: _event(chat, None) for chat in (True, False)}
LAST = {chat: _event(chat, "length") for chat in (True, False)}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": 1, "completion_tokens": num_tokens, "total_tokens": num_tokens + 1}


def _stream_end(chat: bool, num_tokens: int) -> bytes:
    usage = msgspec.json.encode({"choices": [], "usage": _usage(num_tokens)})
    return LAST[chat] + _chunk(b"data: " + usage + b"\n\n") + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"


def _full_response(chat: bool, num_tokens: int) -> bytes:
    text = " word" * num_tokens
    message: dict[str, object] = {"message": {"role": "assistant", "content": text}} if chat else {"text": text}
    data = {"choices": [{"index": 0, "finish_reason": "length", **message}], "usage": _usage(num_tokens)}
    body = msgspec.json.encode(data)
    return f"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body


class StreamScheduler:
    """Scheduler that writes one chunk per stream in each turn of the event loop."""

    def __init__(self) -> None:
        self._streams: deque[_Connection] = deque()
        self._is_running = False

    def add(self, stream: _Connection) -> None:
        self._streams.append(stream)
        if not self._is_running:
            self._is_running = True
            asyncio.get_running_loop().call_soon(self._run_turn)

    def _run_turn(self) -> None:
        for _ in range(len(self._streams)):
            stream = self._streams.popleft()
            if stream.write_piece():
                self._streams.append(stream)
        self._is_running = bool(self._streams)
        if self._is_running:
            asyncio.get_running_loop().call_soon(self._run_turn)


class _Connection(asyncio.Protocol):
    def __init__(self, turns: StreamScheduler) -> None:
        self._turns = turns
        self._transport: asyncio.Transport | None = None
        self._input = b""
        self._left = self._num_tokens = 0  # chunks left to write
        self._is_chat = True
        self._is_paused = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport has the interface without the base class
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None

    def pause_writing(self) -> None:
        self._is_paused = True

    def resume_writing(self) -> None:
        self._is_paused = False
        if self._left:
            self._turns.add(self)

    def data_received(self, data: bytes) -> None:
        self._input += data
        head, ending, rest = self._input.partition(b"\r\n\r\n")
        if not ending and len(head) < 65536:
            return
        length = _content_length(head)
        if length is None or not ending:
            self._refuse()
        elif len(rest) >= length:
            self._input = rest[length:]
            self._answer(b"/chat/" in head.partition(b"\r\n")[0], rest[:length])

    def write_piece(self) -> bool:
        """Write the next chunk; return whether there are more and the client accepts them."""
        if self._transport is None or self._left <= 0:
            return False
        self._transport.write(PIECE[self._is_chat])
        self._left -= 1
        if not self._left:
            self._transport.write(_stream_end(self._is_chat, self._num_tokens))
        return self._left > 0 and not self._is_paused

    def _answer(self, chat: bool, body: bytes) -> None:
        try:
            request = _decode_request(body)
        except msgspec.DecodeError:
            return self._refuse()
        number = request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
        number = max(1, min(MAX_TOKENS, number))
        if self._transport is None:
            return None
        if not request.stream:
            return self._transport.write(_full_response(chat, number))
        self._is_chat, self._left, self._num_tokens = chat, number, number
        self._transport.write(STREAM_HEAD)
        return self._turns.add(self)

    def _refuse(self) -> None:
        if self._transport is not None:
            self._transport.write(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            self._transport.close()


def _content_length(head: bytes) -> int | None:
    for text in head.split(b"\r\n")[1:]:
        name, _, value = text.partition(b":")
        if name.strip().lower() == b"content-length":
            number = value.strip()
            return int(number) if number.isdigit() and int(number) <= MAX_BODY_BYTES else None
    return None


async def serve() -> None:
    """Serve on a free port, which is reported on stdout, until stdin is closed."""
    loop, turns = asyncio.get_running_loop(), StreamScheduler()
    server = await loop.create_server(lambda: _Connection(turns), "127.0.0.1", 0, backlog=4096)
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    os.write(sys.stdout.fileno(), encode_line(ProcessReady(server.sockets[0].getsockname()[1])))
    while await reader.readline():
        pass
    server.close()


def main() -> None:
    run_loop(serve())


if __name__ == "__main__":
    main()
