"""Common path of the APIs with a single conversation: from a body to its answer."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Protocol, TypeVar

from starlette.requests import Request
from starlette.responses import Response

from swarm.gateway.ask import Ask
from swarm.gateway.desk.served import Served
from swarm.gateway.http.counter import Job, MakeWriter
from swarm.gateway.http.state import beside, counter_of, desk_of, owner_of
from swarm.gateway.memo import Memo


class Body(Protocol):
    @property
    def stream(self) -> bool | None: ...


B = TypeVar("B", bound=Body)


async def answer(
    request: Request,
    body: B,
    ask_of: Callable[[B, Served], Ask],
    memo_of: Callable[[B, Ask, int], Memo],
    make_writer: MakeWriter,
) -> Response:
    """Answer a conversation. Raises ApiError."""
    served = await desk_of(request).served()

    def read() -> tuple[Ask, Memo]:
        ask = ask_of(body, served)
        return ask, memo_of(body, ask, int(time.time()))

    ask, memo = await beside(request, read)
    request_id = secrets.token_hex(16)
    job = Job(request_id, [ask], memo, make_writer(memo, served, request_id), bool(body.stream))
    return await counter_of(request).serve(request, served, owner_of(request), job)
