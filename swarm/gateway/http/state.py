"""Access to the application's objects for routes."""

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
    """Return the caller on whose account the request runs; the auth middleware sets it."""
    owner: Owner = request.scope.get("owner") or Owner()
    return owner


async def beside(request: Request, read: Callable[[], R]) -> R:
    """Run a function that interprets the body, in a thread if the body is long."""
    if len(request.scope.get("swarm.body") or b"") <= LONG_BODY:
        return read()
    return await desk_of(request).bodies.run(read)
