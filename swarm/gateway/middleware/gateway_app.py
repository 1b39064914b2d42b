"""Assembles the gateway: puts CORS, authentication with limits, and other servers in front of the routes."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Receive, Scope, Send

from swarm.api_keys.file import NAME, ReloadingKeyFile
from swarm.config import is_loopback
from swarm.errors import ConfigError
from swarm.gateway.app import make_app
from swarm.gateway.batches.service import BatchService
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.console.console import Console, MakeClient
from swarm.gateway.console.local_swarm import NO_LOCAL_SWARM, LocalSwarm
from swarm.gateway.http.json import ANTHROPIC_ID, REQUEST_ID
from swarm.gateway.http.usage import UsageRecorder
from swarm.gateway.middleware.auth import AuthMiddleware
from swarm.gateway.middleware.body import MAX_VALUES
from swarm.gateway.middleware.fast_path import FastPath
from swarm.gateway.middleware.security_headers import add_security_headers
from swarm.gateway.swarms import Swarms
from swarm.gateway.upstream.proxy import UpstreamProxy
from swarm.metrics.http import HttpMetrics
from swarm.metrics.tracing import make_span_exporter
from swarm.wire.messages import Json

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

    from swarm.config import Settings


class GatewayApp:
    """A whole gateway as an ASGI application. Raises ConfigError for settings that would open it to everyone."""

    def __init__(
        self,
        settings: Settings,
        services: Sequence[CompletionService],
        local_swarm: LocalSwarm = NO_LOCAL_SWARM,
        make_client: MakeClient | None = None,
        settings_report: Callable[[], Json] = dict,
    ) -> None:
        """Assemble the application on one completion service per swarm. ``make_client`` and ``settings_report`` are
        passed on to ``Console`` (as ``make_client`` and ``settings``)."""
        own = settings.gateway
        keys = ReloadingKeyFile(keys_path(settings))
        self.needs_keys = keys.keys is not None
        if own.keys_file is not None and keys.keys is None:
            raise ConfigError(
                f"gateway.keys_file is {keys.path}, and there is no such file: make a key with swarmctl keys add, or "
                "leave the setting out"
            )
        if not is_loopback(own.host) and (keys.keys is None or not keys.keys.keys):
            raise ConfigError(
                f"other machines can reach {own.host}, and {keys.path} has no keys yet: make one with swarmctl keys add"
            )
        self.metrics, swarms = HttpMetrics(), Swarms(services)
        self.upstreams = UpstreamProxy(self._routes, settings.upstream, self.metrics, swarms.own_name)
        guard = self._auth = AuthMiddleware(self.upstreams, keys, own, metrics=self.metrics)
        guard.context = swarms.max_context
        self.console: Console | None = None
        if own.console:
            self.console = Console(
                make_client or (lambda: services[0].client),
                lambda: keys.keys.keys if keys.keys else (),
                guard.usage,
                local_swarm,
                settings_report,
            )
            guard.public_paths = self.console.open_paths
        self.batches = BatchService(
            settings.state_dir,
            settings.batch,
            self._routes,
            max_line_bytes=int(own.max_body),
            body_timeout_s=own.body_timeout_s,
            check_owner=guard.check_owner,
            max_values=lambda: max(MAX_VALUES, 2 * guard.context()),
        )
        accounts = UsageRecorder(self.metrics, guard, make_span_exporter(own.traces, swarms.trace))
        self._routes_app: FastAPI = make_app(swarms, accounts, self.console, self.batches)
        self._routes_app.state.more_models = self.upstreams.models
        self._fast_path = FastPath(self._routes_app)
        self.app: ASGIApp = guard if self.console is None else add_security_headers(guard)
        if own.cors_origins:
            self.app = CORSMiddleware(
                self.app,
                allow_origins=own.cors_origins,
                allow_methods=["GET", "POST", "DELETE"],
                allow_headers=["*"],
                expose_headers=[REQUEST_ID, ANTHROPIC_ID, "retry-after", "x-swarm-upstream"],
            )

    async def _routes(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._fast_path(scope, receive, send)

    def end_streams(self) -> None:
        """End the streams of open consoles, which would not end by themselves, and start no more lines of batches."""
        self.batches.stop()
        if self.console is not None:
            self.console.poller.end_streams()

    async def aclose(self) -> None:
        self._auth.close()
        await self.upstreams.aclose()


def keys_path(settings: Settings) -> Path | None:
    """Return the path of the API keys' file; None if no location is configured."""
    if settings.gateway.keys_file is not None:
        return settings.gateway.keys_file
    return None if settings.state_dir is None else settings.state_dir / NAME
