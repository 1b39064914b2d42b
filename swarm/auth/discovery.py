"""Discovery of brokers on the local network by multicast DNS: announcing one, and searching.

Nothing that is found is trusted: any machine on the network can announce anything. A result only shows where to ask for
an invitation, or that a joined swarm may have a new address; only its key proves its identity.
"""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from swarm.errors import ConfigError
from swarm.version import install_command

if TYPE_CHECKING:
    from zeroconf import ServiceInfo

SERVICE: Final = "_swarm-lm._tcp.local."
MAX_ANSWERS: Final = 64  # Answers that are processed at most.
_DETAILS_S: Final = 2.0  # Timeout for the details of one answer.
_KEY: Final = re.compile(rb"[0-9a-f]{64}")
_NOT_IN_LABEL: Final = re.compile(r"[^A-Za-z0-9-]+")


@dataclass(frozen=True, slots=True, order=True)
class Announcement:
    """An unverified announcement: a broker with this public key at these addresses."""

    name: str
    key: str
    addresses: tuple[str, ...]


async def announce(name: str, addresses: Sequence[str], port: int, key: str) -> None:
    """Announce a broker until cancelled. Raises ConfigError if that is not possible here."""
    _require_zeroconf()
    from zeroconf import Error, ServiceInfo  # noqa: PLC0415 (an extra)
    from zeroconf.asyncio import AsyncZeroconf  # noqa: PLC0415

    label = _NOT_IN_LABEL.sub("-", name).strip("-")[:40] or "swarm"
    info = ServiceInfo(
        SERVICE,
        f"{label}-{key[:8]}.{SERVICE}",
        port=port,
        properties={b"key": key.encode()},
        parsed_addresses=list(addresses),
    )
    try:
        zeroconf = AsyncZeroconf(interfaces=list(addresses))
        try:
            await zeroconf.async_register_service(info, allow_name_change=True)
            await asyncio.get_running_loop().create_future()  # Runs until cancelled.
        finally:
            await zeroconf.async_close()  # Sends a goodbye packet.
    except (Error, OSError) as error:
        why = getattr(error, "strerror", None) or str(error) or type(error).__name__
        raise ConfigError(f"announcing on the local network failed ({why})") from None


async def discover(for_s: float) -> list[Announcement]:
    """Query the network and collect answers for this time. Raises ConfigError if that is not possible here."""
    _require_zeroconf()
    from zeroconf.asyncio import AsyncServiceBrowser, AsyncServiceInfo, AsyncZeroconf  # noqa: PLC0415 (an extra)

    names: dict[str, None] = {}

    def on_service(*, name: str, **_: object) -> None:
        if len(names) < MAX_ANSWERS:
            names[name] = None

    try:
        zeroconf = AsyncZeroconf()
    except OSError as error:
        raise ConfigError(f"searching the local network failed ({error.strerror or error})") from None
    try:
        browser = AsyncServiceBrowser(zeroconf.zeroconf, SERVICE, handlers=[on_service])
        await asyncio.sleep(for_s)
        infos = [AsyncServiceInfo(SERVICE, name) for name in names]
        await asyncio.gather(*(info.async_request(zeroconf.zeroconf, int(_DETAILS_S * 1000)) for info in infos))
        await browser.async_cancel()
    finally:
        await zeroconf.async_close()
    return sorted(found for info in infos if (found := parse_announcement(info)) is not None)


def parse_announcement(info: ServiceInfo) -> Announcement | None:
    """Return the announcement in a service record; None if it is incomplete or of another service."""
    key = info.properties.get(b"key")
    addresses = info.parsed_addresses()
    if key is None or _KEY.fullmatch(key) is None or not addresses or not info.port:
        return None
    shown = _NOT_IN_LABEL.sub("-", info.name.removesuffix(f".{SERVICE}"))[:63]
    places = (f"tcp://[{each}]:{info.port}" if ":" in each else f"tcp://{each}:{info.port}" for each in addresses[:8])
    return Announcement(shown, key.decode(), tuple(places))


def local_name() -> str:
    return socket.gethostname()


def _require_zeroconf() -> None:
    if importlib.util.find_spec("zeroconf") is None:
        command = install_command("discover")
        raise ConfigError(f"finding swarms on the local network needs the package zeroconf: {command}")
