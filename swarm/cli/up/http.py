"""The gateway of ``swarm up``: whether it can run, on which port, and the message once it serves."""

from __future__ import annotations

import asyncio
import json
import socket
from pathlib import Path
from typing import TYPE_CHECKING

from swarm.api_keys.file import NAME
from swarm.cli.meta.packages import missing_packages
from swarm.cli.output import ConsoleProgress
from swarm.errors import ConfigError

if TYPE_CHECKING:
    from swarm.config import GatewaySettings

_POLL_S = 0.1
_REQUEST_TIMEOUT_S = 1.0
_MAX_ANSWER_BYTES = 1 << 13  # longest accepted answer; the gateway's has about 300 bytes


def unavailable_reason(settings: GatewaySettings, broker_ports: range) -> str:
    """Return why there can be no gateway; empty if there can.

    ``broker_ports`` are the ports of the swarm's own broker. Raises ``ConfigError`` if a port was configured explicitly
    and is in use. The default port being in use does not stop a swarm.
    """
    if lacking := missing_packages("gateway"):
        return f"no HTTP: {lacking}"
    if not (trouble := _port_error(settings.host, settings.port, broker_ports)):
        return ""
    if "port" in settings.model_fields_set or "host" in settings.model_fields_set:
        raise ConfigError(f"{trouble}; choose another one with --http, or --no-http")
    return f"no HTTP: {trouble}; choose another one with --http"


def url_of(settings: GatewaySettings) -> str:
    return _url(settings.host, settings.port)


def _page_url(settings: GatewaySettings) -> str:
    """Return the console's address, as a browser on this machine opens it."""
    return f"{_url(_local_host(settings.host), settings.port)}/"


def _local_host(host: str) -> str:
    """Return an address that this machine can connect to: a wildcard address is only for listening."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def _url(host: str, port: int) -> str:
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _port_error(host: str, port: int, broker_ports: range) -> str:
    if port in broker_ports:
        return f"port {port} is one of the swarm's own ports ({', '.join(map(str, broker_ports))})"
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return f"can't serve at port {port} of {host} ({error.strerror})"
    return ""


class GatewayPoller:
    """A :class:`~swarm.cli.up.runner.GatewayWatch`: polls until the gateway answers, then reports its URL, after each
    start."""

    def __init__(self, settings: GatewaySettings, directory: Path, progress: ConsoleProgress) -> None:
        self._settings = settings
        self._keys_file = settings.keys_file or directory / NAME
        self._progress = progress
        self._started = asyncio.Event()

    def on_started(self) -> None:
        self._started.set()

    async def run(self) -> None:
        while True:
            await self._started.wait()
            self._started.clear()
            # another process answers; there is no event to wait for
            while not await self._is_serving():  # noqa: ASYNC110 (another process answers: no event)
                await asyncio.sleep(_POLL_S)
            url = url_of(self._settings)
            has_keys = self._keys_file.exists()
            note = "" if has_keys else "; without API keys, for this machine alone"
            lines = [f"http: {url} (OpenAI's clients: {url}/v1){note}"]
            event: dict[str, object] = {"event": "http", "url": url, "keys": has_keys}
            if self._settings.console:
                event["console"] = _page_url(self._settings)
                lines.append(f"console: {event['console']}")
            self._progress.report(lines, event)

    async def _is_serving(self) -> bool:
        """Whether the gateway is alive. Another program may have its port."""
        try:
            async with asyncio.timeout(_REQUEST_TIMEOUT_S):
                return is_alive(await _fetch_health(_local_host(self._settings.host), self._settings.port))
        except (OSError, TimeoutError):
            return False


async def _fetch_health(host: str, port: int) -> bytes:
    """Request ``/health`` and return the answer, up to a limit."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: localhost:{port}\r\nConnection: close\r\n\r\n".encode())
        answer = b""
        while len(answer) < _MAX_ANSWER_BYTES and (part := await reader.read(_MAX_ANSWER_BYTES)):
            answer += part
        return answer
    finally:
        writer.close()


def is_alive(answer: bytes) -> bool:
    """Whether this is a gateway's answer to ``/health``."""
    head, _, body = answer.partition(b"\r\n\r\n")
    try:
        return head.startswith(b"HTTP/1.1 200 ") and json.loads(body) == {"status": "ok"}
    except ValueError:
        return False
