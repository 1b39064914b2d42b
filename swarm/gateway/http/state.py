"""What the application holds, for its routes."""

from __future__ import annotations

from starlette.requests import Request

from swarm.gateway.desk.desk import Desk, Owner
from swarm.gateway.http.counter import Counter


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
