"""The gateway's process: an HTTP server, a client of the broker, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from swarm import failpoints
from swarm.auth.access import BrokerCredentials
from swarm.client.client import AsyncClient
from swarm.config.display import settings_report
from swarm.errors import ConfigError
from swarm.gateway.completion.served_model import RequestDefaults
from swarm.gateway.completion.service import CompletionService
from swarm.gateway.console.local_swarm import NO_LOCAL_SWARM, LocalSwarm
from swarm.gateway.images import ImageRules
from swarm.gateway.middleware.connection import BACKLOG, KEEP_ALIVE_S, MAX_HEAD_BYTES, bounded_protocol
from swarm.gateway.middleware.gateway_app import GatewayApp
from swarm.log import get_logger
from swarm.systemd import status_text
from swarm.systemd.service_context import ServiceContext

if TYPE_CHECKING:
    from swarm.config import GatewaySettings, Settings

GRACE_S = 3.0  # seconds for answers in progress at shutdown
SWITCH_INTERVAL_S = 0.001  # seconds until a computing thread yields to the loop; Python's default is five times as long
_OTHER_DESCRIPTORS = 1200  # connections to other servers, and a process's usual descriptors
_RELEASE_S = 1.0  # seconds for connections to close after that

log = get_logger(__name__)


def run(
    settings: Settings,
    broker: BrokerCredentials | str | None = None,
    unit: ServiceContext | None = None,
    local_swarm: LocalSwarm = NO_LOCAL_SWARM,
) -> int:
    """Serve until SIGTERM or SIGINT and return the process's exit code.

    ``broker``: as for ``AsyncClient``. ``unit``: the process's context under systemd. ``local_swarm``: the local swarm
    that ``swarm up`` runs. Raises ConfigError if the address cannot be bound.
    """
    failpoints.arm(os.environ)
    # the library has few threads of its own: a long prompt would block all others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    _raise_descriptor_limit(settings.gateway.max_connections + _OTHER_DESCRIPTORS)
    with _bind_listener(settings.gateway) as listener:
        return uvloop.run(_main(settings, listener, broker, unit or ServiceContext.unmanaged(settings), local_swarm))


def _raise_descriptor_limit(count: int) -> None:
    """Raise the limit of open files: each connection takes one, and default limits are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < count:
            log.warning("few_descriptors", most=most, wanted=count, note="raise ulimit -n, or lower max_connections")


def _bind_listener(own: GatewaySettings) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in own.host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((own.host, own.port))
        listener.listen(BACKLOG)  # connections wait from now on; and a second gateway cannot take the port
    except OSError as error:
        listener.close()
        text = f"can't serve at port {own.port} of {own.host} ({error.strerror}); choose another one with --http"
        raise ConfigError(text) from None
    return listener


async def _main(
    settings: Settings,
    listener: socket.socket,
    broker: BrokerCredentials | str | None,
    unit: ServiceContext,
    local_swarm: LocalSwarm,
) -> int:
    own = settings.gateway

    # aliases of the settings are the first model's
    brokers: list[tuple[BrokerCredentials | str | None, list[str]]] = [(broker, [])]
    if settings.swarm:
        brokers = [(entry.url, entry.aliases) for entry in settings.swarm]
    brokers[0] = brokers[0][0], [*own.aliases, *brokers[0][1]]

    def make_client(broker: BrokerCredentials | str | None) -> AsyncClient:
        return AsyncClient(
            broker,
            connect_timeout_s=settings.client.connect_timeout_s,
            reconnect_timeout_s=settings.client.reconnect_timeout_s,
        )

    services = [
        CompletionService(
            make_client(broker),
            aliases,
            parse_special=own.parse_special_tokens,
            ignore_unknown_fields=own.unknown_fields == "ignore",
            defaults=RequestDefaults(own.default_max_tokens, own.default_temperature),
            images=ImageRules(own.max_images, own.max_image_pixels, own.image_tokens),
        )
        for broker, aliases in brokers
    ]
    clients = [service.client for service in services]
    gateway_app = GatewayApp(
        settings,
        services,
        local_swarm,
        lambda: make_client(brokers[0][0]),
        lambda: settings_report("gateway", unit.describe_settings("gateway")),
    )
    config = uvicorn.Config(
        gateway_app.app,
        http=bounded_protocol(own, gateway_app.metrics.count_bad_connection),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    log.info("gateway_listens", url=f"http://{own.host}:{own.port}", broker=", ".join(client.url for client in clients))
    if not gateway_app.needs_keys:
        log.warning("no_keys", note="only this machine is served; swarmctl keys add makes a key")
    warming = [asyncio.create_task(service.keep_warm()) for service in services]
    try:
        await GatewayServer(config, clients, unit, f"http://{own.host}:{own.port}", gateway_app.end_streams).serve(
            sockets=[listener]
        )
    finally:
        for task in warming:
            task.cancel()
        await asyncio.gather(*warming, return_exceptions=True)
        await gateway_app.aclose()
    log.info("gateway_ended")
    return 0


class GatewayServer(uvicorn.Server):
    """HTTP server with its own shutdown order: a stream's reader may continue at another gateway, so no request is
    cancelled."""

    def __init__(
        self,
        config: uvicorn.Config,
        clients: Sequence[AsyncClient],
        unit: ServiceContext,
        url: str,
        end_streams: Callable[[], None],
    ) -> None:
        """Create the server. ``end_streams``: ends streams that have no end of their own."""
        super().__init__(config)
        self._clients, self._unit, self._url, self._end_streams = clients, unit, url, end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._unit.enable_reload(asyncio.get_running_loop())
        self._unit.manager.send_ready(status_text.gateway_status(self._url))

    async def on_tick(self, counter: int) -> bool:
        if failpoints.armed:
            failpoints.hit("gateway.turn")
        self._unit.manager.send_alive()  # the loop is running
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End with exit code 0 after an orderly shutdown; a second signal ends immediately."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        yield

    def _on_signal(self) -> None:
        self._unit.manager.send_stopping("ending the answers in progress")
        self.force_exit = self.should_exit
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        for server in self.servers:
            server.close()
        for sock in sockets or []:
            sock.close()
        for connection in list(self.server_state.connections):
            connection.shutdown()  # closes now if the connection is idle
        self._end_streams()
        await self._wait_until_idle(GRACE_S)
        num_left = len(self.server_state.tasks)
        for client in self._clients:
            await client.abandon()  # before the tasks end: they would cancel their requests
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._wait_until_idle(_RELEASE_S)
        if num_left:
            log.info("gateway_let_go", num_answers=num_left)
        await self.lifespan.shutdown()

    async def _wait_until_idle(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while (self.server_state.connections or self.server_state.tasks) and loop.time() < until:
            if self.force_exit:
                return
            await asyncio.sleep(0.02)
