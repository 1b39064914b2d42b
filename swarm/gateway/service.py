"""The gateway's process: a server, a client of the broker, and the end in good order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import uvicorn
import uvloop

from swarm.client.client import AsyncClient
from swarm.gateway.app import make_app
from swarm.gateway.desk.desk import Desk
from swarm.log import get_logger

if TYPE_CHECKING:
    from swarm.config import Settings

GRACE_S = 3.0  # for answers under way, when told to stop

log = get_logger(__name__)


def run(settings: Settings) -> int:
    """Serve until SIGTERM or SIGINT; the process's exit code."""
    return uvloop.run(_main(settings))


async def _main(settings: Settings) -> int:
    own = settings.gateway
    client = AsyncClient(
        settings.client.url,
        connect_timeout_s=settings.client.connect_timeout_s,
        reconnect_timeout_s=settings.client.reconnect_timeout_s,
    )
    app = make_app(Desk(client, own.aliases))
    config = uvicorn.Config(
        app,
        host=own.host,
        port=own.port,
        log_config=None,
        access_log=False,
        lifespan="on",
        server_header=False,
        timeout_graceful_shutdown=int(GRACE_S),
    )
    server = uvicorn.Server(config)
    log.info("gateway_listens", url=f"http://{own.host}:{own.port}", broker=settings.client.url)
    await server.serve()
    return 0 if server.started else 1
