"""What the application holds, for its routes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from starlette.requests import Request

from swarm.gateway.aside import LONG_BODY
from swarm.gateway.desk.desk import Desk, Owner
from swarm.gateway.http.counter import Counter

R = TypeVar("R")


def desk_of(request: Request) -> Desk:
    desk: Desk = request.app.state.desk
    return desk


def counter_of(request: Request) -> Counter:
    counter: Counter = request.app.state.counter
    return counter


def owner_of(request: Request) -> Owner:
    """On whose account this is; set by whoever checked the key."""
    owner: Owner = request.scope.get("owner") or Owner()
    return owner


async def beside(request: Request, read: Callable[[], R]) -> R:
    """What is read out of the body; of a long one beside the loop."""
    if len(request.scope.get("swarm.body") or b"") <= LONG_BODY:
        return read()
    return await desk_of(request).bodies.run(read)
