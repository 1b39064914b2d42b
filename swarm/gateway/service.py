"""The gateway's process: an HTTP server, a client of the broker, and an orderly shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import uvicorn
import uvloop

from swarm import failpoints
from swarm.client.client import AsyncClient
from swarm.config.shown import report
from swarm.errors import ConfigError
from swarm.gateway.console.household import STRANGERS, Household
from swarm.gateway.desk.desk import Desk
from swarm.gateway.doors.build import Doors
from swarm.gateway.doors.connection import BACKLOG, KEEP_ALIVE_S, MAX_HEAD_BYTES, connections_of
from swarm.lock.access import Access
from swarm.log import get_logger
from swarm.service import words
from swarm.service.unit import Unit

if TYPE_CHECKING:
    from swarm.config import GatewaySettings, Settings

GRACE_S = 3.0  # seconds for answers in progress at shutdown
SWITCH_S = 0.001  # seconds until a computing thread yields to the loop; Python's default is five times as long
_OTHER_DESCRIPTORS = 1200  # connections to other servers, and a process's usual descriptors
_RELEASE_S = 1.0  # seconds for connections to close after that

log = get_logger(__name__)


def run(
    settings: Settings,
    broker: Access | str | None = None,
    unit: Unit | None = None,
    home: Household = STRANGERS,
) -> int:
    """Serve until SIGTERM or SIGINT and return the process's exit code.

    ``broker``: as for ``AsyncClient``. ``unit``: the process's context under systemd. ``local_swarm``: the local swarm
    that ``swarm up`` runs. Raises ConfigError if the address cannot be bound.
    """
    failpoints.arm(os.environ)
    # the library has few threads of its own: a long prompt would block all others
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    sys.setswitchinterval(SWITCH_S)
    _allow_descriptors(settings.gateway.max_connections + _OTHER_DESCRIPTORS)
    with _listener(settings.gateway) as listener:
        return uvloop.run(_main(settings, listener, broker, unit or Unit.nobodys(settings), home))


def _allow_descriptors(count: int) -> None:
    """Raise the limit of open files: each connection takes one, and default limits are low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < count:
        most = count if hard == resource.RLIM_INFINITY else min(count, hard)
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        if most < count:
            log.warning("few_descriptors", most=most, wanted=count, note="raise ulimit -n, or lower max_connections")


def _listener(own: GatewaySettings) -> socket.socket:
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
    settings: Settings, listener: socket.socket, broker: Access | str | None, unit: Unit, home: Household
) -> int:
    own = settings.gateway

    def make_client() -> AsyncClient:
        return AsyncClient(
            broker,
            connect_timeout_s=settings.client.connect_timeout_s,
            reconnect_timeout_s=settings.client.reconnect_timeout_s,
        )

    client = make_client()
    desk = Desk(client, own.aliases, parse_special=own.parse_special_tokens)
    doors = Doors(settings, desk, home, make_client, lambda: report("gateway", unit.shown("gateway")))
    config = uvicorn.Config(
        doors.app,
        http=connections_of(own, doors.numbers.refused_connection),
        ws="none",
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_keep_alive=int(KEEP_ALIVE_S),
        h11_max_incomplete_event_size=MAX_HEAD_BYTES,
    )
    log.info("gateway_listens", url=f"http://{own.host}:{own.port}", broker=client.url)
    if not doors.needs_keys:
        log.warning("no_keys", note="only this machine is served; swarmctl keys add makes a key")
    warming = asyncio.create_task(desk.keep_warm())
    try:
        await Server(config, client, unit, f"http://{own.host}:{own.port}", doors.end_streams).serve(sockets=[listener])
    finally:
        warming.cancel()
        await asyncio.gather(warming, return_exceptions=True)
        await doors.aclose()
    log.info("gateway_ended")
    return 0


class Server(uvicorn.Server):
    """HTTP server with its own shutdown order: a stream's reader may continue at another gateway, so no request is
    cancelled."""

    def __init__(
        self, config: uvicorn.Config, client: AsyncClient, unit: Unit, url: str, end_streams: Callable[[], None]
    ) -> None:
        """Create the server. ``end_streams``: ends streams that have no end of their own."""
        super().__init__(config)
        self._client, self._unit, self._url, self._end_streams = client, unit, url, end_streams

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._unit.listen(asyncio.get_running_loop())
        self._unit.manager.ready(words.of_gateway(self._url))

    async def on_tick(self, counter: int) -> bool:
        if failpoints.armed:
            failpoints.reached("gateway.turn")
        self._unit.manager.alive()  # the loop is running
        return await super().on_tick(counter)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """End with exit code 0 after an orderly shutdown; a second signal ends immediately."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._told)
        yield

    def _told(self) -> None:
        self._unit.manager.stopping("ending the answers in progress")
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
        await self._emptied(GRACE_S)
        num_left = len(self.server_state.tasks)
        await self._client.abandon()  # before the tasks end: they would cancel their requests
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()
        await self._emptied(_RELEASE_S)
        if num_left:
            log.info("gateway_let_go", num_answers=num_left)
        await self.lifespan.shutdown()

    async def _emptied(self, within_s: float) -> None:
        loop = asyncio.get_running_loop()
        until = loop.time() + within_s
        while (self.server_state.connections or self.server_state.tasks) and loop.time() < until:
            if self.force_exit:
                return
            await asyncio.sleep(0.02)
