"""Authentication service of the broker's process: has changes of keys written, sends connected peers what they need
about keys, disconnects revoked keys, and announces the broker on the network."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Final

from swarm.auth.discovery import announce, local_name
from swarm.auth.worker_address import address_error
from swarm.broker.auth.access import answer_without_keys, open_access_control
from swarm.broker.events import ClientAccount, KeyRevoked
from swarm.broker.requests.cpu_budget import CpuBudget
from swarm.errors import ConfigError
from swarm.log import LogRateLimiter, get_logger
from swarm.wire.channel import AsyncPullChannel, BindAddress, RouterChannel
from swarm.wire.codec import ORDER, SERVER
from swarm.wire.messages import (
    BrokerKey,
    BrokerKeyKept,
    ClientMessage,
    Denied,
    Hello,
    RotateKey,
    ServerMessage,
    WorkerMessage,
)
from swarm.wire.transport.keys import KeyPair

if TYPE_CHECKING:
    from swarm.config import Settings

LOOK_S: Final = 5.0  # between two checks whether the old key is still needed

log = get_logger(__name__)


class AuthService:
    """Key management of the broker's process (see the module). Without addresses for other machines there are no keys,
    and every local peer has all permissions."""

    def __init__(self, settings: Settings) -> None:
        """Read or make the broker's keys, if other machines are to be served. Raises ConfigError."""
        self._access = open_access_control(settings)
        self._host, self._port = settings.broker.host, settings.broker.port
        self._is_discoverable = settings.broker.discoverable
        self._worker_networks = tuple(map(ipaddress.ip_network, settings.broker.worker_networks))
        # by name: sockets whose peers are checked again when keys change
        self._sockets: Mapping[str, RouterChannel | AsyncPullChannel] = {}
        self._client_socket: RouterChannel | None = None
        self._worker_socket: RouterChannel | None = None
        self._key_changed = asyncio.Event()
        self._cpu_budget = CpuBudget()
        self._log_limiter = LogRateLimiter()  # limits the log lines about clients that use it up

    # --- sockets -----------------------------------------------------------------------------------------------------

    def bind_addresses(self, socket: str) -> list[BindAddress]:
        """Return the addresses at which this socket listens."""
        return [BindAddress(self._host)] if self._access is None else self._access.bind_addresses(self._host, socket)

    def port(self, number: int) -> int | None:
        """Return the port of a socket that is announced to workers, fixed for firewalls. None, without keys: any free
        port."""
        return None if self._access is None else self._port + number

    @property
    def addresses(self) -> tuple[str, ...]:
        """Addresses at which other machines are served."""
        return () if self._access is None else self._access.addresses

    @property
    def key_pair(self) -> KeyPair | None:
        """Key pair with which the broker connects to the first stage; made for this process."""
        return None if self._access is None else self._access.process_pair

    def attach(
        self,
        sockets: Mapping[str, RouterChannel | AsyncPullChannel],
        client_socket: RouterChannel,
        worker_socket: RouterChannel,
        feed: Callable[[KeyRevoked], None],
        local_workers: Callable[[], Collection[str]] = tuple,
    ) -> None:
        """Attach the sockets. ``feed`` receives an event for each revoked key. ``local_workers`` returns the names of
        local workers."""
        self._sockets, self._client_socket, self._worker_socket = sockets, client_socket, worker_socket
        if self._access is None:
            return

        def on_key_lost(key: str) -> None:
            for channel in sockets.values():
                channel.drop_unauthorized()
            feed(KeyRevoked(key))

        self._access.on_key_lost, self._access.on_broker_key_changed, self._access.on_rotation_ordered = (
            on_key_lost,
            self._on_broker_key_changed,
            self._on_rotation_ordered,
        )
        self._access.local_workers = local_workers

    def allow_keys(self, socket: str, keys: frozenset[str]) -> None:
        """Set the allow-list of one of the broker's sockets, and disconnect peers whose keys are not in it."""
        if self._access is not None:
            self._access.allow_keys(socket, keys)
            self._sockets[socket].drop_unauthorized()

    # --- messages and their senders ----------------------------------------------------------------------------------

    def account(self, key: str) -> ClientAccount | None:
        """Return the account of a peer that connected with this key; None: a local peer, or an admin."""
        return self._access.account(key) if self._access is not None and key else None

    def owner(self, key: str) -> str:
        """Return the member whose worker this is; empty: a local worker."""
        return "" if self._access is None else self._access.owner(key)

    def charge(self, client: bytes, key: str, seconds: float, now: float) -> None:
        """Charge a client for the time that its message has taken; beyond its budget, reading from it is paused."""
        if self._access is None or self._client_socket is None or not self._access.is_limited(key):
            return
        if rest_s := self._cpu_budget.charge(key, seconds, now):
            self._client_socket.pause_reading(client, rest_s)
            if (left_out := self._log_limiter.take(now)) is not None:
                log.warning("client_floods", name=self._access.owner(key), rest_s=round(rest_s, 2), left_out=left_out)

    def handle_client_message(self, client: bytes, key: str, message: ClientMessage) -> bool:
        """Handle a message about keys, or one that the client may not send. The client gets an answer now, or when the
        change is on the disk. Return False for any other message."""
        if self._access is not None:
            return self._access.handle_client_message(key, message, lambda answer: self._answer(client, answer))
        if (answer := answer_without_keys(message)) is not None:
            self._answer(client, answer)
        return answer is not None

    def _answer(self, client: bytes, answer: ServerMessage) -> None:
        if self._client_socket is not None:
            self._client_socket.send(client, SERVER.encode(answer))

    def handle_worker_message(self, worker: bytes, key: str, message: WorkerMessage) -> bool:
        """Handle a worker's message about keys, or a Hello with a name that its key does not allow. Return False for
        any other message."""
        if isinstance(message, BrokerKeyKept):
            if self._access is not None:
                self._access.record_broker_key(key, message.key)
            return True
        if self._access is None or not isinstance(message, Hello):
            return False
        if reason := self._access.name_error(key, message.name):
            log.warning("worker_denied", worker=message.name, reason=reason)
            if self._worker_socket is not None:
                self._worker_socket.send(
                    worker, ORDER.encode(Denied(reason=reason), version=self._worker_socket.version_of(worker))
                )
        return bool(reason)

    def address_error(self, worker: bytes, key: str, message: WorkerMessage) -> str:
        """Return why other workers may not connect to the address that a worker names; empty: they may. A peer without
        a key is on this machine and has all permissions."""
        if self._worker_socket is None or not key or not isinstance(message, Hello):
            return ""
        return address_error(message.endpoint, self._worker_socket.remote_address(worker), self._worker_networks)

    def on_greeting(self, socket: RouterChannel, peer: bytes, key: str) -> None:
        """Send a connecting peer the key changes that it has missed."""
        encode = SERVER.encode if socket is self._client_socket else ORDER.encode
        for message in () if self._access is None else self._access.pending_messages(key):
            socket.send(peer, encode(message))

    def _on_broker_key_changed(self) -> None:
        self._key_changed.set()
        if self._access is not None:
            self._broadcast(BrokerKey(key=self._access.broker_keys.public), lambda key: True)

    def _on_rotation_ordered(self, member: str) -> None:
        self._broadcast(RotateKey(), member.__eq__)

    def _broadcast(self, message: BrokerKey | RotateKey, is_recipient: Callable[[str], bool]) -> None:
        for door, frames in (
            (self._client_socket, SERVER.encode(message)),
            (self._worker_socket, ORDER.encode(message)),
        ):
            for peer, key in [] if door is None else door.authenticated_peers():
                if is_recipient(key) and door is not None:
                    door.send(peer, frames)  # a peer that does not read gets it when it connects again

    # --- background tasks --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Carry out changes and announcements, until cancelled."""
        if self._access is None:
            return
        async with asyncio.TaskGroup() as group:
            group.create_task(self._access.writer.run())
            group.create_task(self._expire_former_key())
            group.create_task(self._advertise())

    async def _expire_former_key(self) -> None:
        """Drop the old key once it is not needed any more. Polls, since invitations expire without an event."""
        while self._access is not None:
            await asyncio.sleep(LOOK_S)
            self._access.drop_former_key()

    async def _advertise(self) -> None:
        """Announce the broker while it runs, if configured; again after each change of its key."""
        while self._is_discoverable:
            self._key_changed.clear()
            announcement = asyncio.create_task(self._announce(), name="announce the broker")
            try:
                await self._key_changed.wait()
            finally:
                announcement.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await announcement

    async def _announce(self) -> None:
        """Announce the broker's addresses and key. If that fails, the broker serves nevertheless."""
        if self._access is None:
            return
        try:
            await announce(local_name(), self._access.addresses, self._port, self._access.broker_keys.public)
        except ConfigError as error:
            log.warning("not_discoverable", reason=str(error))
