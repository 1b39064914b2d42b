"""Identity of a request at the broker."""

from __future__ import annotations

import secrets
import time
from dataclasses import dataclass

from starlette.requests import Request


@dataclass(frozen=True, slots=True)
class RequestIdentity:
    """What makes a repeated request the same one at the broker: the request continues without its reader, and is found
    again by its id. ``seed``: for a request that gives none."""

    request_id: str
    created: int
    seed: int = 0


def identity_of(request: Request) -> RequestIdentity | None:
    """Return the identity of a batch's line; None for other requests, which have a new one each."""
    identity: RequestIdentity | None = request.scope.get("swarm.identity")
    return identity


def new_identity(request: Request) -> RequestIdentity:
    """Return the identity that the request has or gets."""
    return identity_of(request) or RequestIdentity(secrets.token_hex(16), int(time.time()))
