"""Assembles the gateway: puts CORS, authentication with limits, and other servers in front of the routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.config import is_loopback
from swarm.errors import ConfigError
from swarm.gateway.app import make_app
from swarm.gateway.console.console import Console, MakeClient
from swarm.gateway.console.household import STRANGERS, Household
from swarm.gateway.desk.desk import Desk
from swarm.gateway.doors.guard import Guard
from swarm.gateway.doors.lane import Lane
from swarm.gateway.doors.seal import sealed
from swarm.gateway.http.accounts import Accounts
from swarm.gateway.http.json import ANTHROPIC_ID, REQUEST_ID
from swarm.gateway.upstream.relay import Upstreams
from swarm.keys.file import NAME, Watched
from swarm.numbers.http import HttpNumbers
from swarm.numbers.spans import make_tracer
from swarm.wire.messages import Json

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from swarm.config import Settings


class Doors:
    """A whole gateway as an ASGI application. Raises ConfigError for settings that would open it to everyone."""

    def __init__(
        self,
        settings: Settings,
        desk: Desk,
        home: Household = STRANGERS,
        make_client: MakeClient | None = None,
        shown: Callable[[], Json] = dict,
    ) -> None:
        """Assemble the application. ``make_client`` and ``settings_report`` are passed on to ``Console`` (as
        ``make_client`` and ``settings``)."""
        own = settings.gateway
        keys = Watched(keys_file(settings))
        self.needs_keys = keys.ring is not None
        if own.keys_file is not None and keys.ring is None:
            raise ConfigError(
                f"gateway.keys_file is {keys.path}, and there is no such file: make a key with swarmctl keys add, or "
                "leave the setting out"
            )
        if not is_loopback(own.host) and (keys.ring is None or not keys.ring.keys):
            raise ConfigError(
                f"other machines can reach {own.host}, and {keys.path} has no keys yet: make one with swarmctl keys add"
            )
        self.numbers = HttpNumbers()
        self.upstreams = Upstreams(self._routes, settings.upstream, self.numbers, lambda: desk.served_last)
        guard = self._guard = Guard(self.upstreams, keys, own, numbers=self.numbers)
        guard.context = lambda: desk.served_last.manifest.context if desk.served_last is not None else 0
        self.console: Console | None = None
        if own.console:
            self.console = Console(
                make_client or (lambda: desk.client),
                lambda: keys.ring.keys if keys.ring else (),
                guard.usage,
                home,
                shown,
            )
            guard.page = self.console.open_paths
        accounts = Accounts(self.numbers, guard, make_tracer(own.traces, desk.client.trace))
        self._inner: FastAPI = make_app(desk, accounts, self.console)
        self._inner.state.more_models = self.upstreams.models
        self._lane = Lane(self._inner)
        self.app: ASGIApp = guard if self.console is None else sealed(guard)
        if own.cors_origins:
            self.app = CORSMiddleware(
                self.app,
                allow_origins=own.cors_origins,
                allow_methods=["GET", "POST"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID, ANTHROPIC_ID, "retry-after", "x-swarm-upstream"],
            )

    async def _routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._lane(scope, receive, send)

    def end_streams(self) -> None:
        """End the streams without an end of their own, those of open consoles."""
        if self.console is not None:
            self.console.watch.end()

    async def aclose(self) -> None:
        self._guard.close()
        await self.upstreams.aclose()


def keys_file(settings: Settings) -> Path | None:
    """Return the path of the API keys' file; None if no location is configured."""
    if settings.gateway.keys_file is not None:
        return settings.gateway.keys_file
    return None if settings.state_dir is None else settings.state_dir / NAME
